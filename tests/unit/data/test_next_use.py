"""When frames are read again: what the arithmetic says is what happens when the sampler is played forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ups.data.rank_source import Planned, RankSource, WindowIndex
from ups.data.read_ahead import steps_until_next_use
from ups.data.sampler import Cut, Sampler

TRAJECTORIES, FRAMES, WINDOW, BLOCK = 20, 12, 4, 6


def _source(rank: int, world: int, host_ranks: int, steady: bool = False, **differing: Any) -> RankSource:
    index = WindowIndex(TRAJECTORIES, 0 if steady else FRAMES, 0 if steady else WINDOW, steady, **differing)
    sampler = Sampler(["one"], [len(index)], seed=3, batch_sizes=[BLOCK], blocks_per_step=1)
    cut = Cut(rank, world, (BLOCK,), (1,))
    return RankSource((None,), (index,), sampler, cut, host_ranks=host_ranks)  # type: ignore[arg-type]


def _planned(source: RankSource, step: int) -> Planned:
    return Planned(step, 0, 0, source.sampler.block(step, 0, *source.rows(step, 0, 0)).numbers)


def _frames(source: RankSource, number: int) -> set[tuple[int, int]]:
    trajectory, start = source.indexes[0].locate(number)
    return {(trajectory, frame) for frame in range(start, start + max(1, source.indexes[0].read_frames))}


def _played(source: RankSource, number: int, step: int, host: list[int]) -> int | None:
    """Steps until a rank of the host reads a frame of the window; None within the next pass and a half."""
    wanted = _frames(source, number)
    for later in range(step + 1, step + 2 * len(source.indexes[0]) // BLOCK + 2):
        for rank in host:
            ((rows,),) = replace(source.cut, rank=rank).parts((0,))
            for other in source.sampler.block(later, 0, *rows).numbers.tolist():
                if wanted & _frames(source, other):
                    return later - step
    return None


@pytest.mark.parametrize("step", [0, 3, 7, 12])
@pytest.mark.parametrize("steady", [False, True])
def test_frames_are_read_again_when_the_arithmetic_says(step: int, steady: bool) -> None:
    source = _source(0, 1, 1, steady)
    planned = _planned(source, step)
    next_use = steps_until_next_use(source, planned)
    for number, steps in zip(planned.numbers.tolist(), next_use.tolist(), strict=True):
        assert int(steps) == _played(source, number, step, [0])


def test_trajectories_of_differing_length_share_no_frame() -> None:
    source = _source(0, 1, 1, frames=np.array([12, 3, 7, 4, 9] * 4))
    planned = _planned(source, 1)
    next_use = steps_until_next_use(source, planned)
    for number, steps in zip(planned.numbers.tolist(), next_use.tolist(), strict=True):
        assert int(steps) == _played(source, number, 1, [0])


def test_what_another_host_reads_next_is_not_read_here() -> None:
    source = _source(1, 6, 2)
    for step in range(4):
        planned = _planned(source, step)
        (steps,) = steps_until_next_use(source, planned).tolist()
        played = _played(source, int(planned.numbers[0]), step, [0, 1])
        # Of each window that shares a frame only the next time counts: later ones of it may come here sooner.
        assert played is None or 1 <= played <= int(steps)
        first = _played(source, int(planned.numbers[0]), step, list(range(6)))
        assert first is not None
        assert first <= int(steps)
