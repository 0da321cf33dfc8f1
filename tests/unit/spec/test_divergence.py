"""A frame has diverged if it is not finite, or far larger than everything in the training data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ups.spec.descriptors import DIVERGED, DivergenceLimits, RangeFinder
from ups.spec.statistics import Statistics
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

TASK = TaskSpec(
    "t", (FieldSpec("T"), FieldSpec("v", tensor_rank=1), FieldSpec("c")), (AxisSpec("x"), AxisSpec("y")), dt=1.0
)
# a large mean, a component that is always 0 next to one that is not, and a field that never changes
FRAMES = np.random.default_rng(0).normal([290, 0, 0, 7], [1, 2, 0, 0], (6, 8, 8, 4)).transpose(0, 3, 1, 2)


def limits(*, measured: bool = True) -> DivergenceLimits:
    mean, std = FRAMES.mean((0, 2, 3)), np.where([1, 1, 0, 0], FRAMES.std((0, 2, 3)), 0.0)
    finder = RangeFinder(TASK.axes)
    finder.add(range(len(FRAMES)), FRAMES[:, None])
    ranges = {"state": finder.ranges(mean, std)} if measured else {}
    return DivergenceLimits.of(TASK, Statistics(state_mean=tuple(mean), state_std=tuple(std), ranges=ranges))


def changed(channel: int, value: float, *, everywhere: bool = True) -> torch.Tensor:
    frame = torch.from_numpy(FRAMES[:1].copy()).float()
    frame[0, channel, ... if everywhere else (3, 3)] = value
    return frame


@pytest.mark.parametrize("measured", [True, False])
def test_training_frames_have_not_diverged_and_nonfinite_or_huge_ones_have(measured: bool) -> None:
    known = limits(measured=measured)
    assert not known.exceeded(torch.from_numpy(FRAMES)).any()
    for value in (np.nan, np.inf, -np.inf, 4e17, -3e38):
        assert known.exceeded(changed(1, value, everywhere=False)).all()


def test_the_limit_is_ten_times_the_largest_frame_around_the_mean() -> None:
    known, mean = limits(), FRAMES.mean((0, 2, 3))
    away = FRAMES - mean[:, None, None]
    peak = np.abs(away[:, 0]).max()
    rms = np.sqrt(np.square(away[:, 0]).mean((1, 2)).max())
    assert DIVERGED == 10
    assert float(known.peak[0]) == pytest.approx(10 * peak, rel=1e-5)
    assert 10 * rms <= float(known.rms[0]) <= 10.2 * rms
    assert not known.exceeded(changed(0, 290 + 9 * peak, everywhere=False)).any()
    assert known.exceeded(changed(0, 290 + 11 * peak, everywhere=False)).all()
    assert known.exceeded(changed(0, 290 + 11 * rms)).all()


def test_a_frame_up_to_the_usual_peak_has_not_diverged() -> None:
    for known in (limits(), limits(measured=False)):
        assert known.usual_peak < float(known.rms.min())
    task = TaskSpec("t", (FieldSpec("u"),), (AxisSpec("x"),), dt=1.0)
    known = DivergenceLimits.of(task, Statistics(state_mean=(1.0,), state_std=(2.0,)))
    assert known.usual_peak == 199.0  # 100 deviations for the RMS, from a mean of 1
    assert not known.exceeded(torch.full((1, 1, 8), -199.0)).any()
    nothing = DivergenceLimits.of(task, Statistics(state_mean=(0.0,), state_std=(0.0,)))
    assert not np.inf <= nothing.usual_peak


def test_a_component_that_is_always_zero_has_the_size_of_its_field_and_a_constant_field_that_of_its_mean() -> None:
    known = limits()
    assert not known.exceeded(changed(2, 5.0)).any()
    assert known.exceeded(changed(2, 100.0)).all()
    assert not known.exceeded(changed(3, 8.0)).any()
    assert known.exceeded(changed(3, 100.0)).all()


def test_a_field_that_is_always_zero_diverges_only_where_it_is_not_finite() -> None:
    task = TaskSpec("t", (FieldSpec("u"),), (AxisSpec("x"),), dt=1.0)
    known = DivergenceLimits.of(task, Statistics(state_mean=(0.0,), state_std=(0.0,)))
    assert known.exceeded(torch.tensor([[[1e30, 0.0]], [[np.inf, 0.0]], [[np.nan, 0.0]]])).tolist() == [
        False,
        True,
        True,
    ]
