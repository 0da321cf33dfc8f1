"""Brings data from object stores to this host before it is read; the sampler is arithmetic: what comes next is known.

Threads bring the windows of a part at the same time, because a server answers many requests in the time of one. How
many parts ahead is for the caller (`data.loader.prefetch`), and less where the cache is small: what is brought must
still be there when it is read. What was read is marked in the cache (`ups.buckets.block_cache`) with the time of its
next read, which is arithmetic as well, so that what is needed last is evicted first. Nothing fails here: what could not
be brought is asked for again, with retries, when it is read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ups.buckets.block_cache import BLOCK_BYTES, BlockCache, the_cache
from ups.buckets.cached_objects import threads
from ups.data.rank_source import Planned, RankSource
from ups.errors import UpsError
from ups.formats.base import Reader

# Of windows ahead of the one that is read.
MAX_WINDOWS = 256
# A server that says nothing is waited for where a window is read, and named there.
WAIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class _Part:
    """windows: the blocks in the cache of each of its windows, as soon as they are there."""

    planned: Planned
    windows: list[Future[list[str]]]

    def blocks(self) -> list[list[str]]:
        """By window; none of those that are not there."""
        return [one.result() if one.done() and one.exception() is None else [] for one in self.windows]


class ReadAhead:
    """What one process has asked for of the parts of a `RankSource`."""

    def __init__(self, source: RankSource) -> None:
        self._source = source
        self._asked: dict[int, _Part] = {}
        self._read: _Part | None = None  # by the caller, after it has waited for it
        self._pace = _Pace()
        # All processes of the host together take half of the cache: the other half is for what is used again.
        cache = _cache()
        self._most_blocks = 0 if cache is None else cache.limit_bytes // BLOCK_BYTES // 2 // source.host_readers
        self._window_blocks = 0.0  # of the windows so far; before the first one nothing is known

    @classmethod
    def of(cls, source: RankSource) -> ReadAhead | None:
        """One for a source of which some data lies in a bucket; None where there is nothing to bring."""
        remote = any(reader.remote for reader in source.readers)
        return cls(source) if remote and source.reads_fields else None

    def want(self, numbers: Iterable[int]) -> None:
        """Begin to bring these parts, unless too much is on its way."""
        for number in numbers:
            if number not in self._asked and self._may_ask():
                self._asked[number] = self._ask(number)

    def wait(self, number: int) -> None:
        """Bring one part now; returns when all of it was tried, or after WAIT_SECONDS. The one before was read."""
        self._mark_read()
        part = self._asked.pop(number, None) or self._ask(number)
        wait(part.windows, timeout=WAIT_SECONDS)
        counts = [len(blocks) for blocks in part.blocks() if blocks]
        if counts:
            self._window_blocks = max(0.9 * self._window_blocks, sum(counts) / len(counts))
        self._read = part
        # Parts of a position that was left are never waited for.
        self._asked = {n: found for n, found in self._asked.items() if n > number}

    def _may_ask(self) -> bool:
        num_windows = sum(len(part.windows) for part in self._asked.values())
        if num_windows == 0:
            return True
        with_one_more = num_windows + num_windows // len(self._asked)
        return num_windows < MAX_WINDOWS and 0 < self._window_blocks * with_one_more < self._most_blocks

    def _mark_read(self) -> None:
        """Tell the cache when the blocks of the part that was read are used again."""
        if self._read is None or not self._read.windows:
            return
        part, self._read = self._read, None
        seconds, cache = self._pace.seconds_per_step(part.planned.step), _cache()
        if seconds is None or cache is None or cache.has_room():
            return
        needed = {key for other in self._asked.values() for blocks in other.blocks() for key in blocks}
        steps = steps_until_next_use(self._source, part.planned)
        for blocks, distance in zip(part.blocks(), steps.tolist(), strict=True):
            for key in blocks:
                if key not in needed:
                    cache.expect(key, distance * seconds)

    def _ask(self, number: int) -> _Part:
        planned = self._source.plan(number)
        reader, index = self._source.readers[planned.task], self._source.indexes[planned.task]
        if not reader.remote:
            return _Part(planned, [])
        trajectories, starts = index.locate_all(planned.numbers)
        windows = [
            threads().submit(_bring, reader, self._source.split, int(trajectory), int(start), index.read_frames)
            for trajectory, start in zip(trajectories, starts, strict=True)
        ]
        return _Part(planned, windows)


class _Pace:
    """Seconds from step to step, over many steps: times of one pace can be compared with each other."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._seconds: float | None = None

    def seconds_per_step(self, step: int) -> float | None:
        """Called at each step; None before the second one."""
        now = time.monotonic()
        if self._last is not None and step > self._last[0]:
            taken = (now - self._last[1]) / (step - self._last[0])
            self._seconds = taken if self._seconds is None else 0.98 * self._seconds + 0.02 * taken
        if self._last is None or step != self._last[0]:
            self._last = (step, now)
        return self._seconds


def _cache() -> BlockCache | None:
    """None where there is no room for one: whoever reads says so."""
    with contextlib.suppress(UpsError):
        return the_cache()
    return None


def _bring(reader: Reader, split: str, trajectory: int, start: int, num_frames: int) -> list[str]:
    """The blocks of a window in the cache; none if that is not known."""
    with contextlib.suppress(UpsError, OSError):
        return reader.bring(split, trajectory, start, num_frames)
    return []


def steps_until_next_use(source: RankSource, planned: Planned) -> npt.NDArray[np.float64]:
    """For each window (n,) of a part: steps until frames of it are read again, be it with other frames around them.

    Ranks of a host are taken to follow each other. A window that the next pass gives to another host counts as not
    read for two passes.
    """
    task, sampler, cut = planned.task, source.sampler, source.cuts[planned.task]
    index, batch_size = source.indexes[task], sampler.batch_sizes[task]
    trajectories, starts = (np.asarray(num_steps, np.int64) for num_steps in index.locate_all(planned.numbers))
    first = planned.numbers - starts  # of the trajectory
    last = first + np.array([index.windows_in(int(t)) for t in trajectories], np.int64) - 1
    reach = max(0, index.read_frames - 1)
    sharing = planned.numbers[:, None] + np.arange(-reach, reach + 1)  # (n, windows that share a frame with it)
    sharing = np.clip(sharing, first[:, None], last[:, None])
    _, begin = sampler.locate(planned.step, planned.slot)
    positions = sampler.next_positions(task, sharing.ravel(), begin + batch_size - 1)
    ranks = positions % batch_size // cut.share
    here = ranks // source.host_ranks == cut.rank // source.host_ranks
    distance = np.where(here, positions - begin, 2 * len(index)).reshape(sharing.shape)
    num_steps: npt.NDArray[np.float64] = distance.min(axis=1) / sampler.positions_per_step(task)
    return num_steps
