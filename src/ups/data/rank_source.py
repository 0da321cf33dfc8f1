"""What one rank reads, and how: the i-th micro-batch of the rank as numpy arrays.

Owns the map from a batch number to files, and the naming of whatever goes wrong there. Runs in the rank itself or in a
worker process, so it is picklable and never imports torch: a worker without torch starts in a fraction of a second and
needs a fraction of the memory, which counts with 8 workers on each of 1,024 ranks. Processes are the business of
`ups.data.worker_pool`, tensors of `ups.data.loader`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ups.data.sampler import Cut, Sampler
from ups.data.windows import WindowIndex
from ups.errors import DataError, UpsError
from ups.formats.base import Reader

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ArrayBatch:
    """A batch before it is tensors: the arrays of `ups.spec.batch.Batch` by name, `coordinates.<axis>` among them."""

    task: int
    step: int
    arrays: dict[str, Array]


@dataclass(frozen=True, slots=True)
class Planned:
    """What a batch number stands for. numbers (B,) int64."""

    step: int
    slot: int
    task: int
    numbers: Int64


@dataclass(frozen=True)
class RankSource:
    """Readers, sampler and the cut of one rank: batch number -> arrays."""

    readers: tuple[Reader, ...]
    indexes: tuple[WindowIndex, ...]
    sampler: Sampler
    cut: Cut
    split: str = "train"

    @property
    def batches_per_step(self) -> int:
        return self.sampler.blocks_per_step * self.cut.batches_per_block

    def plan(self, number: int) -> Planned:
        """Batch `number` of this rank: inside a step, slot by slot, and micro-batch by micro-batch in a slot."""
        step, in_step = divmod(number, self.batches_per_step)
        slot, batch = divmod(in_step, self.cut.batches_per_block)
        block = self.sampler.block(step, slot, *self.cut.rows(batch))
        return Planned(step, slot, block.task, block.numbers)

    def read(self, number: int) -> ArrayBatch:
        """Reads batch `number`. Raises DataError that names file, trajectory and frame."""
        planned = self.plan(number)
        reader, index = self.readers[planned.task], self.indexes[planned.task]
        per_trajectory = index.windows_per_trajectory
        trajectories = (planned.numbers // per_trajectory).tolist()
        starts = (planned.numbers % per_trajectory).tolist()
        arrays = read_arrays(reader, self.split, trajectories, starts, index.read_frames)
        arrays["numbers"] = planned.numbers
        return ArrayBatch(planned.task, planned.step, arrays)

    def describe(self, number: int) -> str:
        """What batch `number` reads, in words for a message."""
        planned = self.plan(number)
        reader, index = self.readers[planned.task], self.indexes[planned.task]
        trajectory, start = index.locate(int(planned.numbers[0]))
        return (
            f"{len(planned.numbers)} windows of task '{reader.task.name}' for step {planned.step}, the first at "
            f"{reader.where(self.split, trajectory)}, frame {start}"
        )


def read_arrays(
    reader: Reader, split: str, trajectories: Sequence[int], starts: Sequence[int], num_frames: int
) -> dict[str, Array]:
    """Windows as the arrays of a batch, without `numbers`. Raises DataError that names file, trajectory and frame."""
    try:
        block = reader.read_block(split, trajectories, starts, num_frames)
    except Exception as error:
        raise _named(error, reader, split, trajectories, starts, num_frames) from error
    arrays: dict[str, Array] = {
        "state": block.state,
        "static": block.static,
        "target": block.target,
        "parameters": block.parameters,
        "dt": np.full(len(trajectories), block.dt, np.float32),
    }
    for axis, coordinate in enumerate(block.coordinates):
        arrays[f"coordinates.{axis}"] = np.asarray(coordinate, np.float64)
    return arrays


def _named(
    error: Exception, reader: Reader, split: str, trajectories: Sequence[int], starts: Sequence[int], num_frames: int
) -> DataError:
    """The error with the place it happened at: the windows are read again one by one until one fails."""
    for trajectory, start in zip(trajectories, starts, strict=True):
        try:
            reader.read_block(split, (trajectory,), (start,), num_frames)
        except Exception as found:  # noqa: BLE001 - whatever a reader raises is reported with its place
            return _located(found, reader, split, trajectory, start, num_frames)
    return _located(error, reader, split, trajectories[0], starts[0], num_frames, once=True)


def _located(
    error: Exception, reader: Reader, split: str, trajectory: int, start: int, num_frames: int, once: bool = False
) -> DataError:
    frames = f", frames {start} to {start + num_frames - 1}" if num_frames else ""
    place = f"task '{reader.task.name}', {reader.where(split, trajectory)}{frames}"
    what = error.message if isinstance(error, UpsError) else f"{type(error).__name__}: {error}"
    if once:
        return DataError(
            f"a batch that starts at {place} could not be read, though each window alone could: {what}",
            hint="the storage may be failing now and then, or memory short: look at the system log",
        )
    hint = error.hint if isinstance(error, UpsError) else ""
    return DataError(f"{place}: {what}", hint=hint or "check the file with `ups data validate`")
