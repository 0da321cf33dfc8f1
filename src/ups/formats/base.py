"""What a reader is: one task on disk, bytes to windows and nothing else (no threads, no devices, no randomness).

Owns subsampling in time and space, and `Reader`, which does for every format what does not depend on it: bounds,
strides, coordinates, assembly. A format only says where frames, given fields and parameters are.
Which window is read when is the business of `ups.data.sampler`; tensors and workers are that of `ups.data.loader`.

Shape legend as in `ups.spec.batch`: B samples, T frames, C channels, S space, P parameters.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ups.errors import DataError
from ups.spec.batch import Float32, Float64, Window
from ups.spec.grid import uneven_axes
from ups.spec.points import NO_POINT
from ups.spec.task import FieldSpec, Role, TaskSpec

SPLITS = ("train", "valid", "test")
SPACE = "XYZ"
# One read allocates at most this much, whatever a file claims about its own size.
MAX_READ_BYTES = 1 << 30
FLOAT32_HINT = "values must stay within 3.4e38: choose another unit, or leave those trajectories out"
Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]
# With fewer than 6 test trajectories no difference is significant (sign test, 5 %). At least 6 are held out only if
# enough trajectories are left to train on.
LEAST_TEST = 6
LEAST_TO_SPLIT = 24


@dataclass(frozen=True, slots=True)
class Subsampling:
    """Which stored frames and points a reader shows.

    first_frame: stored frames before it are left out, as of data that are ill-posed where they begin. time_stride:
    every n-th frame from there. space_stride: every n-th point of each axis, or with `antialias` the mean over cells of
    n points along each axis. The cell mean is the filter because it keeps integrals exactly, needs no
    assumption about the boundary, and is what a finite-volume code on the coarse grid would store; its coordinate is
    the center of the cell. It damps, but does not remove, waves above the new Nyquist limit.
    """

    time_stride: int = 1
    space_stride: int = 1
    antialias: bool = False
    first_frame: int = 0


FULL = Subsampling()


@dataclass(frozen=True, slots=True)
class Source:
    """A task as stored, before subsampling.

    coordinates: one (n,) per axis. num_frames: of the longest trajectory, 0 for a steady task. start_time: of the first
    frame, in the task's unit. assumptions: what the task says that the data do not, a sentence each.
    frames: split -> frames of each trajectory, where they differ. steps: split -> time between two frames of each
    trajectory, where that differs; the task's dt is then the usual one.
    """

    task: TaskSpec
    coordinates: tuple[Float64, ...]
    num_frames: int
    splits: Mapping[str, int]
    start_time: float = 0.0
    assumptions: tuple[str, ...] = ()
    frames: Mapping[str, Int64] | None = None
    steps: Mapping[str, Float64] | None = None

    @property
    def space(self) -> tuple[int, ...]:
        return tuple(len(c) for c in self.coordinates)


@dataclass(frozen=True, slots=True)
class WindowBlock:
    """Windows of one task read into contiguous arrays, ready for `torch.from_numpy` without another copy.

    state (B, T, C, *S), static (B, C, *S), target (B, C, *S), parameters (B, P): owned, writable, float32. dt (B,): the
    time between two frames. points, point_values: as in `ups.spec.points`, None where fields live on the grid.
    """

    task: TaskSpec
    state: Float32
    static: Float32
    target: Float32
    parameters: Float32
    dt: Float64
    coordinates: tuple[Float64, ...]
    points: Float32 | None = None
    point_values: Float32 | None = None


class Format(Protocol):
    """A kind of data that can be opened: what a package announces in the entry point group `ups.readers`."""

    def recognizes(self, path: Path) -> bool:
        """Whether this path looks like it, by name and first bytes. The file may be hostile: no library opens it."""
        ...

    def open(
        self,
        paths: Sequence[Path],
        subsampling: Subsampling,
        *,
        valid_fraction: float,
        test_fraction: float,
        problem: str | None,
    ) -> Reader:
        """The reader of one path, or of several of one task. The fractions are for data without splits; problem: what
        the data hold, if the user says so."""
        ...


class Reader(ABC):
    """One task on disk: the base of all readers, with everything that does not depend on the format.

    Picklable; opens files lazily in each process and never carries a handle over a fork.
    """

    def __init__(self, source: Source, subsampling: Subsampling = FULL) -> None:
        self.source = source
        self.subsampling = subsampling
        _check_source(source)
        _check_strides(source, subsampling)
        self._splits = {name: int(source.splits.get(name, 0)) for name in SPLITS}
        self._coordinates = tuple(_thin_coordinate(c, subsampling) for c in source.coordinates)
        self._space = tuple(len(c) for c in self._coordinates)
        dt = source.task.dt * subsampling.time_stride
        self._task = replace(source.task, dt=dt) if subsampling.time_stride > 1 else source.task
        stride = subsampling.time_stride
        if source.steps is not None:
            every = np.concatenate([np.asarray(v, np.float64) for v in source.steps.values()]) * stride
            self._task = replace(self._task, dt_range=(float(every.min()), float(every.max())))
        first = subsampling.first_frame
        self._num_frames = -(-max(0, source.num_frames - first) // stride)
        self._frames_of = {
            s: -(-np.maximum(np.asarray(n, np.int64) - first, 0) // stride) for s, n in (source.frames or {}).items()
        }
        self._steps_of = {s: np.asarray(v, np.float64) * stride for s, v in (source.steps or {}).items()}
        self._num_channels = {role: source.task.num_channels(role) for role in ("state", "static", "target")}
        self._num_parameters = len(source.task.parameters)

    @property
    def task(self) -> TaskSpec:
        """What is read, after subsampling: `dt` is the time between the frames that `read` returns, or the usual one
        where trajectories differ (`dt_in`)."""
        return self._task

    @property
    def splits(self) -> Mapping[str, int]:
        """Number of trajectories in train, valid and test."""
        return self._splits

    @property
    def num_frames(self) -> int:
        """Frames of a trajectory after time_stride, of the longest one where they differ; 0 if the task is steady."""
        return self._num_frames

    def frames_of(self, split: str) -> Int64 | None:
        """Frames of each trajectory of a split after time_stride; None where all have `num_frames`."""
        return self._frames_of.get(split)

    def frames_in(self, split: str, trajectory: int) -> int:
        """Frames of one trajectory after time_stride."""
        known = self._frames_of.get(split)
        return self._num_frames if known is None else int(known[trajectory])

    def dt_in(self, split: str, trajectory: int) -> float:
        """Time between two frames of one trajectory after time_stride."""
        known = self._steps_of.get(split)
        return self._task.dt if known is None else float(known[trajectory])

    @property
    def differing(self) -> tuple[str, ...]:
        """What differs between trajectories: `frames`, `dt`, both or nothing."""
        return tuple(name for name, known in (("frames", self._frames_of), ("dt", self._steps_of)) if known)

    @property
    def space(self) -> tuple[int, ...]:
        """Grid points per axis after space_stride: (X,), (X, Y) or (X, Y, Z)."""
        return self._space

    @property
    def coordinates(self) -> tuple[Float64, ...]:
        """One (n,) array per axis, after space_stride."""
        return self._coordinates

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the task says that the data do not contain, and what of the data is not used; a sentence each."""
        return self.source.assumptions

    @property
    def times(self) -> Float64:
        """(num_frames,) times of the frames that `read` returns, in the unit of the task; see `times_in`."""
        start = self.source.start_time + self.subsampling.first_frame * self.source.task.dt
        return np.asarray(start + np.arange(self._num_frames) * self._task.dt, np.float64)

    def times_in(self, split: str, trajectory: int) -> Float64:
        """(frames,) times of the frames of one trajectory."""
        count, step = self.frames_in(split, trajectory), self.dt_in(split, trajectory)
        start = self.source.start_time + self.subsampling.first_frame * step / self.subsampling.time_stride
        return np.asarray(start + np.arange(count) * step, np.float64)

    def simulation_of(self, split: str, trajectory: int) -> int:
        """The simulation that a trajectory is a piece of, as a number: pieces of one resemble each other."""
        return trajectory

    def rename(self, name: str) -> None:
        """Call the task by another name, the one it has in a recipe."""
        self._task = replace(self._task, name=name)

    def read(self, split: str, trajectory: int, start_frame: int, num_frames: int) -> Window:
        """Frames start_frame .. start_frame + num_frames - 1 of one trajectory; (0, 0) for a steady task."""
        block = self.read_block(split, (trajectory,), (start_frame,), num_frames)
        return Window(
            task=block.task,
            state=block.state[0],
            static=block.static[0],
            target=block.target[0],
            parameters=block.parameters[0],
            dt=float(block.dt[0]),
            coordinates=block.coordinates,
            trajectory=trajectory,
            start_frame=start_frame,
        )

    def read_block(
        self,
        split: str,
        trajectories: Sequence[int],
        start_frames: Sequence[int],
        num_frames: int,
        out: WindowBlock | None = None,
    ) -> WindowBlock:
        """Many windows of equal length, each read straight into its place in one array.

        out: an earlier answer of the same size, to be overwritten and returned: large new arrays cost page faults.
        """
        self._check_request(split, trajectories, start_frames, num_frames)
        channels, stride = self._num_channels, self.subsampling.time_stride
        steps = np.array([self.dt_in(split, trajectory) for trajectory in trajectories], np.float64)
        block = self._empty_block(len(trajectories), num_frames, steps, out)
        state, parameters = block.state, block.parameters
        given_fields: tuple[tuple[Role, Array], ...] = (("static", block.static), ("target", block.target))
        constant = [(role, given) for role, given in given_fields if channels[role]]
        thin = self._thin if self.subsampling.space_stride > 1 else None
        trajectory = 0
        try:
            with np.errstate(over="raise"):  # a finite float64 never becomes an infinite float32 unnoticed
                for i, (trajectory, start) in enumerate(zip(trajectories, start_frames, strict=True)):
                    if num_frames:
                        first = self.subsampling.first_frame + start * stride
                        frames = self._frames(split, trajectory, first, first + (num_frames - 1) * stride + 1, stride)
                        state[i] = frames if thin is None else thin(frames)
                    for role, given in constant:
                        fields = self._given(split, trajectory, role)
                        given[i] = fields if thin is None else thin(fields)
                    if self._num_parameters:
                        parameters[i] = self._parameters(split, trajectory)
            if self._task.mask:
                channel = self._task.channel_names("static").index(self._task.mask)
                holes = ~(block.static[:, channel] <= 0)  # (B, *S): a cell that is a hole in part is one
                for fields in (state.swapaxes(0, 1), block.static[None], block.target[None]):  # (T, B, C, *S)
                    fields[np.broadcast_to(holes[:, None], fields.shape)] = 0
                block.static[:, channel] = holes
        except FloatingPointError as error:
            raise DataError(
                f"{self.where(split, trajectory)} has finite values that float32 cannot hold ({error})",
                hint=FLOAT32_HINT,
            ) from error
        return self._with_points(block, split, trajectories, start_frames, num_frames) if self.most_points else block

    @property
    def most_points(self) -> int:
        """Points of the largest geometry; 0 where fields live on the grid."""
        return 0

    def _at_points(self, split: str, trajectory: int, frames: slice) -> tuple[Array, Array]:
        """Points of a trajectory (N, D) in units of nodes, and predicted fields at them (T, C, N), T = 1 if steady."""
        raise NotImplementedError

    def mesh_path(self, split: str, trajectory: int) -> str:
        """The file of points of a trajectory, where fields live on points."""
        raise NotImplementedError

    def _with_points(
        self, block: WindowBlock, split: str, trajectories: Sequence[int], starts: Sequence[int], num_frames: int
    ) -> WindowBlock:
        size, dims, stride = len(trajectories), len(self._space), self.subsampling.time_stride
        channels = self._num_channels[self._task.predicted]
        points = np.full((size, self.most_points, dims), NO_POINT, np.float32)
        values = np.zeros((size, max(num_frames, 1), channels, self.most_points), np.float32)
        for i, (trajectory, start) in enumerate(zip(trajectories, starts, strict=True)):
            first = self.subsampling.first_frame + start * stride
            frames = slice(first, first + max(num_frames - 1, 0) * stride + 1, stride)
            own, fields = self._at_points(split, trajectory, frames)
            points[i, : len(own)], values[i, :, :, : len(own)] = own, fields
        return replace(block, points=points, point_values=values.reshape(*values.shape, *[1] * (dims - 1)))

    @property
    def remote(self) -> bool:
        """Whether reading asks a server, so that it pays to read many windows at the same time."""
        return False

    def _empty_block(self, num_samples: int, num_frames: int, steps: Float64, out: WindowBlock | None) -> WindowBlock:
        channels, space = self._num_channels, self._space
        shapes = (
            (num_samples, num_frames, channels["state"], *space),
            (num_samples, channels["static"], *space),
            (num_samples, channels["target"], *space),
            (num_samples, self._num_parameters),
        )
        if out is not None:
            arrays = (out.state, out.static, out.target, out.parameters)
            if tuple(a.shape for a in arrays) != shapes or any(a.dtype != np.float32 for a in arrays):
                raise ValueError(f"the arrays of `out` must be float32 of shapes {shapes}")
            return replace(out, task=self._task, dt=steps, coordinates=self._coordinates)
        state, static, target, parameters = (np.empty(shape, np.float32) for shape in shapes)
        return WindowBlock(self._task, state, static, target, parameters, steps, self._coordinates)

    def identity(self) -> str:
        """Hash of what is read: metadata, manifest or size and time of the files, and the subsampling. Cheap."""
        shown = asdict(self.subsampling)
        if not shown["first_frame"]:  # as an identity was before there was one
            del shown["first_frame"]
        text = json.dumps([self._source_identity(), shown, self._splits, self.source.task.to_json()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @abstractmethod
    def where(self, split: str, trajectory: int) -> str:
        """File and place of a trajectory, for messages to people."""

    @abstractmethod
    def close(self) -> None:
        """Release files that this process has open for this reader; it opens them again when asked to read."""

    @abstractmethod
    def _frames(self, split: str, trajectory: int, start: int, stop: int, step: int) -> Array:
        """Stored frames start:stop:step of a trajectory, (T, C, *S) at full resolution; may be a read-only view."""

    @abstractmethod
    def _given(self, split: str, trajectory: int, role: Role) -> Array:
        """Static or target fields of a trajectory, (C, *S) at full resolution; may be a read-only view."""

    @abstractmethod
    def _parameters(self, split: str, trajectory: int) -> Array:
        """Parameters of a trajectory, (P,)."""

    @abstractmethod
    def _source_identity(self) -> str:
        """Hash of the files."""

    def _check_request(
        self, split: str, trajectories: Sequence[int], start_frames: Sequence[int], num_frames: int
    ) -> None:
        name, available = self._task.name, self._splits.get(split)
        if available is None:
            raise DataError(f"task '{name}' has no split '{split}'", hint=f"splits are {', '.join(SPLITS)}")
        if num_frames < (0 if self._task.steady else 1) or num_frames > self._num_frames:
            raise DataError(
                f"task '{name}' has {self._num_frames} frames in a trajectory; a window of {num_frames} does not fit",
                hint="use fewer context frames and unroll steps, or a smaller time_stride",
            )
        for trajectory, start in zip(trajectories, start_frames, strict=True):
            if not (0 <= trajectory < available and 0 <= start <= self.frames_in(split, trajectory) - num_frames):
                at_most = "at most " if self._frames_of else ""
                raise DataError(
                    f"task '{name}' has no window at {split} trajectory {trajectory} frame {start} (of {num_frames} "
                    f"frames): it has {available} trajectories of {at_most}{self._num_frames} frames"
                )
        values = math.prod(self.source.space) * max(num_frames, 1) * max(self._num_channels.values())
        if values * 4 > MAX_READ_BYTES:
            raise DataError(
                f"a window of {num_frames} frames of task '{name}' would need more than {MAX_READ_BYTES >> 20} MiB",
                hint="use fewer context frames or a coarser grid",
            )

    def _thin(self, values: Array) -> Array:
        """Every n-th point, or the mean over cells of n points, along the space axes (the last ones)."""
        stride, dims = self.subsampling.space_stride, len(self._space)
        if not self.subsampling.antialias:
            picked: Any = (..., *(slice(None, None, stride),) * dims)
            return np.asarray(values[picked])
        lead = values.shape[: values.ndim - dims]
        cells = values.reshape(*lead, *(n for size in self._space for n in (size, stride)))
        axes = tuple(len(lead) + 2 * i + 1 for i in range(dims))
        return np.asarray(cells.mean(axis=axes, dtype=np.float64))  # (..., *S)


# The name by which readers of other packages know the base.
GridReader = Reader


def _thin_coordinate(coordinate: Float64, subsampling: Subsampling) -> Float64:
    stride = subsampling.space_stride
    if stride == 1:
        return coordinate
    if subsampling.antialias:
        return np.asarray(coordinate.reshape(-1, stride).mean(axis=1), np.float64)
    return np.ascontiguousarray(coordinate[::stride])


def _check_source(source: Source) -> None:
    name = source.task.name
    for axis, points in zip(source.task.axes, source.coordinates, strict=True):
        if points.ndim != 1 or len(points) < 2 or not np.isfinite(points).all() or (np.diff(points) <= 0).any():
            raise DataError(f"coordinate '{axis.name}' of task '{name}' is not finite and increasing")
    largest = float(np.finfo(np.float64).max)
    for what, entries, most in (("frames", source.frames, source.num_frames), ("steps", source.steps, largest)):
        if entries is None:
            continue
        for split, count in source.splits.items():
            values = np.asarray(entries.get(split, ()))
            if source.task.steady or values.shape != (count,) or not ((values > 0) & (values <= most)).all():
                raise DataError(
                    f"task '{name}': {what} of its {count} {split} trajectories must be as many numbers, above 0 and "
                    f"at most {most:g}"
                )


def _check_strides(source: Source, subsampling: Subsampling) -> None:
    stride = subsampling.space_stride
    if stride < 1 or subsampling.time_stride < 1:
        raise DataError("time_stride and space_stride must be 1 or more")
    first = subsampling.first_frame
    if first < 0 or (first and (source.task.steady or first >= source.num_frames)):
        raise DataError(
            f"first_frame {first} leaves no frame: trajectories of task '{source.task.name}' have "
            f"{source.num_frames} frames",
            hint="use a smaller first_frame",
        )
    uneven = uneven_axes(source.task.axes, source.coordinates)
    for axis, size in zip(source.task.axes, source.space, strict=True):
        if stride > 1 and subsampling.antialias and axis.name in uneven:
            raise DataError(
                f"the points of task '{source.task.name}' are not equally spaced along {axis.name}, so that means over "
                f"{stride} of them would not keep integrals",
                hint="leave antialias out, or interpolate the data to a uniform grid",
            )
        if size % stride and (subsampling.antialias or axis.periodic):
            why = "cells of equal size" if subsampling.antialias else "equal distances around a periodic axis"
            raise DataError(
                f"space_stride {stride} does not divide the {size} points of axis '{axis.name}' of task "
                f"'{source.task.name}', which {why} need",
                hint=f"use a divisor of {size}",
            )
        if size // stride < 2:
            raise DataError(f"space_stride {stride} leaves less than 2 points on axis '{axis.name}'")


def split_rows(counts: Sequence[int], valid_fraction: float, test_fraction: float) -> dict[str, list[int]]:
    """Which trajectories each split has, counted over all files. counts: trajectories of each file.

    The wanted totals are rounded up over all files so far, so that files of four trajectories still give one in ten,
    and at least one trajectory of every file goes to train. Where there are LEAST_TO_SPLIT, at least LEAST_TEST of them
    are for the test, unless none is wanted.
    """
    if test_fraction > 0 and sum(counts) >= LEAST_TO_SPLIT:
        test_fraction = max(test_fraction, LEAST_TEST / sum(counts))
    rows: dict[str, list[int]] = {s: [] for s in SPLITS}
    end = 0
    for count in counts:
        begin, end = end, end + count
        test = max(0, min(math.ceil(end * test_fraction - 1e-9) - len(rows["test"]), count - 1))
        valid = max(0, min(math.ceil(end * valid_fraction - 1e-9) - len(rows["valid"]), count - 1 - test))
        rows["train"] += range(begin, end - valid - test)
        rows["valid"] += range(end - valid - test, end - test)
        rows["test"] += range(end - test, end)
    return rows


def check_alike(files: Sequence[tuple[str, Mapping[str, object]]]) -> None:
    """Raises DataError for files that cannot be one task. files: the name of each, and what must be equal, by words."""
    first, wanted = files[0]
    for name, own in files[1:]:
        for what, value in own.items():
            if value != wanted[what]:
                raise DataError(
                    f"{name} and {first} have different {what}",
                    hint="files of one task may differ in parameters, length and time step; make them two tasks",
                )


def check_distinct(files: Iterable[tuple[Path, str]]) -> None:
    """Raises DataError for a file, and a part of it, that is listed twice: it would be trained on and held out."""
    seen: set[tuple[str, str]] = set()
    for path, part in files:
        real = (str(path.resolve()), part)
        if real in seen:
            raise DataError(f"{path} is the same file as another of the list", hint="list each file once")
        seen.add(real)


class SplitRows:
    """counts: trajectories of each file. rows: split -> its trajectories, counted over all files."""

    def __init__(self, counts: Sequence[int], rows: Mapping[str, Sequence[int]]) -> None:
        self._ends, self._rows = list(accumulate(counts)), rows

    @property
    def totals(self) -> dict[str, int]:
        """Trajectories of each split."""
        return {split: len(rows) for split, rows in self._rows.items()}

    def locate(self, split: str, trajectory: int) -> tuple[int, int]:
        """Number of the file of a trajectory, and its row in there."""
        row = self._rows[split][trajectory]
        number = bisect.bisect_right(self._ends, row)
        return number, row - (self._ends[number - 1] if number else 0)

    def by_split(self, values: Array) -> dict[str, Array]:
        """For each split the values of its trajectories. values: of the trajectories of all files."""
        return {split: values[np.asarray(rows, np.int64)] for split, rows in self._rows.items()}


class StoredArray(Protocol):
    """An array of a file, by name and shape."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class FileField:
    """An array of trajectories, what its axes are, and the fields it gives. mask: its values are true and false.
    missing: the field is 1 where the first frame of the array has no value, else 0.

    axes: N trajectory, T time, X Y Z space, C component, K several fields, of which this is `channel`; a small letter
    is an axis of length 1. An axis of space that is small or missing is broadcast. repeated: axes whose last point is
    the first again and left out.
    """

    role: Role
    array: StoredArray
    axes: str
    specs: tuple[FieldSpec, ...] = ()
    mask: bool = False
    channel: int = 0
    repeated: str = ""
    missing: bool = False

    def region(self, row: int, frames: slice) -> tuple[slice, ...]:
        """What of the array a trajectory needs."""
        chosen = {"N": slice(row, row + 1, 1), "T": frames, "K": slice(self.channel, self.channel + 1, 1)}
        return tuple(
            chosen.get(letter, slice(0, size - (letter in self.repeated), 1))
            for letter, size in zip(self.axes, self.array.shape, strict=True)
        )

    def arranged(self, values: Array, dims: int) -> Array:
        """(T, C, *S) of such a region; an axis of space that the field does not have is of length 1."""
        axes = self.axes.upper()
        for letter in "NK":
            if letter in axes:
                values, axes = np.moveaxis(values, axes.index(letter), 0)[0], axes.replace(letter, "")
        if "T" not in axes:
            values, axes = values[None], "T" + axes
        components = [i for i, letter in enumerate(axes) if letter == "C"]  # two of a tensor
        space = [axes.index(letter) for letter in SPACE if letter in axes]
        values = values.transpose(axes.index("T"), *components, *space)
        sizes = iter(values.shape[1 + len(components) :])
        shape = [next(sizes) if letter in axes else 1 for letter in SPACE[:dims]]
        values = values.reshape(len(values), math.prod(values.shape[1 : 1 + len(components)]), *shape)
        if self.missing:
            return np.asarray(np.isnan(values).any(axis=1, keepdims=True))
        return values != 0 if self.mask else values


@dataclass(frozen=True, slots=True)
class TrajectoryFile(ABC):
    """A file of trajectories. parameters: (N, P). flipped: axes along which the file has coordinates falling."""

    fields: tuple[FileField, ...]
    parameters: Array
    flipped: tuple[bool, ...]

    @abstractmethod
    def values(self, source: FileField, row: int, frames: slice) -> Array:
        """The region of the array of a field that a trajectory needs."""

    def read(self, role: Role, row: int, frames: slice, space: tuple[int, ...]) -> Array:
        """(T, C, *S) of one role: fields in order, along increasing coordinates."""
        turned = tuple(slice(None, None, -1) if flip else slice(None) for flip in self.flipped)
        parts = [
            source.arranged(self.values(source, row, frames), len(space))[(slice(None), slice(None), *turned)]
            for source in self.fields
            if source.role == role
        ]
        parts = [p if p.shape[2:] == space else np.broadcast_to(p, (*p.shape[:2], *space)) for p in parts]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


class FilesReader(Reader):
    """Windows from files of trajectories. A subclass sets the attributes before it calls `__init__`."""

    _files: Sequence[TrajectoryFile]
    _rows: SplitRows

    def _frames(self, split: str, trajectory: int, start: int, stop: int, step: int) -> Array:
        number, row, first = self._locate(split, trajectory)
        return self._files[number].read("state", row, slice(first + start, first + stop, step), self.source.space)

    def _given(self, split: str, trajectory: int, role: Role) -> Array:
        number, row, _ = self._locate(split, trajectory)
        return np.asarray(self._files[number].read(role, row, slice(0, 1, 1), self.source.space)[0])

    def _parameters(self, split: str, trajectory: int) -> Array:
        number, row, _ = self._locate(split, trajectory)
        return np.asarray(self._files[number].parameters[row])

    def _locate(self, split: str, trajectory: int) -> tuple[int, int, int]:
        """Number of the file of a trajectory, its row in there, and the frame of the file where it begins."""
        return (*self._rows.locate(split, trajectory), 0)
