"""The numbers of a step, the law of errors, and the distance."""

from __future__ import annotations

import math

import pytest
import torch

from ups.models.error_model import Rollouts, fit_error_model, period_ends, shape_numbers
from ups.models.normalization import Constants
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

LEADS = [1, 2, 3, 4]
FLOOR = math.log(2e-4)


def task(boundary: str) -> TaskSpec:
    return TaskSpec("t", (FieldSpec("u"),), (AxisSpec("x", boundary),), dt=1.0)  # type: ignore[arg-type]


def octaves(u: torch.Tensor, boundary: str = "periodic") -> torch.Tensor:
    """Log sizes of the waves by octave of one line."""
    return shape_numbers(u[None, None], task(boundary), Constants())[0, 3 + 1 + 2 :]


@pytest.mark.parametrize(("wave", "octave"), [(1, 0), (2, 1), (3, 2), (4, 2), (9, 4), (31, 5)])
def test_a_wave_shows_in_its_octave_only_wherever_it_is(wave: int, octave: int) -> None:
    x = torch.arange(64) / 64
    moved = [octaves(torch.sin(2 * math.pi * wave * (x - shift))) for shift in (0.0, 0.3)]
    assert torch.allclose(moved[0], moved[1], atol=0.05)  # rounding, near the floor
    assert moved[0][octave].exp() == pytest.approx(math.sqrt(0.5), rel=1e-3)
    assert all(size < FLOOR for n, size in enumerate(moved[0]) if n != octave)


def test_sizes_of_all_octaves_together_are_that_of_the_field() -> None:
    u = torch.randn(33, generator=torch.Generator().manual_seed(0))
    for boundary in ("periodic", "wall"):
        total = octaves(u, boundary).exp().square().sum().sqrt()
        assert total == pytest.approx(float(u.std(correction=0)), rel=2e-2)


def test_a_long_axis_has_a_number_for_what_its_table_leaves_out() -> None:
    x = torch.arange(4096) / 4096
    low, high = (octaves(torch.sin(2 * math.pi * k * x)) for k in (5, 1500))
    assert low[-1] < math.log(1e-2)
    assert high[-1].exp() == pytest.approx(math.sqrt(0.5), rel=1e-2)


def rollouts(count: int, seed: int, effect: float) -> Rollouts:
    """Numbers of which the first decides the error, as `effect` says."""
    draw = torch.Generator().manual_seed(seed)
    means = torch.randn(count, 1, 6, generator=draw).expand(-1, len(LEADS), -1)
    noise = 0.2 * torch.randn(count, len(LEADS), 1, generator=draw)
    errors = (effect * means[..., :1] + noise).exp() * torch.tensor(LEADS)[:, None]
    ends = len(period_ends(LEADS[-1]))
    each = means[:, :1].expand(-1, ends, -1)
    return Rollouts(means, errors, each, each, torch.zeros(count, len(LEADS), 0), torch.zeros(count))


def test_the_law_finds_what_decides_the_error() -> None:
    model = fit_error_model(LEADS, rollouts(128, 0, 1.0), rollouts(64, 1, 1.0))
    new = rollouts(64, 2, 1.0)
    rest = new.errors.log() - model.log_error(model.components(new.means), slice(None))
    assert rest.std() < 0.3
    assert abs(float(rest.mean())) < 0.1


def test_errors_that_nothing_explains_get_no_law() -> None:
    model = fit_error_model(LEADS, rollouts(32, 0, 0.0), rollouts(64, 1, 0.0))
    new = rollouts(64, 2, 0.0)
    spread = model.log_error(model.components(new.means), slice(None)).std(0)
    assert float(spread.max()) < 0.1


def test_trajectories_that_end_earlier_or_blow_up_are_left_out_of_the_law() -> None:
    train = rollouts(128, 0, 1.0)
    train.errors[::5, 2:] = math.nan
    train.errors[1] = math.inf
    model = fit_error_model(LEADS, train, rollouts(64, 1, 1.0))
    assert all(value.isfinite().all() for value in vars(model).values())


def test_a_number_in_its_tail_is_far_out() -> None:
    model = fit_error_model(LEADS, rollouts(128, 0, 1.0), rollouts(64, 1, 1.0))
    usual = rollouts(64, 2, 1.0).means[:, 0]
    odd = usual.clone()
    odd[:, 3] = -8.0
    assert model.distance(usual, 0).median() < 1
    assert model.distance(odd, 0).min() > 2 * model.distance(usual, 0).max()


def test_early_steps_have_periods_of_their_own() -> None:
    ends = period_ends(100_000)
    assert (ends[0], ends[-1]) == (1, 100_000)
    assert len(ends) <= 13
