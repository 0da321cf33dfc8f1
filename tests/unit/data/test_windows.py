"""Window numbers and places are the same thing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ups.data.rank_source import WindowIndex
from ups.errors import DataError


@given(
    trajectories=st.integers(1, 10**10),
    frames=st.integers(1, 1000),
    window=st.integers(1, 1000),
    draw=st.floats(0, 1, exclude_max=True),
)
def test_number_and_place_are_inverse(trajectories: int, frames: int, window: int, draw: float) -> None:
    index = WindowIndex(trajectories, max(frames, window), min(frames, window))
    number = int(draw * len(index))
    trajectory, start = index.locate(number)
    assert index.number(trajectory, start) == number
    assert 0 <= trajectory < trajectories
    assert start + index.window_frames <= index.num_frames


def test_a_steady_task_has_one_window_per_trajectory() -> None:
    index = WindowIndex(5, 0, 3, steady=True)
    assert (len(index), index.locate(4), index.read_frames) == (5, (4, 0), 0)


def test_windows_that_do_not_fit_and_numbers_outside_are_refused() -> None:
    with pytest.raises(DataError, match="do not fit"):
        WindowIndex(5, 4, 5)
    with pytest.raises(DataError, match="window number"):
        WindowIndex(5, 4, 2).locate(15)
