"""Holes of a domain: what is in them changes nothing, stays 0, and is not counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.small_bundle import statistics_of
from ups.config.model import MultiscaleConfig
from ups.config.stage import OperatorStageConfig
from ups.errors import DataError
from ups.evaluation import metrics
from ups.evaluation.accumulate import Accumulator
from ups.models.build import build_model
from ups.models.stepper import Stepper
from ups.spec.batch import Batch
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec
from ups.training.stages import OperatorStage

AXES = (AxisSpec("x", "wall"), AxisSpec("y", "wall"))
HEAT = TaskSpec("heat", (FieldSpec("u"), FieldSpec("land", "static")), AXES, dt=0.1, conserved=("u",), mask="land")
STEADY = TaskSpec("flow", (FieldSpec("land", "static"), FieldSpec("p", "target")), AXES, steady=True, mask="land")


def stepper_of(task: TaskSpec) -> Stepper:
    config = MultiscaleConfig(widths=[8, 8], blocks=[1, 1], num_heads=2)
    stepper = build_model({"operator": config}, (task,), {task.name: statistics_of(task)}, 1, seed=0)
    for parameter in stepper.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    return stepper.double()


def batch_of(task: TaskSpec, in_holes: float = 0.0, frames: int = 1) -> Batch:
    """Two samples with different holes."""
    random = torch.Generator().manual_seed(0)
    land = torch.zeros(2, 1, 8, 8, dtype=torch.float64)
    land[0, :, 2:4, 3:6] = land[1, :, :2] = 1
    state = torch.randn(2, frames, 1, 8, 8, dtype=torch.float64, generator=random) + 3
    coordinates = [np.arange(8) / 8] * 2
    roles: dict[str, Any] = {"target": state[:, 0].where(land == 0, in_holes)} if task.steady else {}
    if not task.steady:
        roles["state"] = state.where(land[:, None] == 0, in_holes)
    return Batch.of(task, static=land, coordinates=coordinates, dt=0.1, **roles)


@pytest.mark.parametrize("task", [HEAT, STEADY])
def test_holes_stay_zero_and_the_rest_is_conserved(task: TaskSpec) -> None:
    batch = batch_of(task)
    frame = stepper_of(task)(batch)
    holes = batch.static > 0
    assert (frame[holes].abs() < 1e-12).all()
    assert (frame[~holes].abs() > 1e-6).any()
    if not task.steady:
        torch.testing.assert_close(frame.sum((1, 2, 3)), batch.state.sum((1, 2, 3, 4)))


def test_what_is_in_holes_changes_nothing_outside() -> None:
    stepper, holes = stepper_of(HEAT), batch_of(HEAT).static > 0
    one, other = stepper(batch_of(HEAT)), stepper(batch_of(HEAT, 50.0))
    torch.testing.assert_close(one[~holes], other[~holes])


@pytest.mark.parametrize("loss", ["relative_l2", "nrmse", "mse"])
@pytest.mark.parametrize("task", [HEAT, STEADY])
def test_a_loss_counts_no_holes(task: TaskSpec, loss: str) -> None:
    settings = OperatorStageConfig(steps=1, loss=loss, noise=0.0, relative_floor=1e-6)
    stage = OperatorStage(settings, stepper_of(task), 0)
    batch = batch_of(task, frames=2)
    (losses,) = stage.sample_losses([batch])
    (again,) = stage.sample_losses([batch_of(task, 9.0, frames=2)])
    torch.testing.assert_close(losses["loss"], again["loss"])
    assert losses["loss"].isfinite().all()


def test_scores_count_no_holes() -> None:
    random, valid = torch.Generator().manual_seed(0), batch_of(HEAT).valid
    assert valid is not None
    prediction, truth = (torch.randn(2, 3, 1, 8, 8, generator=random).double() * valid[:, None] for _ in range(2))
    scores = Accumulator(3, ("u",))
    scores.add([0, 1], prediction + 7 * (1 - valid[:, None]), truth, valid=valid)
    for number in (0, 1):
        there = valid[number, 0] > 0
        p, y = (x[number : number + 1, :, :, there] for x in (prediction, truth))
        for name in ("rmse", "nrmse"):
            assert scores.rows[number][name][0] == pytest.approx(float(getattr(metrics, name)(p, y).mean()))
        trmse = float(metrics.trmse(p, y, metrics.trajectory_rms(y)).mean())
        assert scores.rows[number]["trmse"][0] == pytest.approx(trmse)
        whole = metrics.correlation(prediction, truth, metrics.without_holes(None, valid[:, None]))
        torch.testing.assert_close(whole[number : number + 1], metrics.correlation(p, y))


def test_a_mask_is_a_static_scalar_field() -> None:
    for wrong in ("u", "sea", "land "):
        with pytest.raises(DataError, match="needs a static scalar field"):
            replace(HEAT, mask=wrong)
    assert TaskSpec.from_json(HEAT.to_json()) == HEAT
    assert "mask" not in replace(HEAT, mask="").to_json()
