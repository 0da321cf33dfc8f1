"""What one rank reads, and how: window numbers, the micro-batches of a step, and each part of one as arrays.

A window number means a trajectory and its first frame (`WindowIndex`). A part of a micro-batch is of one task.

Owns the map from the number of a part to files, the naming of whatever goes wrong there, and the messages between a
rank and its workers. Runs in the rank itself or in a worker process, so it is picklable and never imports torch: a
worker without torch starts in a fraction of a second and needs a fraction of the memory, which counts with 8 workers on
each of 1,024 ranks. Processes are the business of `ups.data.worker_pool`, tensors of `ups.data.loader`.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ups.data.sampler import Cut, Sampler
from ups.errors import DataError, StoreRefusedError, StoreUnavailableError, UpsError
from ups.formats.base import Int64, Reader
from ups.record.failure import Frame, worker_stem
from ups.spec.points import POINT_VALUES, POINTS


@dataclass(frozen=True, slots=True)
class WindowIndex:
    """All windows of `window_frames` consecutive frames of one split.

    number = windows of all trajectories before + start_frame; a steady task has one window per trajectory. One that is
    shorter than a window has none.
    frames: of each trajectory where they differ; num_frames is then that of the longest.
    """

    num_trajectories: int
    num_frames: int
    window_frames: int
    steady: bool = False
    frames: Int64 | None = field(default=None, compare=False)
    _before: Int64 | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_trajectories < 0:
            raise DataError(f"a split cannot have {self.num_trajectories} trajectories")
        if not self.steady and not 1 <= self.window_frames <= self.num_frames:
            raise DataError(
                f"windows of {self.window_frames} frames do not fit in trajectories of {self.num_frames} frames",
                hint="use fewer context frames and unroll steps, or a smaller time_stride",
            )
        if self.frames is not None:
            windows = np.maximum(self.frames - self.window_frames + 1, 0)
            # (trajectories + 1,): the windows of all trajectories before each, and in the end all of them.
            object.__setattr__(self, "_before", np.concatenate([[0], np.cumsum(windows)]).astype(np.int64))

    @classmethod
    def of(cls, reader: Reader, split: str, window_frames: int) -> WindowIndex:
        """The windows of one split of a reader."""
        return cls(reader.splits[split], reader.num_frames, window_frames, reader.task.steady, reader.frames_of(split))

    def windows_in(self, trajectory: int) -> int:
        """Windows of one trajectory."""
        if self._before is not None:
            return int(self._before[trajectory + 1] - self._before[trajectory])
        return self._windows

    @property
    def _windows(self) -> int:
        return 1 if self.steady else self.num_frames - self.window_frames + 1

    @property
    def read_frames(self) -> int:
        """What to ask `Reader.read` for: 0 for a steady task."""
        return 0 if self.steady else self.window_frames

    def __len__(self) -> int:
        return self.num_trajectories * self._windows if self._before is None else int(self._before[-1])

    def locate(self, number: int) -> tuple[int, int]:
        """(trajectory, start frame) of a window number. Raises DataError outside the split."""
        if not 0 <= number < len(self):
            raise DataError(f"window number {number} is not among the {len(self)} windows of the split")
        trajectories, starts = self.locate_all(np.array([number], np.int64))
        return trajectories[0], starts[0]

    def locate_all(self, numbers: Int64) -> tuple[Sequence[int], Sequence[int]]:
        """Trajectories and start frames of window numbers of the split."""
        if self._before is None:
            return (numbers // self._windows).tolist(), (numbers % self._windows).tolist()
        # The last trajectory that begins at or before a number: those without a window begin where the next one does.
        trajectories = np.searchsorted(self._before, numbers, side="right") - 1
        return trajectories.tolist(), (numbers - self._before[trajectories]).tolist()

    def number(self, trajectory: int, start_frame: int) -> int:
        """The inverse of `locate`."""
        if not (0 <= trajectory < self.num_trajectories and 0 <= start_frame < self.windows_in(trajectory)):
            raise DataError(f"there is no window at trajectory {trajectory}, frame {start_frame}")
        before = trajectory * self._windows if self._before is None else int(self._before[trajectory])
        return before + start_frame


Array = npt.NDArray[Any]
EXTRA = "extra."
Layout = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True, slots=True)
class ArrayBatch:
    """A part of a micro-batch before it is tensors: the arrays of `ups.spec.batch.Batch` by name, `coordinates.<axis>`
    and `extra.<name>` among them."""

    task: int
    step: int
    arrays: dict[str, Array]


class ArraySource(Protocol):
    """Reads the arrays of windows in place of the readers: `ups.data.latent_cache`. Without torch: workers use it."""

    @property
    def reads_fields(self) -> bool: ...

    def read(
        self, task: int, reader: Reader, split: str, trajectories: Sequence[int], starts: Sequence[int], num_frames: int
    ) -> dict[str, Array]:
        """As `read_arrays`, for task number `task`; arrays named `extra.NAME` are `Batch.extra[NAME]`."""
        ...


@dataclass(frozen=True, slots=True)
class Planned:
    """What the number of a part stands for. numbers (B,) int64. weight: of each window in the loss of the step."""

    step: int
    slot: int
    task: int
    numbers: Int64
    weight: float = 1.0


@dataclass(frozen=True)
class RankSource:
    """Readers, sampler and the cut of one rank: number of a part -> arrays.

    grouped: whether tasks of equal grids share a micro-batch, for a network that runs them as one graph; otherwise each
    part is a micro-batch. The parts of a step have consecutive numbers from `first(step)`.
    array_source: reads windows in place of the readers, with latents. host_ranks, host_readers: ranks of this host, and
    processes that read such a source; they share its cache of objects.
    """

    readers: tuple[Reader, ...]
    indexes: tuple[WindowIndex, ...]
    sampler: Sampler
    cut: Cut
    grouped: bool = False
    split: str = "train"
    array_source: ArraySource | None = None
    host_ranks: int = 1
    host_readers: int = 1

    def first(self, step: int) -> int:
        """The number of the first part of a step. Steps may have unequal numbers of parts: some numbers stay unused."""
        return step * self.sampler.blocks_per_step * max(self.sampler.batch_sizes)

    def layout(self, step: int) -> Layout:
        """The micro-batches of a step on this rank: each a tuple of (slot, part of the slot's block)."""
        tasks = self.sampler.tasks_of_step(step)
        grids = tuple(self.readers[task].space for task in tasks) if self.grouped else ((),) * len(tasks)
        return _layout(grids, tuple(map(len, self.cut.parts(tasks))), self.grouped)

    def rows(self, step: int, slot: int, part: int) -> tuple[int, int]:
        """First and one past the last row of a part in the block of its slot; equal for a part without windows."""
        return self.cut.parts(self.sampler.tasks_of_step(step))[slot][part]

    def numbers(self, step: int) -> Iterator[int]:
        """The numbers of all parts from `step` on, without end."""
        while True:
            start = self.first(step)
            yield from range(start, start + sum(len(parts) for parts in self.layout(step)))
            step += 1

    def plan(self, number: int) -> Planned:
        """What part `number` of this rank is."""
        step, index = divmod(number, self.first(1))
        slot, part = [at for parts in self.layout(step) for at in parts][index]
        weight = self.sample_weight(step, slot, part)
        block = self.sampler.block(step, slot, *(self.rows(step, slot, part) if weight else (0, 1)))
        return Planned(step, slot, block.task, block.numbers, weight)

    def sample_weight(self, step: int, slot: int, part: int) -> float:
        """The weight of each window of a part in the loss of a step: blocks count alike, whatever their size.

        0 where the part has no windows: what is read in their place counts for nothing.
        """
        first, stop = self.rows(step, slot, part)
        task, _ = self.sampler.locate(step, slot)
        return float(stop > first) / (self.sampler.blocks_per_step * self.sampler.batch_sizes[task])

    def read(self, number: int) -> ArrayBatch:
        """Reads part `number`. Raises DataError that names file, trajectory and frame."""
        planned = self.plan(number)
        return self.batch_of(planned, [self.arrays_of(planned)])

    def arrays_of(self, planned: Planned, rows: slice = slice(None)) -> dict[str, Array]:
        """The arrays of some windows of a part, without their numbers."""
        reader, index = self.readers[planned.task], self.indexes[planned.task]
        trajectories, starts = index.locate_all(planned.numbers[rows])
        window = (self.split, trajectories, starts, index.read_frames)
        source = self.array_source
        return read_arrays(reader, *window) if source is None else source.read(planned.task, reader, *window)

    def batch_of(self, planned: Planned, windows: Sequence[dict[str, Array]]) -> ArrayBatch:
        """A part from the arrays of its windows, in order."""
        arrays = dict(windows[0])
        if len(windows) > 1:
            joined = [name for name in arrays if not name.startswith("coordinates.")]
            arrays |= {name: np.concatenate([window[name] for window in windows]) for name in joined}
        arrays["numbers"] = planned.numbers
        return ArrayBatch(planned.task, planned.step, arrays)

    @property
    def reads_fields(self) -> bool:
        """Whether fields of the windows are read from the files of the readers."""
        return self.array_source is None or self.array_source.reads_fields

    def describe(self, number: int) -> str:
        """What part `number` reads, in words for a message."""
        planned = self.plan(number)
        reader, index = self.readers[planned.task], self.indexes[planned.task]
        trajectory, start = index.locate(int(planned.numbers[0]))
        return (
            f"{len(planned.numbers)} windows of task '{reader.task.name}' for step {planned.step}, the first at "
            f"{reader.where(self.split, trajectory)}, frame {start}"
        )


@functools.lru_cache(maxsize=1024)
def _layout(kinds: tuple[tuple[int, ...], ...], num_parts: tuple[int, ...], grouped: bool) -> Layout:
    """kinds, num_parts: of each slot. Slot by slot and part by part, or the n-th parts of all slots of a kind."""
    if not grouped:
        return tuple(((slot, part),) for slot, count in enumerate(num_parts) for part in range(count))
    micro_batches: list[tuple[tuple[int, int], ...]] = []
    for kind in dict.fromkeys(kinds):
        slots = [slot for slot, other in enumerate(kinds) if other == kind]
        most = max(num_parts[slot] for slot in slots)
        micro_batches += [tuple((slot, part) for slot in slots if part < num_parts[slot]) for part in range(most)]
    return tuple(micro_batches)


def read_arrays(
    reader: Reader, split: str, trajectories: Sequence[int], starts: Sequence[int], num_frames: int
) -> dict[str, Array]:
    """Windows as the arrays of a batch, without `numbers`. Raises DataError that names file, trajectory and frame."""
    try:
        block = reader.read_block(split, trajectories, starts, num_frames)
    except (StoreUnavailableError, StoreRefusedError):
        raise  # of no window: nothing is learned from trying them one by one
    except Exception as error:
        raise _named(error, reader, split, trajectories, starts, num_frames) from error
    arrays: dict[str, Array] = {
        "state": block.state,
        "static": block.static,
        "target": block.target,
        "parameters": block.parameters,
        "dt": block.dt.astype(np.float32),
    }
    for axis, coordinate in enumerate(block.coordinates):
        arrays[f"coordinates.{axis}"] = np.asarray(coordinate, np.float64)
    if block.points is not None and block.point_values is not None:
        arrays |= {f"{EXTRA}{POINTS}": block.points, f"{EXTRA}{POINT_VALUES}": block.point_values}
    return arrays


def _named(
    error: Exception, reader: Reader, split: str, trajectories: Sequence[int], starts: Sequence[int], num_frames: int
) -> DataError:
    """The error with the place it happened at: the windows are read again one by one until one fails."""
    for trajectory, start in zip(trajectories, starts, strict=True):
        try:
            reader.read_block(split, (trajectory,), (start,), num_frames)
        except Exception as failure:  # noqa: BLE001 - whatever a reader raises is reported with its place
            return _located(failure, reader, split, trajectory, start, num_frames)
    return _located(error, reader, split, trajectories[0], starts[0], num_frames, once=True)


def _located(
    error: Exception, reader: Reader, split: str, trajectory: int, start: int, num_frames: int, once: bool = False
) -> DataError:
    frames = f", frames {start} to {start + num_frames - 1}" if num_frames else ""
    location = f"task '{reader.task.name}', {reader.where(split, trajectory)}{frames}"
    what = error.message if isinstance(error, UpsError) else f"{type(error).__name__}: {error}"
    if once:
        return DataError(
            f"a batch that starts at {location} could not be read, though each window alone could: {what}",
            hint="the storage may be failing now and then, or memory short: look at the system log",
        )
    hint = error.hint if isinstance(error, UpsError) else ""
    return DataError(f"{location}: {what}", hint=hint or "check the file with `ups data validate`")


FAULT_DIR = "UPS_FAULT_DIR"
REQUEST = struct.Struct("<q")  # a batch number
MAX_MESSAGE = 64 * 1024


@dataclass(frozen=True, slots=True)
class ArrayLocation:
    """Where an array lies in the memory file of its batch."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class BatchReply:
    """Accompanies the memory file of a batch."""

    number: int
    task: int
    step: int
    num_bytes: int
    locations: tuple[ArrayLocation, ...]


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """A batch that could not be read: `expected` if it was an error that ups raises on purpose, `at` where,
    `cause` its name."""

    number: int
    message: str
    hint: str
    traceback: str
    expected: bool
    at: Frame | None = None
    cause: str = "data"


def fault_file(rank: int, worker: int) -> Path | None:
    """Where a worker writes its stack if UPS_FAULT_DIR names a directory, else None."""
    directory = os.environ.get(FAULT_DIR)
    return Path(directory) / f"worker_{rank}_{worker}.txt" if directory and Path(directory).is_dir() else None


def stack_file(rank: int, worker: int) -> Path | None:
    """Where a worker writes its stack when it crashes or is sent SIGUSR1; None outside a recorded run."""
    stem = worker_stem(worker)
    return fault_file(rank, worker) or (None if stem is None else stem.with_name(f"{stem.name}.crash.txt"))
