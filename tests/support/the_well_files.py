"""Small files in the format of The Well, as that project's own package reads them: six kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tests.support.pdebench_files import numbers


@dataclass
class Dataset:
    """A field, a scalar or a coordinate: its values, and along what they vary."""

    values: np.ndarray
    sample: bool = True
    time: bool = True
    dims: tuple[bool, ...] = ()


@dataclass
class Content:
    """What a file holds. fields: rank -> name -> data. masks: group -> (axes, kind, mask)."""

    name: str
    axes: dict[str, np.ndarray]
    time: np.ndarray
    trajectories: int
    fields: dict[int, dict[str, Dataset]] = field(default_factory=dict)
    scalars: dict[str, Dataset] = field(default_factory=dict)
    masks: dict[str, tuple[list[str], str, np.ndarray]] = field(default_factory=dict)
    parameters: dict[str, float] = field(default_factory=dict)


def write(path: Path, content: Content, **storage: Any) -> Content:
    """Write a file with every attribute of the format. storage: of the fields; chunks="frame" is a chunk for each."""
    with h5py.File(path, "w") as file:
        file.attrs["dataset_name"] = content.name
        file.attrs["grid_type"] = "cartesian"
        file.attrs["n_spatial_dims"] = len(content.axes)
        file.attrs["n_trajectories"] = content.trajectories
        file.attrs["simulation_parameters"] = list(content.parameters)
        file.attrs.update(content.parameters)
        dimensions = file.create_group("dimensions")
        dimensions.attrs["spatial_dims"] = list(content.axes)
        for name, values in {"time": content.time, **content.axes}.items():
            dimensions[name] = values
            dimensions[name].attrs["sample_varying"] = values.ndim == 2
            dimensions[name].attrs["time_varying"] = False
        _write_group(file, "scalars", content.scalars, len(content.axes), {})
        for rank in range(3):
            _write_group(file, f"t{rank}_fields", content.fields.get(rank, {}), len(content.axes), storage)
        boundaries = file.create_group("boundary_conditions")
        for name, (axes, kind, mask) in content.masks.items():
            group = boundaries.create_group(name)
            group.attrs["associated_dims"] = axes
            group.attrs["associated_fields"] = []
            group.attrs["bc_type"] = kind
            group.attrs["sample_varying"] = False
            group.attrs["time_varying"] = False
            group["mask"] = mask
    return content


def _write_group(file: h5py.File, name: str, content: dict[str, Dataset], dims: int, storage: dict[str, Any]) -> None:
    group = file.create_group(name)
    group.attrs["field_names"] = list(content)
    for key, data in content.items():
        options = dict(storage) if data.values.ndim > 2 else {}
        if options.get("chunks") == "frame":
            ones = data.sample + data.time
            options["chunks"] = (1,) * ones + data.values.shape[ones:]
        dataset = group.create_dataset(key, data=data.values, **options)
        dataset.attrs["sample_varying"] = data.sample
        dataset.attrs["time_varying"] = data.time
        if name != "scalars":
            dataset.attrs["dim_varying"] = list(data.dims or (True,) * dims)


def ends(size: int) -> np.ndarray:
    """A mask of one axis: true at both ends."""
    mask = np.zeros(size, bool)
    mask[[0, -1]] = True
    return mask


def _axes(*space: int) -> dict[str, np.ndarray]:
    return {name: np.linspace(0, 1, n, dtype=np.float32) for name, n in zip("xyz", space, strict=False)}


def plain(name: str, count: int, frames: int, *space: int) -> Content:
    """One scalar field in a periodic domain."""
    axes = _axes(*space)
    time = (np.arange(frames) * 0.25).astype(np.float32)
    masks = {f"{axis}_periodic": ([axis], "PERIODIC", ends(len(points))) for axis, points in axes.items()}
    density = Dataset(numbers(count, frames, *space, seed=1))
    return Content(name, axes, time, count, {0: {"density": density}}, masks=masks)


def two_dims(count: int = 4, frames: int = 9, size: int = 12) -> Content:
    """Two scalar fields on a plane, periodic and with walls, with constant parameters."""
    content = plain("two_dims", count, frames, size, 8)
    content.fields[0]["pressure"] = Dataset(numbers(count, frames, size, 8, seed=2))
    content.masks["y_wall"] = (["y"], "WALL", ends(8))
    del content.masks["y_periodic"]
    content.parameters = {"viscosity": 1e-3, "gamma": 1.4}
    content.scalars = {n: Dataset(np.array(v), sample=False, time=False) for n, v in content.parameters.items()}
    return content


def three_dims() -> Content:
    """A scalar and a vector field in space, open at one axis."""
    content = plain("three_dims", 3, 6, 6, 5, 4)
    content.fields[1] = {"velocity": Dataset(numbers(3, 6, 6, 5, 4, 3, seed=3))}
    content.masks["z_open"] = (["z"], "OPEN", ends(4))
    del content.masks["z_periodic"]
    return content


def vectors_and_tensors() -> Content:
    """Scalars, vectors and tensors that vary in time; a parameter that varies from trajectory to trajectory."""
    content = plain("vectors_and_tensors", 3, 7, 8, 6)
    content.fields[1] = {"velocity": Dataset(numbers(3, 7, 8, 6, 2, seed=4))}
    content.fields[2] = {"strain": Dataset(numbers(3, 7, 8, 6, 2, 2, seed=5))}
    content.scalars = {
        "alpha": Dataset(np.array([0.5, 1.0, 2.0], np.float32), time=False),
        "forcing": Dataset(numbers(7), sample=False, time=True),
    }
    return content


def static_fields() -> Content:
    """Fields that do not vary in time: of each trajectory, of all, along one axis only, and a vector."""
    content = plain("static_fields", 3, 6, 8, 6)
    content.fields[0]["speed_of_sound"] = Dataset(numbers(3, 8, 6, seed=6), time=False)
    content.fields[0]["height"] = Dataset(numbers(8, 6, seed=7), sample=False, time=False)
    content.fields[0]["profile"] = Dataset(numbers(6, seed=8), sample=False, time=False, dims=(False, True))
    content.fields[1] = {"drift": Dataset(numbers(3, 8, 6, 2, seed=9), time=False)}
    return content


def masks() -> Content:
    """Walls inside the domain, walls around it, and an axis with an open and a closed end."""
    content = plain("masks", 3, 6, 8, 6)
    inner = np.zeros((8, 6), bool)
    inner[3:5, 2:4] = True
    inner[0], inner[:, 0] = True, True
    left = np.zeros(8, bool)
    left[-1] = True
    content.masks = {"xy_wall": (["x", "y"], "WALL", inner), "x_open": (["x"], "OPEN", left)}
    return content


def varying_time() -> Content:
    """Times and time steps that vary from trajectory to trajectory."""
    content = plain("varying_time", 3, 6, 8, 6)
    steps = np.array([0.1, 0.2, 0.3], np.float32)
    content.time = (steps[:, None] * np.arange(6)).astype(np.float32)
    return content


KINDS: dict[str, Callable[[], Content]] = {
    "two_dims": two_dims,
    "three_dims": three_dims,
    "vectors_and_tensors": vectors_and_tensors,
    "static_fields": static_fields,
    "masks": masks,
    "varying_time": varying_time,
}


def damaged_bases(folder: Path) -> list[bytes]:
    """The bytes of files of all kinds, contiguous and in compressed chunks, to damage."""
    contents = []
    for make in KINDS.values():
        for storage in ({}, {"chunks": True, "compression": "gzip", "shuffle": True}):
            path = folder / "base.h5"
            write(path, make(), **storage)
            contents.append(path.read_bytes())
            path.unlink()
    return contents


def write_set(folder: Path, contents: dict[str, list[Content]], **storage: Any) -> Path:
    """A data set as it is published: folder/data/SPLIT/NUMBER.hdf5."""
    for split, files in contents.items():
        (folder / "data" / split).mkdir(parents=True)
        for number, content in enumerate(files):
            write(folder / "data" / split / f"{number}.hdf5", content, **storage)
    return folder
