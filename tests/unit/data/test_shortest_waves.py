"""Which data never have the wave of two points: found by its largest amplitude, along periodic axes alone."""

from __future__ import annotations

import numpy as np

from ups.data.normalize import ShortestWaves
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

TASK = TaskSpec("plane", (FieldSpec("a"), FieldSpec("b")), (AxisSpec("x"), AxisSpec("y", boundary="wall")), dt=0.1)


def smooth_frames(points: int) -> np.ndarray:
    """(B, T, C, X, Y) of a few long waves, in float32 as stores are."""
    rng = np.random.default_rng(0)
    x = np.arange(points) / points * 2 * np.pi
    waves = sum(rng.normal(size=(2, 3, 2, 1, 4)) * np.sin(k * x + k)[:, None] for k in range(1, 4))
    return (waves + 1.0).astype(np.float32)


def test_smooth_data_have_none_and_rounding_is_not_one() -> None:
    waves, frames = ShortestWaves(TASK), smooth_frames(16)
    waves.add(frames)
    std = tuple(frames.std((0, 1, 3, 4)).tolist())
    assert waves.absent(std) == ((16, 0), (16, 0))
    # One frame of one trajectory is enough to have it.
    frames[1, 2, 1, :, 3] += 1e-4 * (-1.0) ** np.arange(16)
    waves.add(frames)
    assert waves.absent(std) == ((16, 0), (0, 0))


def test_an_axis_with_an_odd_number_of_points_says_nothing() -> None:
    waves = ShortestWaves(TASK)
    waves.add(smooth_frames(15))
    waves.add(smooth_frames(15)[:, :0])
    assert waves.absent((1.0, 1.0)) == ((0, 0), (0, 0))
