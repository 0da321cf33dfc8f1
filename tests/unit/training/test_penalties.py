"""Penalties of the operator stage: integrals that move, and fields that do not come back from the latent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.small_model import LINE, PLANE, STEADY, awake, batch_of, loss_of, small_model
from ups.config.stage import AutoencodeStageConfig, OperatorStageConfig
from ups.models.normalization import Constants
from ups.training.stages import OperatorStage, build_stage, conservation_errors

HEIGHT = replace(PLANE, conserved=("height",))
MASS = replace(LINE, conserved=("u",))


def stage_of(stepper: torch.nn.Module, **settings: object) -> OperatorStage:
    config = OperatorStageConfig.model_validate({"steps": 1, "augment": False, "noise": 0.0, **settings})
    stage = build_stage(config, stepper, 1)  # type: ignore[arg-type]
    assert isinstance(stage, OperatorStage)
    return stage


def test_the_penalty_counts_the_conserved_fields_of_each_task_alone() -> None:
    change = torch.zeros(3, 3, 16, 8)
    change[:, 1:] = 5.0  # velocities, which are not conserved
    change[1, 0] = 0.25
    change[2, 0, 0, 0] = 16 * 8 * 0.5
    batch = batch_of(HEIGHT, 2)
    assert conservation_errors(batch, change, Constants()).tolist() == pytest.approx([0.0, 0.25, 0.5], abs=1e-6)
    nothing = conservation_errors(batch_of(STEADY, 0), torch.ones(3, 1, 16, 16, requires_grad=True), Constants())
    assert nothing.tolist() == [0.0] * 3
    assert nothing.requires_grad  # every parameter stays in every graph


def test_on_an_uneven_grid_points_count_by_their_cells() -> None:
    batch = batch_of(MASS, 2, space=(4,))
    places = torch.tensor([0.0, 0.1, 0.2, 0.6], dtype=torch.float64)
    batch = replace(batch, coordinates=(places,))
    change = torch.zeros(3, 1, 4)
    change[:, 0, 3] = 1.0  # its cell reaches from 0.4 to 0.8 of 1
    assert conservation_errors(batch, change, Constants()).tolist() == pytest.approx([0.4] * 3, rel=1e-5)


def test_tasks_with_other_channels_share_a_step_and_the_penalty_can_be_learned_away() -> None:
    tasks = (MASS, HEIGHT, STEADY)
    stepper = awake(small_model(tasks=tasks, conserve=False))
    stage = stage_of(stepper, conservation_weight=1.0, loss="mse")
    batches = [replace(batch_of(task, 2), sample_weight=1 / 9) for task in tasks]
    found = stage.sample_losses(batches)
    assert [float(each["conservation"].detach().max()) > 0 for each in found] == [True, True, False]
    plain = stage_of(stepper, loss="mse").sample_losses(batches)
    for with_penalty, without in zip(found, plain, strict=True):
        torch.testing.assert_close(with_penalty["loss"], without["loss"] + with_penalty["conservation"])
    optimizer = torch.optim.SGD(list(stage.trainable_parameters()), 1e-3)
    drift = [float(sum(each["conservation"].sum() for each in stage.sample_losses(batches)).detach())]
    for _ in range(10):
        optimizer.zero_grad()
        sum(each["conservation"].sum() for each in stage.sample_losses(batches)).backward()
        optimizer.step()
    drift.append(float(sum(each["conservation"].sum() for each in stage.sample_losses(batches)).detach()))
    assert drift[1] < drift[0]


@pytest.mark.parametrize("task", [LINE, PLANE, STEADY], ids=lambda task: task.name)
def test_inverse_losses_are_those_of_the_stage_autoencode(task: object) -> None:
    stepper = awake(small_model(tasks=(LINE, PLANE, STEADY)))
    batch = batch_of(task, 2)  # type: ignore[arg-type]
    (found,) = stage_of(stepper, inverse_weight=0.5).sample_losses([batch])
    (plain,) = stage_of(stepper).sample_losses([batch])
    autoencode = build_stage(AutoencodeStageConfig(steps=1, augment=False), stepper, 1)
    (expected,) = autoencode.sample_losses([batch])
    for name in ("reconstruction", "inverse"):
        torch.testing.assert_close(found[name], expected[name])
    torch.testing.assert_close(found["loss"], plain["loss"] + 0.5 * (expected["reconstruction"] + expected["inverse"]))
    stage = stage_of(stepper, inverse_weight=0.5)
    loss_of(stage, batch).backward()
    assert all(p.grad is not None for p in stage.trainable_parameters())


def test_penalties_on_fields_are_refused_where_there_are_only_latents() -> None:
    for name in ("inverse_weight", "conservation_weight"):
        with pytest.raises(ValueError, match="space is 'latent'"):
            OperatorStageConfig.model_validate({"steps": 1, "space": "latent", name: 1.0})
    assert OperatorStageConfig(steps=1, inverse_weight=1.0).needs_latents
