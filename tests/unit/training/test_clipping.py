"""Only outliers are cut by the relative limit, and they do not raise it."""

from __future__ import annotations

import pytest
import torch

from ups.config.stage import OptimConfig
from ups.training.optim import GradientJudge
from ups.training.progress import Progress


def after(norms: list[float], config: OptimConfig) -> tuple[Progress, list[float]]:
    progress, factors = Progress(), []
    judge = GradientJudge(config)
    for norm in norms:
        gradient = torch.ones(1, dtype=torch.float64)
        judge.judge(progress, torch.tensor(norm, dtype=torch.float64), [gradient])
        factors.append(float(gradient))
        progress.stage_step += 1
    judge.read(progress)
    return progress, factors


def test_the_absolute_limit_needs_no_history() -> None:
    progress, factors = after([0.5, 1.0, 4.0], OptimConfig(clip_norm=1.0))
    assert factors == pytest.approx([1.0, 1.0, 0.25], rel=1e-6)
    assert progress.mean_norm == 0.0


def test_without_limits_nothing_is_cut() -> None:
    assert after([1e9] * 30, OptimConfig(clip_norm=0.0))[1] == [1.0] * 30


def test_an_outlier_is_cut_to_the_ratio_and_counts_as_the_limit() -> None:
    config = OptimConfig(clip_norm=0.0, clip_ratio=3.0)
    progress, factors = after([2.0] * 25 + [100.0], config)
    assert factors[:25] == [1.0] * 25
    assert factors[25] == pytest.approx(6.0 / 100.0, rel=1e-6)
    assert progress.mean_norm == pytest.approx(0.95 * 2.0 + 0.05 * 6.0)


def test_the_first_updates_are_not_cut_relatively() -> None:
    config = OptimConfig(clip_norm=0.0, clip_ratio=1.5)
    progress, factors = after([100.0 * 0.5**n for n in range(19)] + [100.0], config)
    assert factors == [1.0] * 20
    assert progress.mean_norm > 0


def test_the_lower_of_two_limits_holds() -> None:
    config = OptimConfig(clip_norm=1.0, clip_ratio=3.0)
    assert after([2.0] * 25 + [100.0], config)[1][25] == pytest.approx(0.01, rel=1e-6)
    assert after([0.1] * 25 + [100.0], config)[1][25] == pytest.approx(0.003, rel=1e-6)


def test_gradients_that_were_zero_so_far_set_no_limit() -> None:
    config = OptimConfig(clip_norm=0.0, clip_ratio=3.0)
    progress, factors = after([0.0] * 30 + [2.0], config)
    assert factors[30] == 1.0
    assert progress.mean_norm > 0
