"""Our store and our HDF5 reader beside zarr-python, xarray and h5netcdf, on the same bytes (docs/decisions/0023).

    python benchmarks/data/libraries.py [--rounds 5]

Writing: trajectories appended one by one to a sharded array, as a solver produces them. Reading: random windows of one
store, in interleaved rounds. Opening: metadata of one store. NetCDF: a file of gzip chunks, read whole. Every figure is
the median over rounds; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray
import zarr

from ups.formats.hdf5 import read_netcdf
from ups.formats.store_writer import StoreWriter
from ups.formats.zarr_store import StoreReader
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

COUNT, FRAMES, CHANNELS, POINTS, WINDOW = 64, 21, 3, 64, 4
SHAPE = (FRAMES, CHANNELS, POINTS, POINTS)


def write_ours(path: Path) -> None:
    """A store, one trajectory after another."""
    task = TaskSpec("t", tuple(FieldSpec(f"u{i}") for i in range(CHANNELS)), (AxisSpec("x"), AxisSpec("y")), dt=1.0)
    generator = np.random.default_rng(0)
    with StoreWriter(path, task, [np.arange(POINTS)] * 2, FRAMES) as writer:
        for _ in range(COUNT):
            writer.append("train", state=generator.random(SHAPE, np.float32))


def write_library(path: Path) -> None:
    """The same array by zarr-python, with the shards and chunks of our store."""
    generator = np.random.default_rng(0)
    array = zarr.create_array(
        path, shape=(COUNT, *SHAPE), dtype="f4", chunks=(1, *SHAPE), shards=(COUNT, *SHAPE), compressors=None
    )
    for i in range(COUNT):
        array[i] = generator.random(SHAPE, np.float32)


def seconds(action: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def read_ours(reader: StoreReader, windows: list[tuple[int, int]]) -> None:
    """Windows through our reader."""
    for trajectory, start in windows:
        reader.read("train", trajectory, start, WINDOW)


def read_library(array: zarr.Array[Any], windows: list[tuple[int, int]]) -> None:
    """The same windows through zarr-python."""
    for trajectory, start in windows:
        np.asarray(array[trajectory, start : start + WINDOW])


def open_library(path: Path) -> None:
    """The metadata that our reader looks at, by zarr-python."""
    for name in ("state", "x", "y", "time"):
        zarr.open_group(path, mode="r")[f"train/{name}"]


def import_seconds(module: str) -> float:
    """Import of a module in a new process, beyond that of numpy."""
    code = f"import numpy, time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


def netcdf_file(path: Path) -> None:
    """4 fields of 64 frames in gzip chunks."""
    values = np.random.default_rng(0).normal(size=(64, 64, 64)).astype(np.float32)
    fields = {f"u{i}": (("time", "x", "y"), values) for i in range(4)}
    encoding = {name: {"zlib": True, "chunksizes": (1, 64, 64)} for name in fields}
    xarray.Dataset(fields).to_netcdf(path, engine="h5netcdf", encoding=encoding)


def measure(folder: Path, rounds: int) -> dict[str, float]:
    """Medians in seconds."""
    times: dict[str, list[float]] = {}
    generator = np.random.default_rng(1)
    netcdf_file(folder / "a.nc")
    for number in range(rounds):
        ours, library = folder / f"ours{number}.zarr", folder / f"library{number}.zarr"
        actions: dict[str, Callable[[], object]] = {
            "write, ours": partial(write_ours, ours),
            "write, zarr": partial(write_library, library),
        }
        for name, action in actions.items():
            times.setdefault(name, []).append(seconds(action))
        reader = StoreReader(ours)
        array = zarr.open_array(ours / "train" / "state", mode="r")
        trajectories, starts = generator.integers(0, COUNT, 500), generator.integers(0, FRAMES - WINDOW, 500)
        windows = [(int(t), int(s)) for t, s in zip(trajectories, starts, strict=True)]
        actions = {
            "500 windows, ours": partial(read_ours, reader, windows),
            "500 windows, zarr": partial(read_library, array, windows),
            "open, ours": partial(StoreReader, ours),
            "open, zarr": partial(open_library, ours),
            "netcdf, ours": partial(read_netcdf, folder / "a.nc"),
            "netcdf, xarray": partial(xarray.load_dataset, folder / "a.nc", engine="h5netcdf"),
        }
        for name, action in actions.items():
            times.setdefault(name, []).append(seconds(action))
        times.setdefault("import, zarr", []).append(import_seconds("zarr"))
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    """Print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), parser.parse_args().rounds)
    for name, taken in found.items():
        print(f"{name:20} {taken * 1e3:10.2f} ms")
    print(json.dumps({name: round(taken, 6) for name, taken in found.items()}))


if __name__ == "__main__":
    main()
