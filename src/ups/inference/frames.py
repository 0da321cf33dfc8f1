"""Where the frames of a rollout go: into memory, or streamed to a Zarr store. Either way an xarray.Dataset comes out.

Variables are fields by name with dimensions (sample, time, [component,] *axes); `sample` only where the input had it.
Two more, one value for each sample: `warnings` (bit flags, see `ups.inference.trust`) and `blew_up`. The attributes of
these names say the same in words, and are empty where there is nothing to say.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ups.errors import BundleError
from ups.inference.inputs import Start
from ups.inference.trust import MAX_NAMED_SAMPLES, Trust
from ups.record.manifest import make_temporary
from ups.spec.task import FieldSpec, TaskSpec

Frame = npt.NDArray[np.float32]
# Frames are buffered up to this size before they are written as one chunk.
CHUNK_BYTES = 8 * 2**20
MAX_MEMORY_BYTES = 8 * 2**30


class FrameSink(Protocol):
    """Takes frames (B, C, *S) in order, and gives the dataset."""

    def add(self, frame: Frame) -> None: ...

    def finish(self) -> Any: ...


def open_sink(
    task: TaskSpec,
    start: Start,
    num_frames: int,
    every: int,
    trust: Trust,
    facts: dict[str, str],
    out: str | Path | None,
) -> FrameSink:
    """A sink for `num_frames` frames, `every` steps apart. facts: further attributes of the result."""
    layout = Layout(task, start, num_frames, every, trust, facts)
    if out is None:
        if layout.num_bytes > MAX_MEMORY_BYTES:
            raise BundleError(
                f"the result would take {layout.num_bytes / 2**30:.1f} GiB of memory",
                hint="stream it to a store with out='result.zarr', or keep fewer frames with every=",
            )
        return MemorySink(layout)
    return ZarrSink(layout, Path(out))


class Layout:
    """Names, dimensions, coordinates and units of a result."""

    def __init__(
        self, task: TaskSpec, start: Start, num_frames: int, every: int, trust: Trust, facts: dict[str, str]
    ) -> None:
        self.task = task
        self.fields = task.fields_of(task.predicted)
        self.space = start.batch.space
        self.num_samples = start.batch.num_samples
        self.num_frames = num_frames
        self.batched = start.batched
        self.attributes = facts | trust.attributes()
        self.trust = trust
        self.coordinates: dict[str, npt.NDArray[np.float64]] = {
            axis.name: values for axis, values in zip(task.axes, start.domain.coordinates, strict=True)
        }
        if not task.steady:
            self.coordinates["time"] = np.asarray(
                start.time + start.dt * every * np.arange(1, num_frames + 1), np.float64
            )
        self.units = {a.name: a.unit for a in task.axes} | {"time": task.time_unit}
        values = start.batch.parameters.numpy()
        self.parameters = {p.name: (p.unit, values[:, i]) for i, p in enumerate(task.parameters)}

    @property
    def num_bytes(self) -> int:
        channels = self.task.num_channels(self.task.predicted)
        return 4 * self.num_samples * self.num_frames * channels * int(np.prod(self.space))

    def components(self, field: FieldSpec) -> int:
        return field.num_channels(self.task.num_spatial_dims)

    def dims(self, field: FieldSpec) -> tuple[str, ...]:
        lead: tuple[str, ...] = ("sample",) if self.batched else ()
        lead += () if self.task.steady else ("time",)
        lead += ("component",) if field.tensor_rank else ()
        return (*lead, *(a.name for a in self.task.axes))

    def shape(self, field: FieldSpec, num_frames: int) -> tuple[int, ...]:
        """Shape with all leading axes: (sample, time, component, *S)."""
        return (self.num_samples, num_frames, self.components(field), *self.space)

    def squeeze(self, field: FieldSpec, values: Frame) -> Frame:
        """(sample, time, component, *S) -> the shape that `dims` names."""
        if not field.tensor_rank:
            values = values[:, :, 0]
        if self.task.steady:
            values = values[:, 0]
        return values if self.batched else values[0]

    def split(self, frames: Frame) -> dict[str, Frame]:
        """(B, T, C, *S) -> field name -> (B, T, c, *S)."""
        parts, first = {}, 0
        for field in self.fields:
            last = first + self.components(field)
            parts[field.name] = frames[:, :, first:last]
            first = last
        return parts

    def per_sample(self, blew_up: BlewUp) -> dict[str, tuple[tuple[str, ...], Any, dict[str, Any]]]:
        """Name -> (dimensions, values, attributes) of what is said about each sample."""
        values: dict[str, tuple[Any, dict[str, Any]]] = {
            "warnings": (self.trust.flags, self.trust.flag_attributes()),
            "blew_up": (blew_up.samples, {}),
        }
        taken = {*self.parameters, *(f.name for f in self.fields), *self.coordinates}
        found: dict[str, tuple[tuple[str, ...], Any, dict[str, Any]]] = {}
        for name, (array, attributes) in values.items():
            free = name
            while free in taken:  # a field of that name keeps it
                free += "_"
            found[free] = (("sample",), array, attributes) if self.batched else ((), array[0], attributes)
        return found

    def variable_attributes(self, name: str) -> dict[str, Any]:
        return {"units": self.units.get(name) or next(f.unit for f in self.fields if f.name == name)}


class MemorySink:
    """Frames in one array that is allocated once."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        channels = sum(layout.components(f) for f in layout.fields)
        self.frames = np.empty((layout.num_samples, layout.num_frames, channels, *layout.space), np.float32)
        self.count = 0
        self.blew_up = BlewUp(layout)

    def add(self, frame: Frame) -> None:
        self.frames[:, self.count] = frame
        self.count += 1

    def finish(self) -> Any:
        import xarray

        layout = self.layout
        self.blew_up.look(self.frames)
        parts = layout.split(self.frames)
        variables: dict[str, Any] = {
            f.name: (layout.dims(f), layout.squeeze(f, parts[f.name]), layout.variable_attributes(f.name))
            for f in layout.fields
        }
        for name, (unit, values) in layout.parameters.items():
            variables[name] = (
                (("sample",), values, {"units": unit}) if layout.batched else ((), values[0], {"units": unit})
            )
        coordinates = {
            name: ((name,), values, {"units": layout.units[name]}) for name, values in layout.coordinates.items()
        }
        variables |= layout.per_sample(self.blew_up)
        attributes = layout.attributes | {"blew_up": self.blew_up.words()}
        return xarray.Dataset(variables, coords=coordinates, attrs=attributes)


class ZarrSink:
    """Frames written chunk by chunk; memory holds one chunk, whatever the number of steps.

    Written under a temporary name and renamed at the end, so that a store of that name is always whole.
    """

    def __init__(self, layout: Layout, path: Path) -> None:
        import zarr

        if path.exists():
            raise BundleError(f"'{path}' exists already", hint="choose another name, or remove it first")
        if not path.parent.is_dir():
            raise BundleError(f"there is no directory '{path.parent}' to write '{path.name}' into")
        self.layout, self.path = layout, path
        self.temporary = make_temporary(path)
        frame_bytes = max(1, layout.num_bytes // layout.num_frames)
        self.chunk = max(1, min(layout.num_frames, CHUNK_BYTES // frame_bytes))
        self.group = zarr.open_group(self.temporary, mode="w", attributes=dict(layout.attributes))
        self.arrays = {f.name: self._create(f) for f in layout.fields}
        self._write_coordinates()
        channels = sum(layout.components(f) for f in layout.fields)
        self.buffer = np.empty((layout.num_samples, self.chunk, channels, *layout.space), np.float32)
        self.buffered = self.written = 0
        self.blew_up = BlewUp(layout)

    def _create(self, field: FieldSpec) -> Any:
        layout = self.layout
        shape = _squeezed_shape(layout, field, layout.num_frames)
        chunks = _squeezed_shape(layout, field, self.chunk)
        return self.group.create_array(
            field.name,
            shape=shape,
            chunks=chunks,
            dtype=np.float32,
            fill_value=np.nan,
            dimension_names=layout.dims(field),
            attributes=layout.variable_attributes(field.name),
        )

    def _write_coordinates(self) -> None:
        layout = self.layout
        for name, values in layout.coordinates.items():
            self._small(name, (name,), np.asarray(values), {"units": layout.units[name]})
        for name, (unit, values) in layout.parameters.items():
            dims = ("sample",) if layout.batched else ()
            self._small(name, dims, values if layout.batched else values[0], {"units": unit})

    def _small(self, name: str, dims: tuple[str, ...], values: Any, attributes: dict[str, Any]) -> None:
        data = np.asarray(values)
        array = self.group.create_array(
            name, shape=data.shape, dtype=data.dtype, dimension_names=dims, attributes=attributes
        )
        array[...] = data

    def add(self, frame: Frame) -> None:
        self.buffer[:, self.buffered] = frame
        self.buffered += 1
        if self.buffered == self.chunk:
            self._flush()

    def _flush(self) -> None:
        layout, count = self.layout, self.buffered
        if not count:
            return
        self.blew_up.look(self.buffer[:, :count], self.written)
        place = slice(self.written, self.written + count)
        for name, part in layout.split(self.buffer[:, :count]).items():
            field = next(f for f in layout.fields if f.name == name)
            index = (slice(None),) if layout.batched else ()
            self.arrays[name][(*index, place) if not layout.task.steady else index or ...] = layout.squeeze(field, part)
        self.written += count
        self.buffered = 0

    def finish(self) -> Any:
        import xarray

        self._flush()
        for name, (dims, values, attributes) in self.layout.per_sample(self.blew_up).items():
            self._small(name, dims, values, attributes)
        self.group.attrs["blew_up"] = self.blew_up.words()
        if self.path.exists():
            shutil.rmtree(self.temporary, ignore_errors=True)
            raise BundleError(f"'{self.path}' appeared while the rollout ran, and is not replaced")
        os.rename(self.temporary, self.path)
        return xarray.open_zarr(self.path, chunks=None, consolidated=False)


def _squeezed_shape(layout: Layout, field: FieldSpec, num_frames: int) -> tuple[int, ...]:
    samples, frames, components, *space = layout.shape(field, num_frames)
    lead: tuple[int, ...] = (samples,) if layout.batched else ()
    lead += () if layout.task.steady else (frames,)
    lead += (components,) if field.tensor_rank else ()
    return (*lead, *space)


class BlewUp:
    """Which samples have a value that is not finite, and from which kept frame on."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.first_frame = np.full(layout.num_samples, -1)

    @property
    def samples(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.first_frame >= 0)

    def look(self, frames: Frame, first_frame: int = 0) -> None:
        """frames: (B, T, C, *S), the first of them number `first_frame` of the result."""
        bad = np.asarray(~np.isfinite(frames).reshape(frames.shape[0], frames.shape[1], -1).all(axis=2))
        new = bad.any(axis=1) & ~self.samples
        self.first_frame[new] = first_frame + bad[new].argmax(axis=1)

    def words(self) -> str:
        """'' if all is finite, else each sample with the time from which on it is not."""
        numbers = np.flatnonzero(self.samples)
        times = self.layout.coordinates.get("time")
        lines = []
        for number in numbers[:MAX_NAMED_SAMPLES]:
            when = "" if times is None else f" at time {times[self.first_frame[number]]:g}"
            lines.append(f"sample {number} is not finite{when}")
        more = len(numbers) - len(lines)
        return "; ".join([*lines, *([f"and {more} more"] if more > 0 else [])])
