"""Darcy's equation in discretized form: the reference solver's, a way nearer to it, and a measure of the distance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.small_model import statistics_of
from ups.config.model import MultiscaleConfig
from ups.errors import DataError
from ups.models.build import build_model
from ups.models.constraints import LEAST_CELLS, refined
from ups.solvers.darcy import MIN_CELLS, solve
from ups.solvers.tasks import darcy2d
from ups.spec.batch import Batch
from ups.spec.task import TaskSpec

CELLS = 32
SPEC = darcy2d.spec


@pytest.fixture(scope="module")
def solved() -> tuple[Batch, torch.Tensor]:
    """Two media of two phases, and their solutions as the solver stores them."""
    pytest.importorskip("scipy")
    draw = np.random.default_rng(0)
    waves = draw.normal(size=(2, 4, 4))
    x = np.cos(np.pi * np.arange(4)[:, None] * (np.arange(CELLS) + 0.5) / CELLS)
    media = np.where(np.einsum("nij,ix,jy->nxy", waves, x, x) > 0, 12.0, 3.0)
    factor = MIN_CELLS // CELLS
    fine = [m.repeat(factor, 0).repeat(factor, 1) for m in media]
    beta = np.array([0.7, 1.9])
    full = np.stack([b * solve(m, np.ones_like(m)) for b, m in zip(beta, fine, strict=True)])
    target = torch.from_numpy(full.reshape(2, CELLS, factor, CELLS, factor).mean((2, 4)))[:, None]
    given = torch.from_numpy(media)[:, None]
    places = (torch.arange(CELLS, dtype=torch.float64) + 0.5) / CELLS
    batch = Batch(
        SPEC, given[:, None, :0], given, target, torch.from_numpy(beta)[:, None], torch.zeros(2).double(),
        (places, places), torch.arange(2),
    )  # fmt: skip
    return batch, target


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found - truth).detach().norm() / truth.norm())


def test_the_grid_is_that_of_the_reference_solver() -> None:
    assert LEAST_CELLS == MIN_CELLS
    assert SPEC.residual == "darcy"


def test_refinement_leads_to_the_stored_solution_from_anywhere(solved: tuple[Batch, torch.Tensor]) -> None:
    batch, truth = solved
    for start in (truth * 1.05, torch.zeros_like(truth)):
        errors = [error(refined(batch, start, steps), truth) for steps in (0, 3, 6, 12)]
        assert errors[3] < 1e-5
        assert errors == sorted(errors, reverse=True)
    # What is off by a few percent is off by less than half a percent after three steps, also in float32.
    single = batch.to(torch.device("cpu"), torch.float32)
    assert error(refined(single, (truth * 1.05).float(), 3), truth) < 5e-3


def test_a_model_refines_what_it_predicts_and_gradients_flow_through(solved: tuple[Batch, torch.Tensor]) -> None:
    batch, truth = solved

    def stepper_of(steps: int) -> torch.nn.Module:
        config = MultiscaleConfig(widths=[8, 8], blocks=[1, 1], num_heads=2, refine_steps=steps)
        return build_model(config, [SPEC], {SPEC.name: statistics_of(SPEC)}, 1).double()

    given = replace(batch, target=truth[:, :0])
    direct, near = stepper_of(0), stepper_of(12)
    assert error(near(given), truth) < 1e-3 < error(direct(given), truth)
    near(given).square().sum().backward()
    assert any(float(p.grad.abs().sum()) > 0 for p in near.parameters() if p.grad is not None)


def test_a_task_with_other_fields_is_refused(solved: tuple[Batch, torch.Tensor]) -> None:
    batch, truth = solved
    other: TaskSpec = replace(SPEC, parameters=())
    with pytest.raises(DataError, match="darcy"):
        refined(replace(batch, task=other), truth, 1)
    with pytest.raises(DataError, match="residual: Input should be"):
        replace(SPEC, residual="stokes")
