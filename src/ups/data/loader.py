"""The micro-batches of one rank, in order, as CPU tensors: read in the loop itself or prefetched by worker processes.

Which windows is decided by `ups.data.sampler`, reading by `ups.data.rank_source`, processes by
`ups.data.worker_pool`. This module makes tensors, keeps a bounded number of batches on the way, pins memory where
there is an accelerator, and knows the position, which is one integer: the step.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from ups.config.schema import DataConfig, LoaderConfig
from ups.data.latent_cache import LatentCache
from ups.data.rank_source import EXTRA, ArrayBatch, RankSource, WindowIndex, read_arrays
from ups.data.read_ahead import ReadAhead
from ups.data.sampler import Cut, build_sampler
from ups.data.worker_pool import MAX_ASKED, WorkerPool
from ups.errors import CheckpointError, ConfigError, DataError, MachineError, UpsError
from ups.formats.base import Reader
from ups.spec.batch import Batch, RankInfo
from ups.spec.task import TaskSpec

logger = logging.getLogger(__name__)


class Loader:
    """Endless micro-batches of one rank, `batches_in_step(step)` of them for an optimizer step.

    A micro-batch is a tuple of batches of one task each, one for each task where tasks are not grouped. Ranks may have
    different tasks, and numbers of micro-batches, unless they go through them together (`Cut`). Close it (or use it in
    a `with` block) to end its workers; they also end when it is collected or its process dies.
    """

    def __init__(self, source: RankSource, rank_info: RankInfo, config: LoaderConfig, start_step: int = 0) -> None:
        self.source = source
        self._tasks = tuple(reader.task for reader in source.readers)
        self._rank = rank_info.rank
        self._pin = rank_info.device_kind == "cuda"
        self._config = config
        self._pool: WorkerPool | None = None
        self._failure: UpsError | None = None
        self._closed = False
        self.step = start_step  # of the next micro-batch
        self._delivered = 0  # micro-batches of this step
        self._numbers = source.numbers(start_step)  # of the parts to be asked for
        self._coming: deque[int] = deque()  # without workers: numbers that are next, for what is brought ahead
        self._ahead = ReadAhead.of(source) if not config.workers else None
        self.load_state_dict({"step": start_step})

    def batches_in_step(self, step: int) -> int:
        """Micro-batches of a step on this rank."""
        return len(self.source.layout(step))

    def windows_in_step(self, step: int) -> int:
        """Windows of a step over all ranks."""
        sampler = self.source.sampler
        return sum(sampler.batch_sizes[task] for task in sampler.tasks_of_step(step))

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the workers; empty before they are started and without workers."""
        return self._pool.pids if self._pool is not None else ()

    def start(self) -> None:
        """Start the workers now, so that they come up while the caller does something else."""
        if self._closed:
            raise DataError("the loader is closed")
        if self._config.workers and self._pool is None:
            if not hasattr(os, "memfd_create"):
                raise MachineError("reader processes need Linux", hint="read in the loop: data.loader.workers=0")
            self._pool = WorkerPool(
                self.source,
                num_workers=self._config.workers,
                rank=self._rank,
                timeout_seconds=self._config.timeout_seconds,
            )
            weakref.finalize(self, self._pool.close)

    def __iter__(self) -> Iterator[tuple[Batch, ...]]:
        return self

    def __next__(self) -> tuple[Batch, ...]:
        if self._failure is not None:
            raise self._failure
        self.start()
        layout = self.source.layout(self.step)
        try:
            weights = [self.source.sample_weight(self.step, *part) for part in layout[self._delivered]]
            batches = tuple(self._part(weight) for weight in weights)
        except UpsError as error:
            # Once a batch is missing, what follows is not the sequence anymore: stay failed.
            self._failure = error
            raise
        self._delivered += 1
        if self._delivered == len(layout):
            self.step, self._delivered = self.step + 1, 0
        return batches

    def _part(self, weight: float) -> Batch:
        arrays = self._read() if self._pool is None else self._receive(self._pool)
        batch = _to_batch(arrays.arrays, self._tasks[arrays.task], arrays.step, weight)
        return batch.pin_memory() if self._pin else batch

    def _read(self) -> ArrayBatch:
        if self._ahead is None:
            return self.source.read(next(self._numbers))
        while len(self._coming) <= self._config.prefetch:
            self._coming.append(next(self._numbers))
        self._ahead.want(self._coming)
        number = self._coming.popleft()
        return self._ahead.read(number)

    def _receive(self, pool: WorkerPool) -> ArrayBatch:
        ahead = self._config.workers * min(self._config.prefetch, MAX_ASKED)
        while pool.num_asked < ahead:
            pool.ask(next(self._numbers))
        return pool.receive()

    def state_dict(self) -> dict[str, int]:
        """The position: the first step of which not every batch was delivered."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the first batch of `state["step"]`, whatever the world size was when it was saved."""
        step = state.get("step")
        if not isinstance(step, int) or step < 0:
            raise CheckpointError(f"the position of a loader is a step of 0 or more, not {step!r}")
        if self._pool is not None:
            self._pool.cancel()
        self.step, self._delivered = step, 0
        self._coming.clear()
        self._numbers = self.source.numbers(step)

    def close(self) -> None:
        """End the workers, within seconds even if one is stopped; may be called twice."""
        self._closed = True
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def build_loader(
    data: DataConfig,
    readers: Sequence[Reader],
    rank_info: RankInfo,
    *,
    seed: int,
    window_frames: int,
    micro_batch_size: int | None = None,
    grouped: bool = False,
    together: bool = False,
    start_step: int = 0,
    array_source: LatentCache | None = None,
) -> Loader:
    """The training loader of one rank: windows of `window_frames` frames of the train split.

    readers: one for each of `data.tasks`, in that order. grouped: tasks of equal grids share a micro-batch. together:
    all ranks have the same tasks in the same micro-batches. array_source: reads windows in place of the readers. Raises
    DataError if a task has no window of that length.
    """
    if len(readers) != len(data.tasks):
        raise ConfigError(f"{len(data.tasks)} tasks need as many readers, not {len(readers)}")
    costs = tuple(math.prod(reader.space) for reader in readers)  # of a window: a network works on every point
    rank, ranks = rank_info.rank, rank_info.world_size
    cut = Cut(rank, ranks, tuple(data.batch_sizes), costs, micro_batch_size, together)
    indexes = tuple(WindowIndex.of(reader, "train", window_frames) for reader in readers)
    names = [task.name for task in data.tasks]
    for name, index in zip(names, indexes, strict=True):
        short = 0 if index.frames is None else int((index.frames < window_frames).sum())
        if short and rank_info.rank == 0:
            logger.warning(
                "%d trajectories of task '%s' are shorter than %d frames: unused", short, name, window_frames
            )
    sampler = build_sampler(data, names, [len(index) for index in indexes], seed=seed)
    source = RankSource(
        tuple(readers),
        indexes,
        sampler,
        cut,
        grouped,
        array_source=array_source,
        host_ranks=rank_info.local_world_size,
        host_readers=rank_info.local_world_size * max(1, data.loader.workers),
    )
    return Loader(source, rank_info, data.loader, start_step)


def first_batch(reader: Reader, split: str, *, window_frames: int, batch_size: int) -> Batch:
    """The first window of each of the first trajectories that are long enough; of a steady task its fields."""
    index = WindowIndex.of(reader, split, window_frames)
    trajectories = [t for t in range(index.num_trajectories) if index.windows_in(t)][:batch_size]
    arrays = read_arrays(reader, split, trajectories, [0] * len(trajectories), index.read_frames)
    arrays["numbers"] = np.array([index.number(t, 0) for t in trajectories], np.int64)
    return _to_batch(arrays, reader.task, 0)


def _to_batch(arrays: Mapping[str, Any], task: TaskSpec, step: int, sample_weight: float = 1.0) -> Batch:
    named = {name: values for name, values in arrays.items() if "." not in name}
    return Batch.of(
        task,
        **named,
        coordinates=[arrays[f"coordinates.{axis}"] for axis in range(task.num_spatial_dims)],
        extra={name.removeprefix(EXTRA): values for name, values in arrays.items() if name.startswith(EXTRA)},
        stage_step=step,
        sample_weight=sample_weight,
    )
