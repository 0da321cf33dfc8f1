"""Which container a path is: recognized by its first bytes, here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ups.buckets.path import BucketPath, data_path, natural
from ups.config.description import TaskDescription
from ups.errors import DataError
from ups.formats.container import NUMPY_MAGIC, ZIP_MAGIC, Container, open_numpy, open_numpy_folder
from ups.formats.container_hdf5 import open_hdf5
from ups.formats.hdf5 import HDF5_MAGIC, MATLAB_TEXT, first_bytes, starts_as_hdf5
from ups.formats.mesh_grid import mesh_files, open_meshes

_ZARR = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")
_SUFFIXES = (".npy", ".npz", ".mat", ".h5", ".hdf5", ".nc", ".zarr")


def open_container(path: str | Path) -> Container:
    """The arrays of a file or of a Zarr directory, recognized by its first bytes. Raises DataError."""
    path = data_path(path).absolute()
    if path.is_dir():
        from ups.formats.container_zarr import open_zarr  # zarr takes a second to import, and no store of ups needs it

        _refuse_bucket(path, "a Zarr group of another kind than a store of ups")
        return open_zarr(path)
    start = first_bytes(path, 520)
    if start.startswith((NUMPY_MAGIC, ZIP_MAGIC)):
        _refuse_bucket(path, "a NumPy file")
        return open_numpy(path)
    if starts_as_hdf5(start) or start.startswith((b"CDF", MATLAB_TEXT)) or path.suffix == ".mat":
        return open_hdf5(path)
    raise DataError(
        f"{path} is none of the formats that are read, or cannot be opened",
        hint="these are NumPy (.npy, .npz), HDF5, MATLAB 7.3, NetCDF-4 and Zarr; np.save and xarray's to_netcdf write "
        "such files",
    )


def _refuse_bucket(path: Path, what: str) -> None:
    if isinstance(path, BucketPath):
        raise DataError(
            f"{path} is {what}, which is read from a disk only",
            hint="copy it here, or make a store of it with `ups data import` and put that into the bucket",
        )


def open_containers(paths: Iterable[str | Path], description: TaskDescription | None = None) -> list[Container]:
    """The arrays of several files or folders; a file with groups of unequal length gives one for each group.

    description: has the grid of files of points, if it is known."""
    listed = [data_path(path) for path in paths]
    meshes = [mesh_files(path) for path in listed]
    if meshes and all(meshes):
        return open_meshes([file.absolute() for files in meshes for file in files], description)
    parts: list[Container] = []
    for path in listed:
        files = folder_files(path)
        if files and files[0].suffix == ".npy":
            parts += open_numpy_folder(path.absolute(), files)
        else:
            parts += [part for file in files or [path] for part in open_container(file).parts()]
    return parts


def folder_files(path: Path) -> list[Path]:
    """The files of arrays, all of one kind, in a folder that is no Zarr group; none of any other path."""
    if isinstance(path, BucketPath) or not path.is_dir() or any((path / name).exists() for name in _ZARR):
        return []
    files = sorted((file for file in path.iterdir() if file.name[0] != "."), key=lambda file: natural(file.name))
    # No pipe or device: it would be waited for.
    files = [file for file in files if file.is_file() or (file.suffix == ".zarr" and file.is_dir())]
    by_suffix = ([file for file in files if file.suffix == suffix] for suffix in _SUFFIXES)
    return next((files for files in by_suffix if files), [])


def needs_description(path: Path) -> bool:
    """Whether a path holds arrays of a format that never says what they mean: NumPy, MATLAB, or Zarr of version 2."""
    if path.is_dir():
        return any((path / name).is_file() for name in _ZARR[1:]) or bool(folder_files(path) or mesh_files(path))
    # Older files of MATLAB are refused by whoever opens them: 'MATLAB 5.0', also where they were saved by version 7.
    return first_bytes(path).startswith((NUMPY_MAGIC, ZIP_MAGIC, MATLAB_TEXT + b" 7"))


def is_container(path: Path) -> bool:
    """Whether a path looks like one that `open_container` opens, by its first bytes."""
    if path.is_dir():
        return needs_description(path) or (path / "zarr.json").is_file()
    return first_bytes(path).startswith((NUMPY_MAGIC, ZIP_MAGIC, HDF5_MAGIC, MATLAB_TEXT, b"CDF"))
