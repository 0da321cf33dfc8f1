"""A rollout as a VTKHDF file, which ParaView opens: an image of the grid with a step for each frame (h5py alone).

The format: https://docs.vtk.org/en/latest/vtk_file_formats/vtkhdf_file_format. Arrays have the order time, z, y, x,
component; axes that a task does not have are absent. Vectors get three components and tensors nine, as ParaView
wants them, filled up with zeros.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ups.errors import BundleError
from ups.record.files import machine_error, temporary_name
from ups.spec.grid import uneven_axes
from ups.spec.task import FieldSpec, TaskSpec

if TYPE_CHECKING:
    import xarray

SUFFIX = ".vtkhdf"
VERSION = (2, 0)


def write_vtkhdf(result: xarray.Dataset, task: TaskSpec, path: Path) -> None:
    """Write what `Simulator.rollout` returned for one sample to a new file, frame by frame.

    Raises BundleError for a grid that is not uniform, for several samples or members, and if the file exists.
    """
    import h5py

    check_new(path)
    many = [dim for dim in ("sample", "member") if dim in result.dims]
    if many:
        raise BundleError(f"a VTKHDF file holds one rollout; this one has several along '{many[0]}'", hint="write Zarr")
    names = [axis.name for axis in task.axes]
    coordinates = tuple(np.asarray(result[name].values, np.float64) for name in names)
    uneven = uneven_axes(task.axes, coordinates)
    if uneven:
        raise BundleError(
            f"the points along {', '.join(uneven)} are not equally far apart, and an image has equal distances",
            hint="write NetCDF or Zarr",
        )
    temporary = temporary_name(path)
    try:
        with h5py.File(temporary, "w") as file:
            _write(file.create_group("VTKHDF"), result, task, coordinates)
        os.rename(temporary, path)
    except OSError as error:
        raise machine_error(f"cannot write {path}", error) from error
    finally:
        temporary.unlink(missing_ok=True)


def check_new(path: Path) -> None:
    """Raise BundleError unless a file of that name can be made."""
    if path.exists():
        raise BundleError(f"'{path}' exists already", hint="choose another name, or remove it first")
    if not path.parent.is_dir():
        raise BundleError(f"there is no directory '{path.parent}' to write '{path.name}' into")


def _write(group: Any, result: xarray.Dataset, task: TaskSpec, coordinates: tuple[Any, ...]) -> None:
    sizes = [len(points) for points in coordinates] + [1] * (3 - len(coordinates))
    group.attrs["Version"] = np.array(VERSION, np.int64)
    group.attrs.create("Type", b"ImageData", dtype="S9")  # of fixed length: what VTK expects
    group.attrs["WholeExtent"] = np.array([n for size in sizes for n in (0, size - 1)], np.int64)
    group.attrs["Origin"] = np.array([*(points[0] for points in coordinates), 0.0, 0.0][:3], np.float64)
    spacing = [(points[-1] - points[0]) / (len(points) - 1) for points in coordinates]
    group.attrs["Spacing"] = np.array([*spacing, 1.0, 1.0][:3], np.float64)
    group.attrs["Direction"] = np.eye(3).reshape(-1)
    group.attrs["warnings"] = str(result.attrs.get("warnings", ""))  # VTK does not show it
    times = np.zeros(1) if task.steady else np.asarray(result["time"].values, np.float64)
    steps = group.create_group("Steps")
    steps.attrs["NSteps"] = np.int64(len(times))
    steps["Values"] = times
    points, offsets = group.create_group("PointData"), steps.create_group("PointDataOffsets")
    for field in task.fields_of(task.predicted):
        tail = (3**field.tensor_rank,) if field.tensor_rank else ()
        shape = (*(len(values) for values in reversed(coordinates)), *tail)
        array = points.create_dataset(field.name, (len(times), *shape), np.float32, chunks=(1, *shape))
        for number in range(len(times)):
            frame = result[field.name] if task.steady else result[field.name].isel(time=number)
            frame = frame.transpose(..., *(axis.name for axis in task.axes))
            array[number] = _turned(np.asarray(frame.values, np.float32), field, len(coordinates))
        offsets[field.name] = np.arange(len(times), dtype=np.int64)
    group["PointData"].attrs["Scalars"] = next((f.name for f in task.fields_of(task.predicted)), "")


def _turned(values: Any, field: FieldSpec, dims: int) -> Any:
    """([component,] x[, y, z]) -> (z, y, x[, component])."""
    rank = field.tensor_rank
    if not rank:
        return values.transpose()
    components = values.reshape(*(dims,) * rank, *values.shape[1:])
    full = np.zeros((*(3,) * rank, *components.shape[rank:]), np.float32)
    full[(slice(0, dims),) * rank] = components
    flat = full.reshape(3**rank, *components.shape[rank:])  # rows of a tensor one after another
    return flat.transpose()
