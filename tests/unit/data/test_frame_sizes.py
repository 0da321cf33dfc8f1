"""How far the sizes of frames are apart, whatever the order and number in which they are read."""

from __future__ import annotations

import numpy as np
import pytest

from ups.data.normalize import FrameSizes


def frames(sizes: np.ndarray) -> np.ndarray:
    """(1, T, 1, 8): frames around 5 with these root mean squares."""
    return 5 + sizes[None, :, None, None] * np.array([1.0, -1.0] * 4)


def test_the_spread_is_that_of_the_logarithm_of_sizes_around_the_mean() -> None:
    sizes = np.exp(np.random.default_rng(0).normal(0, 2, 400))
    whole, parts = FrameSizes(1), FrameSizes(1)
    whole.add(frames(sizes))
    for part in np.array_split(sizes, 7):
        parts.add(frames(part))
    expected = float(np.log(np.maximum(sizes / 3, 1e-3)).std())
    assert whole.spread((5.0,), (3.0,)) == pytest.approx(expected, rel=1e-6)
    assert parts.spread((5.0,), (3.0,)) == pytest.approx(expected, rel=1e-6)
    assert whole.spread((0.0,), (3.0,)) < 1  # around another place they are alike


def test_frames_that_are_nothing_count_as_a_thousandth_and_no_frames_as_no_spread() -> None:
    measured = FrameSizes(1)
    assert measured.spread((), ()) == 0
    measured.add(np.zeros((1, 0, 1, 8)))
    assert measured.spread((5.0,), (1.0,)) == 0
    measured.add(frames(np.array([0.0, 1.0])))
    assert measured.spread((5.0,), (1.0,)) == pytest.approx(np.log(1000) / 2)


def test_of_many_frames_some_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ups.data.normalize._MOST_FRAMES", 64)
    sizes = np.exp(np.random.default_rng(1).normal(0, 1, 3000))
    measured = FrameSizes(1)
    for part in np.array_split(sizes, 11):
        measured.add(frames(part))
    assert measured._num_rows <= 64
    assert measured.spread((5.0,), (1.0,)) == pytest.approx(1.0, rel=0.3)
