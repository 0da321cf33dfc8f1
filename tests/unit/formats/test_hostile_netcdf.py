"""NetCDF input behind the HDF5 guard: what a file of unknown origin may try, and that valid files are still read."""

from __future__ import annotations

import os
import shutil
import socket
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5netcdf
import h5py
import numpy as np
import pytest
import xarray

from tests.unit.inference.bundles.make import HERE as BUNDLES
from ups.cli.main import run
from ups.errors import DataError
from ups.formats.hdf5 import read_netcdf
from ups.formats.pdebench import PdebenchReader

X = np.arange(16) / 16
U = np.sin(2 * np.pi * X)


def _valid(path: Path, **variables: Any) -> Path:
    data = {"u": (("x",), U), "beta": 1.0, **variables}
    xarray.Dataset(data, {"x": X}).to_netcdf(path, engine="h5netcdf")
    return path


def _with_u(path: Path, make: Callable[[h5py.File], Any]) -> None:
    """A valid file in which the variable u is replaced by what `make` puts there."""
    _valid(path)
    with h5py.File(path, "r+") as file:
        del file["u"]
        made = make(file)
        if made is not None:
            made.dims[0].attach_scale(file["x"])


def _external_link(path: Path) -> None:
    _valid(path.with_name("private.nc"))
    _with_u(path, lambda file: file.__setitem__("u", h5py.ExternalLink("private.nc", "/u")))


def _soft_link(path: Path) -> None:
    _with_u(path, lambda file: file.__setitem__("u", h5py.SoftLink("/x")))


def _external_storage(path: Path) -> None:
    raw = path.with_name("private.bin")
    raw.write_bytes(U.tobytes())
    _with_u(path, lambda file: file.create_dataset("u", (16,), "f8", external=[(str(raw), 0, 128)]))


def _external_storage_of_a_text(path: Path) -> None:
    raw = path.with_name("private.bin")
    raw.write_bytes(U.tobytes())
    _with_u(path, lambda file: file.create_dataset("u", (16,), "S8", external=[(str(raw), 0, 128)]))


def _external_coordinate(path: Path) -> None:
    raw = path.with_name("private.bin")
    raw.write_bytes(X.tobytes())
    _valid(path)
    with h5py.File(path, "r+") as file:
        file.create_dataset("w", (16,), "f8", external=[(str(raw), 0, 128)]).make_scale("w")


def _virtual(path: Path) -> None:
    _valid(path.with_name("private.nc"))
    layout = h5py.VirtualLayout((16,), "f8")
    layout[:] = h5py.VirtualSource("private.nc", "u", (16,))
    _with_u(path, lambda file: file.create_virtual_dataset("u", layout))


def _claims_745_gib(path: Path) -> None:
    with h5netcdf.File(path, "w") as file:
        file.dimensions["x"] = 100_000_000_000
        file.create_variable("u", ("x",), "f8")


def _claims_745_gib_in_chunks(path: Path) -> None:
    with h5netcdf.File(path, "w") as file:
        file.dimensions["x"] = 100_000_000_000
        file.create_variable("u", ("x",), "f8", chunks=(1 << 20,), compression="gzip")


def _more_than_memory(path: Path) -> None:
    """Every chunk is there, and together they inflate to 8 GiB."""
    size, chunk = 1 << 30, 1 << 24
    with h5netcdf.File(path, "w") as file:
        file.dimensions["x"] = size
        file.create_variable("u", ("x",), "f8", chunks=(chunk,), compression="gzip")
    packed = zlib.compress(bytes(chunk * 8), 1)
    with h5py.File(path, "r+") as file:
        for start in range(0, size, chunk):
            file["u"].id.write_direct_chunk((start,), packed)


def _chunk_that_expands(path: Path) -> None:
    _valid(path)
    with h5py.File(path, "r+") as file:
        del file["u"]
        made = file.create_dataset("u", (16,), "f8", chunks=(16,), compression="gzip")
        made.id.write_direct_chunk((0,), zlib.compress(bytes(64), 1) + bytes(32))
        made.dims[0].attach_scale(file["x"])


def _wrong_dimension(path: Path) -> None:
    _with_u(path, lambda file: file.create_dataset("u", data=np.zeros(7)))


def _scale_in_words(path: Path) -> None:
    _valid(path)
    with h5py.File(path, "r+") as file:
        file["u"].attrs["scale_factor"] = "three"


def _nonsense_units(path: Path) -> None:
    _valid(path, time=((), 1e300, {"units": "days since 0000-99-99"}))


ATTACKS = [
    _external_link,
    _soft_link,
    _external_storage,
    _external_storage_of_a_text,
    _external_coordinate,
    _virtual,
    _claims_745_gib,
    _claims_745_gib_in_chunks,
    _more_than_memory,
    _chunk_that_expands,
    _wrong_dimension,
    _nonsense_units,
    _scale_in_words,
]


@pytest.mark.parametrize("attack", ATTACKS, ids=[a.__name__[1:] for a in ATTACKS])
def test_a_netcdf_file_that_reaches_outside_or_claims_too_much_is_refused(
    tmp_path: Path, attack: Callable[[Path], None]
) -> None:
    attack(tmp_path / "start.nc")
    with pytest.raises(DataError):
        read_netcdf(tmp_path / "start.nc")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "device", "socket", "directory", "classic"])
@pytest.mark.parametrize("read", [read_netcdf, PdebenchReader], ids=["netcdf", "pdebench"])
def test_only_regular_hdf5_files_are_opened(tmp_path: Path, kind: str, read: Callable[[Path], Any]) -> None:
    path = tmp_path / "start.nc"
    with socket.socket(socket.AF_UNIX) as server:
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "link to a pipe":
            os.mkfifo(tmp_path / "pipe")
            path.symlink_to(tmp_path / "pipe")
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "socket":
            server.bind(str(path))
        elif kind == "directory":
            path.mkdir()
        else:
            path.write_bytes(b"CDF\x01" + bytes(100))
        with pytest.raises(DataError) as caught:
            read(path)
    if kind == "classic":
        assert "classic" in caught.value.message
        assert "NetCDF-4" in caught.value.hint


@pytest.mark.timeout(30)
@pytest.mark.parametrize("command", ["inspect", "validate", "pack"])
def test_a_pipe_does_not_hang_the_data_commands(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe.h5")
    extra = ["-o", str(tmp_path / "out.zarr")] if command == "pack" else []
    assert run(["data", command, str(tmp_path / "pipe.h5"), *extra]) == 4
    printed = capsys.readouterr()
    assert "not a regular file" in printed.out + printed.err


def test_rollout_refuses_a_link_and_starts_without_coordinates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(BUNDLES / "v1" / "latent_operator", "bundle")
    os.mkfifo("pipe.nc")
    _external_link(tmp_path / "link.nc")
    _claims_745_gib(tmp_path / "huge.nc")
    xarray.Dataset({"u": (("x",), U), "beta": 1.0}).to_netcdf("bare.nc", engine="h5netcdf")
    for name in ("pipe.nc", "link.nc", "huge.nc"):
        assert run(["rollout", "bundle", name, "--task", "advection", "--steps", "2", "-o", "no.zarr"]) == 4
        assert "error: data:" in capsys.readouterr().err
    assert run(["rollout", "bundle", "bare.nc", "--task", "advection", "--steps", "2", "-o", "out.zarr"]) == 0
    assert "no coordinates for x: nothing is known about the spacing" in capsys.readouterr().err
    assert run(["data", "inspect", "bare.nc"]) == 4
    said = capsys.readouterr().err
    assert "a NetCDF file, not a PDEBench file" in said
    assert "checksum" not in said


@pytest.mark.parametrize("packing", [{}, {"zlib": True, "shuffle": True}, {"chunksizes": (3, 16)}])
def test_what_xarray_writes_is_read_as_xarray_reads_it(tmp_path: Path, packing: dict[str, Any]) -> None:
    path = tmp_path / "start.nc"
    frames = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    original = xarray.Dataset(
        {
            "u": (("time", "x"), frames, {"units": "m"}),
            "packed": (("x",), U),
            "count": (("x",), np.arange(16)),
            "beta": 0.5,
            "label": (("x",), np.array(["a"] * 16, dtype=object)),
            "bare": (("layer",), np.arange(3.0)),
        },
        {"x": X, "time": np.arange(5) * 0.5},
    )
    encoding = {"u": packing, "packed": {"dtype": "int16", "scale_factor": 1e-4, "_FillValue": -32768}}
    original.to_netcdf(path, engine="h5netcdf", encoding=encoding, unlimited_dims=["time"])
    netcdf = read_netcdf(path)
    expected = xarray.load_dataset(path, engine="h5netcdf").drop_vars("label")
    xarray.testing.assert_equal(netcdf.dataset, expected)
    assert netcdf.dataset["u"].attrs["units"] == "m"
    assert "layer" not in netcdf.dataset.coords
    assert netcdf.left_out == ("'label', which does not hold numbers",)
