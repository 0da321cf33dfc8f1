"""The result of a rollout as an xarray.Dataset, in memory or streamed to a file (NetCDF, Zarr), and as VTKHDF.

Variables are fields by name with dimensions (sample, member, time, [component,] *axes); `sample` only where the input
had it, `member` only in an ensemble. Each sample has `warnings` (bit flags, see `ups.inference.trust`) and `blew_up`,
with the step as `diverged_at` and a mask along time as `diverged`. The attributes of these names say the same in words,
and are empty where there is nothing to say. Further attributes are those of the CF conventions (`ups.spec.grid`).

A file is written under a temporary name and renamed at the end, so that a result is always whole. Memory holds one
chunk, whatever the number of steps. Zarr stores have consolidated metadata, so that they open with one request over a
network. A VTKHDF file, which ParaView opens, is an image of the grid with a step for each frame
(https://docs.vtk.org/en/latest/vtk_file_formats/vtkhdf_file_format). Its arrays have the order time, z, y, x,
component. Vectors get three components and tensors nine, as ParaView wants them, filled up with zeros.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups.errors import BundleError
from ups.formats.mesh_hdf5 import filled_up, vtk_group
from ups.inference.calibration import Watch
from ups.inference.inputs import Start
from ups.inference.trust import KINDS, MAX_NAMED_SAMPLES, Trust
from ups.record.files import machine_error, machine_errors, temporary_name
from ups.record.manifest import make_temporary
from ups.spec import grid
from ups.spec.task import FieldSpec, TaskSpec

if TYPE_CHECKING:
    import xarray


Frame = npt.NDArray[np.float32]
Variable = tuple[tuple[str, ...], Any, dict[str, Any]]
MEMBER = "member"
MAX_MEMORY_BYTES = 8 * 2**30
# Frames are buffered up to this size before they are written as one chunk.
CHUNK_BYTES = 8 * 2**20
NETCDF_SUFFIXES = (".nc", ".nc4", ".cdf")
VTKHDF_SUFFIX = ".vtkhdf"


class Layout:
    """Names, dimensions, coordinates and units of a result of `num_frames` frames, `every` steps apart.

    facts: further attributes of the result.
    members: of an ensemble, which has an axis of its own then; frames hold those of a sample one behind the other.
    reversed_axes: variables lie in the order z, y, x.
    """

    def __init__(
        self,
        task: TaskSpec,
        start: Start,
        num_frames: int,
        every: int,
        trust: Trust,
        facts: dict[str, str],
        members: int | None = None,
        *,
        reversed_axes: bool = False,
    ) -> None:
        self.task = task
        self.reversed_axes = reversed_axes
        self.fields = task.fields_of(task.predicted)
        self.space = start.domain.resampling.given
        self.num_samples = start.batch.num_samples
        self.members = members
        self.num_frames, self.every = num_frames, every
        self.start_time, self.dt = start.time, start.dt
        self.batched = start.batched
        self.attributes = {"Conventions": grid.CONVENTIONS, **facts, **trust.attributes()}
        self.trust = trust
        self.coordinates: dict[str, npt.NDArray[Any]] = {
            axis.name: values for axis, values in zip(task.axes, start.domain.coordinates, strict=True)
        }
        self.labels: dict[str, dict[str, Any]] = {axis.name: grid.axis_attributes(axis) for axis in task.axes}
        if not task.steady:
            self.coordinates["time"] = np.asarray(
                start.time + start.dt * every * np.arange(1, num_frames + 1), np.float64
            )
            self.labels["time"] = grid.time_attributes(task)
        self.labels |= {field.name: grid.field_attributes(field) for field in self.fields}
        if members is not None:
            self.coordinates[MEMBER] = np.arange(members)
            self.labels[MEMBER] = {"standard_name": "realization", "long_name": "member of the ensemble"}
        for field in self.fields:
            for dim in grid.component_dim(task, field):
                if dim not in self.labels:
                    self.coordinates[dim] = np.array(grid.component_labels(task, field), dtype=object)
                    self.labels[dim] = {"long_name": "component of a vector or tensor, by axis"}
        values = start.batch.parameters.numpy()
        # What is stated about errors, of a bundle that was calibrated.
        self.watch: Watch | None = None
        self.parameters = {p.name: (grid.field_attributes(p), values[:, i]) for i, p in enumerate(task.parameters)}

    @property
    def num_rows(self) -> int:
        """Trajectories in a frame: samples, or all members of all samples."""
        return self.num_samples * (self.members or 1)

    @property
    def lead(self) -> tuple[str, ...]:
        """Dimensions before time."""
        return (("sample",) if self.batched else ()) + (() if self.members is None else (MEMBER,))

    @property
    def num_bytes(self) -> int:
        channels = self.task.num_channels(self.task.predicted)
        return 4 * self.num_rows * self.num_frames * channels * int(np.prod(self.space))

    def components(self, field: FieldSpec) -> int:
        return field.num_channels(self.task.num_spatial_dims)

    def dims(self, field: FieldSpec) -> tuple[str, ...]:
        lead = self.lead
        lead += () if self.task.steady else ("time",)
        lead += grid.component_dim(self.task, field)
        axes = tuple(a.name for a in self.task.axes)
        return (*lead, *(axes[::-1] if self.reversed_axes else axes))

    def shape(self, field: FieldSpec, num_frames: int) -> tuple[int, ...]:
        """The shape that `dims` names."""
        sizes = {"sample": self.num_samples, MEMBER: self.members or 1, "time": num_frames}
        sizes |= dict.fromkeys(grid.component_dim(self.task, field), self.components(field))
        sizes |= {axis.name: points for axis, points in zip(self.task.axes, self.space, strict=True)}
        return tuple(sizes[name] for name in self.dims(field))

    def squeeze(self, field: FieldSpec, values: Frame) -> Frame:
        """(row, time, component, *S) -> the shape that `dims` names."""
        if not field.tensor_rank:
            values = values[:, :, 0]
        if self.task.steady:
            values = values[:, 0]
        if self.reversed_axes:
            lead = values.ndim - len(self.space)
            values = values.transpose(*range(lead), *range(values.ndim - 1, lead - 1, -1))
        return self.by_sample(values)

    def by_sample(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(row, ...) -> with the dimensions of `lead` in front."""
        if self.members is not None:
            values = values.reshape(-1, self.members, *values.shape[1:])
        return values if self.batched else np.asarray(values[0])

    def split(self, frames: Frame) -> dict[str, Frame]:
        """(row, T, C, *S) -> field name -> values of the shape that `dims` names."""
        parts, first = {}, 0
        for field in self.fields:
            last = first + self.components(field)
            parts[field.name] = self.squeeze(field, frames[:, :, first:last])
            first = last
        return parts

    def dataset(self, divergence: Divergence, fields: Mapping[str, Frame]) -> xarray.Dataset:
        """The result with these fields, and with everything else that belongs to it."""
        import xarray

        variables = self.variables(divergence, fields)
        coordinates = {name: variables.pop(name) for name in self.coordinates}
        return xarray.Dataset(variables, coordinates, self.attributes | divergence.attributes())

    def variables(self, divergence: Divergence, fields: Mapping[str, Frame]) -> dict[str, Variable]:
        """Name -> (dimensions, values, attributes) of everything in a result, coordinates at the end."""
        variables: dict[str, Variable] = {
            field.name: (self.dims(field), fields[field.name], self.labels[field.name])
            for field in self.fields
            if field.name in fields
        }
        for name, (labels, values) in self.parameters.items():
            variables[name] = (("sample",), values, labels) if self.batched else ((), values[0], labels)
        variables |= self.per_sample(divergence)
        return variables | {name: ((name,), values, self.labels[name]) for name, values in self.coordinates.items()}

    def per_sample(self, divergence: Divergence) -> dict[str, Variable]:
        """Name -> (dimensions, values, attributes) of what is said about each sample."""
        step = divergence.first_step
        diverged = (step > 0).reshape(self.num_samples, -1).any(axis=1)  # (B,): of members any
        flags = self.trust.flags | (diverged << KINDS.index("diverged")).astype(np.int32)
        if self.watch is not None:
            flags |= ((self.watch.outside_at > 0) << KINDS.index("outside")).astype(np.int32)
        flags = flags if self.batched else np.asarray(flags[0])
        values: dict[str, Variable] = {
            "warnings": (("sample",) if self.batched else (), flags, self.trust.flag_attributes()),
            "blew_up": (self.lead, self.by_sample(step > 0), {}),
            "diverged_at": (self.lead, self.by_sample(step), {"long_name": "step of divergence, 0 if there is none"}),
        }
        if not self.task.steady:
            steps = self.every * np.arange(1, self.num_frames + 1)
            after = self.by_sample((step[:, None] > 0) & (steps >= step[:, None]))
            values["diverged"] = ((*self.lead, "time"), after, {"long_name": "at or after the step of divergence"})
        if self.watch is not None:
            said = {"long_name": "first step from which on nothing is stated, 0 if there is none"}
            values["outside_at"] = (self.lead, self.by_sample(self.watch.outside_at), said)
            for name, (array, about) in self.watch.arrays().items():
                part = array[:, 0] if self.task.steady else array
                values[name] = (self.lead + (() if self.task.steady else ("time",)), self.by_sample(part), about)
        used = {*self.parameters, *(f.name for f in self.fields), *self.coordinates}
        named: dict[str, Variable] = {}
        for name, variable in values.items():
            while name in used:  # a field of that name keeps it
                name += "_"
            named[name] = variable
        return named


class Divergence:
    """Which samples (or members of them) have diverged (`ups.spec.descriptors`), and at which step."""

    def __init__(self, layout: Layout) -> None:
        self.layout, limits = layout, layout.trust.limits
        self._first_step = torch.zeros(layout.num_rows, dtype=torch.int32)
        self._usual = torch.finfo(torch.float64).max if limits is None else limits.usual_peak

    def look(self, frames: Tensor, first: int) -> None:
        """frames (K, B, C, *S): predictions of consecutive steps, the first counted from 1."""
        if float(torch.linalg.vector_norm(frames, torch.inf)) <= self._usual:
            return
        limits = self.layout.trust.limits
        for step, frame in enumerate(frames, start=first):
            bad = ~torch.isfinite(frame).flatten(1).all(dim=1) if limits is None else limits.exceeded(frame)
            self._first_step[bad.cpu() & (self._first_step == 0)] = step

    @property
    def first_step(self) -> npt.NDArray[np.int32]:
        """(B,): the step, 0 where a row has not diverged."""
        return self._first_step.numpy()

    def attributes(self) -> dict[str, str]:
        """What is said about the whole result in words, once it is complete."""
        words, watch = self.words(), self.layout.watch
        doubt = "" if watch is None else watch.words()
        warnings = [
            *self.layout.trust.warnings,
            *([doubt] if doubt else []),
            *([f"the result is not a prediction from there on: {words}"] if words else []),
        ]
        return {"blew_up": words, "warnings": "; ".join(warnings)}

    def words(self) -> str:
        """'' if nothing diverged, else each sample with its step."""
        steps, members = self.first_step, self.layout.members
        numbers = np.flatnonzero(steps)
        lines = []
        for number in numbers[:MAX_NAMED_SAMPLES]:
            time = self.layout.start_time + self.layout.dt * int(steps[number])
            when = "" if self.layout.task.steady else f" at step {steps[number]} (time {time:g})"
            who = f"sample {number}" if members is None else f"sample {number // members}, member {number % members},"
            lines.append(f"{who} diverged{when}")
        more = len(numbers) - len(lines)
        return "; ".join([*lines, *([f"and {more} more"] if more > 0 else [])])


def open_sink(layout: Layout, out: str | Path | None) -> Sink:
    """A sink for the frames of a result. out: a new file; NetCDF if its name ends in .nc, .nc4 or .cdf, else Zarr."""
    if out is None:
        if layout.num_bytes > MAX_MEMORY_BYTES:
            raise BundleError(
                f"the result would take {layout.num_bytes / 2**30:.1f} GiB of memory",
                hint="stream it to a store with out='result.zarr', or keep fewer frames with every=",
                command_hint="write it to a store with -o RESULT.zarr, or keep fewer frames with --every",
            )
        return MemorySink(layout)
    path = Path(out)
    check_new(path)
    return NetcdfSink(layout, path) if path.suffix in NETCDF_SUFFIXES else ZarrSink(layout, path)


def check_new(path: Path) -> None:
    """Raise BundleError unless a file of that name can be made."""
    if path.exists():
        raise BundleError(f"'{path}' exists already", hint="choose another name, or remove it first")
    if not path.parent.is_dir():
        raise BundleError(f"there is no directory '{path.parent}' to write '{path.name}' into")


class Sink(ABC):
    """Takes frames in order, gathers them to chunks and writes these; gives the dataset at the end."""

    def __init__(self, layout: Layout, num_buffered: int) -> None:
        self.layout = layout
        self.divergence = Divergence(layout)  # is shown every step, also those that are not kept
        channels = sum(layout.components(field) for field in layout.fields)
        self.buffer = np.empty((layout.num_rows, num_buffered, channels, *layout.space), np.float32)
        self.buffered = self.written = 0

    def add(self, frame: Frame) -> None:
        """frame: (B, C, *S)."""
        if self.buffered == self.buffer.shape[1]:
            self.flush()
        self.buffer[:, self.buffered] = frame
        self.buffered += 1

    @abstractmethod
    def flush(self) -> None:
        """Write what is in the buffer."""

    @abstractmethod
    def finish(self) -> Any:
        """The whole result as an xarray.Dataset."""

    @abstractmethod
    def abandon(self) -> None:
        """Remove what was written, of a rollout that does not come to its end."""


class MemorySink(Sink):
    """All frames in one array that is allocated once."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout, layout.num_frames)

    def flush(self) -> None:
        """Nothing: the buffer is the result."""

    def abandon(self) -> None:
        """Nothing is left behind."""

    def finish(self) -> Any:
        return self.layout.dataset(self.divergence, self.layout.split(self.buffer))


class FileSink(Sink):
    """A file under a temporary name until it is whole. Formats say how a field is made and how a file is opened."""

    temporary: Path

    def __init__(self, layout: Layout, path: Path) -> None:
        self.path = path
        frame_bytes = max(1, layout.num_bytes // layout.num_frames)
        super().__init__(layout, max(1, min(layout.num_frames, CHUNK_BYTES // frame_bytes)))
        self.open()
        self.arrays = {field.name: self.create(field) for field in layout.fields}

    @abstractmethod
    def open(self) -> None:
        """Begin under a temporary name."""

    @abstractmethod
    def create(self, field: FieldSpec) -> Any:
        """The variable of a field, which takes values by slices."""

    @abstractmethod
    def close(self, rest: xarray.Dataset) -> None:
        """Write everything but the fields, and finish the file."""

    @abstractmethod
    def opened(self) -> Any:
        """The finished file as an xarray.Dataset."""

    def flush(self) -> None:
        layout, count = self.layout, self.buffered
        steps = slice(self.written, self.written + count)
        lead = (slice(None),) * len(layout.lead)
        for name, values in layout.split(self.buffer[:, :count]).items():
            self.arrays[name][lead or ... if layout.task.steady else (*lead, steps)] = values
        self.written += count
        self.buffered = 0

    def finish(self) -> Any:
        self.flush()
        rest = self.layout.dataset(self.divergence, {})
        for variable in rest.variables.values():
            variable.encoding["_FillValue"] = None
        self.close(rest)
        if self.path.exists():
            raise BundleError(f"'{self.path}' appeared while the rollout ran, and is not replaced")
        os.rename(self.temporary, self.path)
        return self.opened()


class ZarrSink(FileSink):
    """A Zarr v3 store."""

    def open(self) -> None:
        import zarr

        self.temporary = make_temporary(self.path)
        self.group = zarr.open_group(self.temporary, mode="w")

    def create(self, field: FieldSpec) -> Any:
        return self.group.create_array(
            field.name,
            shape=self.layout.shape(field, self.layout.num_frames),
            chunks=self.layout.shape(field, self.buffer.shape[1]),
            dtype=np.float32,
            fill_value=np.nan,
            dimension_names=self.layout.dims(field),
            attributes=self.layout.labels[field.name],
        )

    def close(self, rest: xarray.Dataset) -> None:
        with warnings.catch_warnings():
            # Texts and consolidated metadata are not in the specification yet; all readers of the format know them.
            warnings.simplefilter("ignore")
            rest.to_zarr(self.temporary, mode="a", consolidated=True)

    def opened(self) -> Any:
        import xarray

        return xarray.open_zarr(self.path, chunks=None, consolidated=True)

    def abandon(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)


class NetcdfSink(FileSink):
    """A NetCDF 4 file."""

    def open(self) -> None:
        import h5netcdf

        layout = self.layout
        self.temporary = temporary_name(self.path)
        with machine_errors(f"cannot write {self.path}"):
            self.file = h5netcdf.File(self.temporary, "w")
        sizes: dict[str, int] = {}
        for field in layout.fields:
            sizes |= dict(zip(layout.dims(field), layout.shape(field, layout.num_frames), strict=True))
        self.file.dimensions = sizes

    def create(self, field: FieldSpec) -> Any:
        dims, chunks = self.layout.dims(field), self.layout.shape(field, self.buffer.shape[1])
        variable = self.file.create_variable(field.name, dims, np.float32, chunks=chunks, fillvalue=np.float32(np.nan))
        variable.attrs.update(self.layout.labels[field.name])
        return variable

    def close(self, rest: xarray.Dataset) -> None:
        self.file.close()
        rest.to_netcdf(self.temporary, mode="a", engine="h5netcdf")

    def opened(self) -> Any:
        import xarray

        return xarray.open_dataset(self.path, engine="h5netcdf")

    def abandon(self) -> None:
        with contextlib.suppress(Exception):  # a file that cannot be closed is removed all the same
            self.file.close()
        self.temporary.unlink(missing_ok=True)


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
    uneven = grid.uneven_axes(task.axes, coordinates)
    if uneven:
        raise BundleError(
            f"the points along {', '.join(uneven)} are not equally far apart, and an image has equal distances",
            hint="write NetCDF or Zarr",
        )
    temporary = temporary_name(path)
    try:
        with h5py.File(temporary, "w") as file:
            _write_vtkhdf(file, result, task, coordinates)
        os.rename(temporary, path)
    except OSError as error:
        raise machine_error(f"cannot write {path}", error) from error
    finally:
        temporary.unlink(missing_ok=True)


def _write_vtkhdf(file: Any, result: xarray.Dataset, task: TaskSpec, coordinates: tuple[Any, ...]) -> None:
    times = np.zeros(1) if task.steady else np.asarray(result["time"].values, np.float64)
    group = vtk_group(file, b"ImageData", times)
    sizes = [len(points) for points in coordinates] + [1] * (3 - len(coordinates))
    group.attrs["WholeExtent"] = np.array([n for size in sizes for n in (0, size - 1)], np.int64)
    group.attrs["Origin"] = np.array([*(points[0] for points in coordinates), 0.0, 0.0][:3], np.float64)
    spacing = [(points[-1] - points[0]) / (len(points) - 1) for points in coordinates]
    group.attrs["Spacing"] = np.array([*spacing, 1.0, 1.0][:3], np.float64)
    group.attrs["Direction"] = np.eye(3).reshape(-1)
    group.attrs["warnings"] = str(result.attrs.get("warnings", ""))  # VTK does not show it
    for field in task.fields_of(task.predicted):
        tail = (3**field.tensor_rank,) if field.tensor_rank else ()
        shape = (*(len(values) for values in reversed(coordinates)), *tail)
        array = group["PointData"].create_dataset(field.name, (len(times), *shape), np.float32, chunks=(1, *shape))
        for number in range(len(times)):
            frame = result[field.name] if task.steady else result[field.name].isel(time=number)
            frame = frame.transpose(..., *(axis.name for axis in task.axes))
            values = np.asarray(frame.values, np.float32).transpose()  # (z, y, x[, component])
            array[number] = filled_up(values, field.tensor_rank, len(coordinates)) if tail else values
        group[f"Steps/PointDataOffsets/{field.name}"] = np.arange(len(times), dtype=np.int64)
    group["PointData"].attrs["Scalars"] = next((f.name for f in task.fields_of(task.predicted)), "")
