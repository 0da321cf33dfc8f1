"""Reads ahead where data lie in object stores; the sampler is arithmetic: what comes next is known.

Threads read the windows of the next parts at the same time, because a server answers many requests in the time of one.
How many parts ahead is for the caller (`data.loader.prefetch`). What was read is marked in the cache
(`ups.buckets.block_cache`) with the time of its next read, which is arithmetic as well, so that what is needed last is
evicted first.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from ups.buckets.block_cache import BlockCache, the_cache
from ups.buckets.cached_objects import noted_blocks, threads
from ups.data.rank_source import Array, ArrayBatch, Planned, RankSource
from ups.errors import UpsError

# The arrays of a window, and the blocks of the cache that it was read from.
_Window = tuple[dict[str, Array], list[str]]


class ReadAhead:
    """What one process has begun to read of the parts of a `RankSource`."""

    def __init__(self, source: RankSource) -> None:
        self._source = source
        self._begun: dict[int, list[Future[_Window]]] = {}
        self._last: tuple[Planned, list[list[str]]] | None = None  # that was read, and the blocks of its windows
        self._pace = _Pace()

    @classmethod
    def of(cls, source: RankSource) -> ReadAhead | None:
        """One for a source of which some data lies in a bucket; None where nothing is gained by it."""
        return cls(source) if source.reads_fields and any(reader.remote for reader in source.readers) else None

    def want(self, numbers: Iterable[int]) -> None:
        """Begin to read these parts."""
        for number in numbers:
            if number not in self._begun:
                self._begun[number] = self._begin(number)

    def read(self, number: int) -> ArrayBatch:
        """One part, as `RankSource.read` gives it."""
        self._mark_last()
        self.want([number])
        windows = self._begun.pop(number)
        if not windows:
            return self._source.read(number)
        try:
            arrays, blocks = zip(*[window.result() for window in windows], strict=True)
        except BaseException:
            for waiting in (windows, *self._begun.values()):
                for window in waiting:
                    window.cancel()
            raise
        planned = self._source.plan(number)
        self._last = planned, list(blocks)
        # Parts of a position that was left are never asked for.
        self._begun = {n: begun for n, begun in self._begun.items() if n > number}
        return self._source.batch_of(planned, arrays)

    def _begin(self, number: int) -> list[Future[_Window]]:
        """Its windows, each read by a thread; none where they lie on this host."""
        planned = self._source.plan(number)
        if not self._source.readers[planned.task].remote:
            return []
        return [threads().submit(self._window, planned, row) for row in range(len(planned.numbers))]

    def _window(self, planned: Planned, row: int) -> _Window:
        with noted_blocks() as blocks:
            return self._source.arrays_of(planned, slice(row, row + 1)), blocks

    def _mark_last(self) -> None:
        """Tell the cache when the blocks of the part that was read last are used again."""
        if self._last is None:
            return
        (planned, windows), self._last = self._last, None
        seconds, cache = self._pace.seconds_per_step(planned.step), _cache()
        if seconds is None or cache is None or cache.has_room():
            return
        steps = steps_until_next_use(self._source, planned)
        for blocks, distance in zip(windows, steps.tolist(), strict=True):
            for key in blocks:
                cache.expect(key, distance * seconds)


class _Pace:
    """Seconds from step to step, over many steps: times of one pace can be compared with each other."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._seconds: float | None = None

    def seconds_per_step(self, step: int) -> float | None:
        """Called at each step; None before the second one."""
        now = time.monotonic()
        if self._last is not None and step > self._last[0]:
            seconds = (now - self._last[1]) / (step - self._last[0])
            self._seconds = seconds if self._seconds is None else 0.98 * self._seconds + 0.02 * seconds
        if self._last is None or step != self._last[0]:
            self._last = (step, now)
        return self._seconds


def _cache() -> BlockCache | None:
    """None where there is no room for one: whoever reads says so."""
    with contextlib.suppress(UpsError):
        return the_cache()
    return None


def steps_until_next_use(source: RankSource, planned: Planned) -> npt.NDArray[np.float64]:
    """For each window (n,) of a part: steps until frames of it are read again, be it with other frames around them.

    Ranks of a host are taken to follow each other, and to take the same rows in later steps. A window that the next
    pass gives to another host counts as not read for two passes.
    """
    task, sampler, cut = planned.task, source.sampler, source.cut
    index, batch_size = source.indexes[task], sampler.batch_sizes[task]
    trajectories, starts = (np.asarray(num_steps, np.int64) for num_steps in index.locate_all(planned.numbers))
    first = planned.numbers - starts  # of the trajectory
    last = first + np.array([index.windows_in(int(t)) for t in trajectories], np.int64) - 1
    reach = max(0, index.read_frames - 1)
    sharing = planned.numbers[:, None] + np.arange(-reach, reach + 1)  # (n, windows that share a frame with it)
    sharing = np.clip(sharing, first[:, None], last[:, None])
    _, begin = sampler.locate(planned.step, planned.slot)
    positions = sampler.next_positions(task, sharing.ravel(), begin + batch_size - 1)
    ends = cut.bounds(sampler.tasks_of_step(planned.step))[planned.slot, 1:]  # of the rows of each rank
    ranks = np.searchsorted(ends, positions % batch_size, side="right")
    here = ranks // source.host_ranks == cut.rank // source.host_ranks
    distance = np.where(here, positions - begin, 2 * len(index)).reshape(sharing.shape)
    num_steps: npt.NDArray[np.float64] = distance.min(axis=1) / sampler.positions_per_step(task)
    return num_steps
