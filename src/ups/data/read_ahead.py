"""Brings data from object stores to this host before it is read; the sampler is arithmetic: what comes next is known.

Threads bring the windows of a part at the same time, because a server answers many requests in the time of one. How
many parts ahead is for the caller (`data.loader.prefetch`). Nothing fails here: what could not be brought is asked for
again, with patience, by whoever reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import Future, wait

from ups.buckets.cached_objects import threads
from ups.data.rank_source import RankSource
from ups.errors import UpsError
from ups.formats.base import GridReader

# Of windows that are on their way: more would only push each other out of a small cache.
MAX_WINDOWS = 256
# A server that says nothing is waited for where a window is read, and named there.
WAIT_SECONDS = 5.0


class ReadAhead:
    """What one process has asked for of the parts of a `RankSource`."""

    def __init__(self, source: RankSource) -> None:
        self._source = source
        self._asked: dict[int, list[Future[None]]] = {}

    @classmethod
    def of(cls, source: RankSource) -> ReadAhead | None:
        """One for a source of which some data lies in a bucket; None where there is nothing to bring."""
        remote = any(isinstance(reader, GridReader) and reader.remote for reader in source.readers)
        return cls(source) if remote and source.fields else None

    def want(self, numbers: Iterable[int]) -> None:
        """Begin to bring these parts, unless too much is on its way."""
        for number in numbers:
            on_the_way = sum(not one.done() for asked in self._asked.values() for one in asked)
            if number not in self._asked and on_the_way < MAX_WINDOWS:
                self._asked[number] = self._ask(number)

    def wait(self, number: int) -> None:
        """Bring one part now; returns when all of it was tried, or after WAIT_SECONDS."""
        asked = self._asked.pop(number, None)
        wait(self._ask(number) if asked is None else asked, timeout=WAIT_SECONDS)
        # Parts of a position that was left are never waited for.
        self._asked = {n: found for n, found in self._asked.items() if n > number}

    def _ask(self, number: int) -> list[Future[None]]:
        planned = self._source.plan(number)
        reader, index = self._source.readers[planned.task], self._source.indexes[planned.task]
        if not isinstance(reader, GridReader) or not reader.remote:
            return []
        trajectories, starts = index.locate_all(planned.numbers)
        return [
            threads().submit(_bring, reader, self._source.split, int(trajectory), int(start), index.read_frames)
            for trajectory, start in zip(trajectories, starts, strict=True)
        ]


def _bring(reader: GridReader, split: str, trajectory: int, start: int, num_frames: int) -> None:
    with contextlib.suppress(UpsError, OSError):
        reader.bring(split, trajectory, start, num_frames)
