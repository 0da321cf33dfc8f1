"""Descriptors say what is in a frame, on any grid; their ranges are those of the train split, with room for chance."""

from __future__ import annotations

import numpy as np
import pytest

import ups.spec.descriptors as descriptors
from ups.spec.descriptors import RangeFinder, describe, descriptor_names
from ups.spec.task import AxisSpec

X = np.arange(64) / 64
LINE = (AxisSpec("x"),)


def described(frame: np.ndarray, axes: tuple[AxisSpec, ...]) -> dict[str, float]:
    """Of a frame (*S) with one channel, by name."""
    names = descriptor_names(axes, frame.shape)
    return dict(zip(names, describe(frame[None, None], axes)[0, 0], strict=True))


def test_a_sine_has_its_mean_extremes_slope_and_one_band() -> None:
    values = described(5 + 2 * np.sin(2 * np.pi * 9 * X), LINE)
    assert values["mean"] == pytest.approx(5)
    assert (values["least value"], values["greatest value"]) == pytest.approx((3, 7), abs=0.02)
    assert values["deviation"] == pytest.approx(np.sqrt(2))
    assert values["steepest rise along x"] == pytest.approx(2 * 2 * np.pi * 9 / 64, rel=0.05)
    bands = {name: value for name, value in values.items() if "waves" in name}
    assert bands.pop("RMS of waves 8 to 9 along x") == pytest.approx(np.sqrt(2))
    assert max(bands.values()) < 1e-12


@pytest.mark.parametrize("space", [(64,), (63,), (2,), (3,), (10, 7), (4, 6, 5), (2, 2)])
@pytest.mark.parametrize("boundary", ["periodic", "wall", "unknown"])
def test_the_bands_of_an_axis_hold_what_varies_along_it_on_every_grid(space: tuple[int, ...], boundary: str) -> None:
    axes = tuple(AxisSpec(name, boundary) for name, _ in zip("xyz", space, strict=False))  # type: ignore[arg-type]
    frame = np.random.default_rng(0).normal(size=space)
    values = described(frame, axes)
    for dim, axis in enumerate(axes):
        energy = sum(v**2 for name, v in values.items() if "waves" in name and name.endswith(f"along {axis.name}"))
        assert energy == pytest.approx((frame - frame.mean(axis=dim, keepdims=True)).var(), rel=1e-9)


def test_an_axis_that_is_not_periodic_has_no_step_across_its_ends() -> None:
    ramp = np.linspace(0, 1, 65)[:-1]
    assert described(ramp, (AxisSpec("x", "wall"),))["steepest fall along x"] > 0
    assert described(ramp, LINE)["steepest fall along x"] == pytest.approx(-63 / 64)
    walls = described(np.cos(np.pi * (np.arange(64) + 0.5) / 64), (AxisSpec("x", "wall"),))
    assert walls["RMS of half waves 1 along x"] == pytest.approx(walls["deviation"])


def trajectories(count: int, seed: int, amplitude: float = 1.0) -> np.ndarray:
    """(B, 5, 1, 64): two sines that decay, amplitudes drawn evenly."""
    draw = np.random.default_rng(seed)
    size, phase = draw.uniform(0, amplitude, (2, count, 2, 1)), draw.uniform(0, 1, (count, 2, 1))
    modes = draw.integers(1, 6, (count, 2, 1))
    first = (size[0] * np.sin(2 * np.pi * (modes * X + phase))).sum(axis=1)
    return (first[:, None] * 0.8 ** np.arange(5)[:, None])[:, :, None]


def outside(frames: np.ndarray, ranges: descriptors.Ranges) -> np.ndarray:
    """(B,): whether a trajectory has a frame outside of the limits."""
    values = describe(frames.reshape(-1, 1, 64), LINE)[:, 0].reshape(*frames.shape[:2], -1)
    limits = np.array(ranges[0])
    return ((values < limits[:, 2]) | (values > limits[:, 3])).any(axis=(1, 2))


@pytest.mark.parametrize("count", [16, 32, 128, 512])
def test_new_trajectories_of_the_same_kind_are_inside_and_other_waves_outside(count: int) -> None:
    alarms = []
    for seed in range(4):
        frames = trajectories(count, seed)
        finder = RangeFinder(LINE)
        finder.add(range(count), frames)
        ranges = finder.ranges([frames.mean()], [frames.std()])
        assert not outside(frames, ranges).any()
        alarms.append(outside(trajectories(256, 100 + seed), ranges).mean())
        assert outside(trajectories(64, 7)[..., ::3].repeat(3, axis=-1)[..., :64], ranges).mean() > 0.5  # other waves
        assert outside(trajectories(64, 8) + 0.1, ranges).all()  # another mean
    assert np.mean(alarms) <= 0.02


def test_a_trajectory_in_parts_and_many_trajectories_have_the_same_range(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = trajectories(21, 0)
    whole, parts, joined = (RangeFinder(LINE) for _ in range(3))
    whole.add(range(21), frames)
    for number in range(21):
        for first in (0, 2, 3):
            parts.add([number], frames[number : number + 1, first : {0: 2, 2: 3, 3: 5}[first]])
    assert parts.ranges([0.0], [1.0]) == whole.ranges([0.0], [1.0])
    monkeypatch.setattr(descriptors, "_MOST_ROWS", 8)
    for first in range(0, 21, 3):
        joined.add(range(first, first + 3), frames[first : first + 3])
    assert joined._num_rows <= 8 + 3
    low_high = [np.array(finder.ranges([0.0], [1.0]))[..., :2] for finder in (whole, joined)]
    np.testing.assert_array_equal(*low_high)


def test_a_single_trajectory_and_a_constant_channel_have_limits() -> None:
    finder = RangeFinder(LINE)
    finder.add([0], np.full((1, 3, 1, 64), 0.1, np.float32))
    ranges = finder.ranges([0.1], [0.0])
    assert np.isfinite(ranges).all()
    assert not outside(np.full((1, 1, 1, 64), 0.1, np.float32), ranges).any()
    assert outside(np.full((1, 1, 1, 64), 0.2), ranges).all()
