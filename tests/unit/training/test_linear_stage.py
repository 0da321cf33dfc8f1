"""The linear part is fitted alone, kept where a linear law holds, and zero again where it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.small_model import LINE, STEADY, batch_of, loss_of, small_model, statistics_of
from ups.config.model import MultiscaleConfig
from ups.config.stage import LinearStageConfig
from ups.errors import ConfigError
from ups.models.build import build_model
from ups.models.stepper import Stepper
from ups.spec.batch import Batch
from ups.training.linear_stage import LinearStage
from ups.training.stages import build_stage

SMALL = {"widths": [8, 8], "blocks": [1, 1], "num_heads": 2}
OTHER = replace(LINE, name="other")


def stepper_of(**changes: object) -> Stepper:
    tasks = [LINE, OTHER, STEADY]
    config = MultiscaleConfig.model_validate({**SMALL, **changes})
    return build_model(config, tasks, {t.name: statistics_of(t) for t in tasks}, context_frames=1)


def linear(stepper: Stepper, **changes: object) -> LinearStage:
    config = LinearStageConfig.model_validate({"steps": 1, "noise": 0.0, "augment": False, **changes})
    stage = build_stage(config, stepper, seed=5)
    assert isinstance(stage, LinearStage)
    return stage


def moved(batch: Batch) -> Batch:
    """The second frame is the first, moved by one point."""
    state = batch.state.clone()
    state[:, 1] = state[:, 0].roll(1, -1)
    return replace(batch, state=state)


def test_only_the_linear_part_is_trained_and_every_task_reaches_it() -> None:
    stage = linear(stepper_of())
    trained = [name for name, p in stage.named_parameters() if p.requires_grad]
    assert trained == ["stepper.networks.operator.propagator.table"]
    for task in (LINE, STEADY):
        stage.zero_grad(set_to_none=True)
        loss_of(stage, batch_of(task, 2)).backward()
        assert all(p.grad is not None for p in stage.trainable_parameters())


def test_what_is_linear_is_found_and_stays_and_what_is_not_goes_back_to_zero() -> None:
    stage = linear(stepper_of())
    smooth = moved(batch_of(LINE, 2, samples=16))
    waves = torch.fft.rfft(smooth.state[:, 0])
    waves[..., 5:] = 0
    state = torch.stack([torch.fft.irfft(waves, n=smooth.state.shape[-1])] * 2, dim=1)
    state[:, 1] = state[:, 0].roll(1, -1)
    smooth = replace(smooth, state=state)
    noise = replace(batch_of(LINE, 2, samples=16), task=OTHER)  # the second frame has nothing to do with the first
    optimizer = torch.optim.Adam(stage.trainable_parameters(), lr=2e-2)
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 200)
        optimizer.zero_grad()
        losses = stage([smooth, noise])
        losses.total.backward()
        optimizer.step()
    before = stage.stepper.linear.linear_rows()[0][0].detach().clone()
    averages = stage.averages
    assert averages is not None
    start = dict(zip(averages.tasks, averages.start.tolist(), strict=True))
    averages.values = torch.tensor([{"line": 0.1, "other": 0.9, "steady": 0.0}[t] * start[t] for t in averages.tasks])
    stage.finish()
    table, owners = stage.stepper.linear.linear_rows()[0]
    mine = torch.tensor([owner == "line" for owner in owners])
    assert torch.equal(table[mine], before[mine])
    assert before[~mine].abs().sum() > 0
    assert table[~mine].abs().sum() == 0
    assert loss_of(stage, smooth) < 0.3 * loss_of(linear(stepper_of()), smooth)


def test_what_was_fitted_before_for_tasks_that_this_stage_does_not_see_stays() -> None:
    stage = linear(stepper_of(), tasks=["other"])
    table, owners = stage.stepper.linear.linear_rows()[0]
    with torch.no_grad():
        table.fill_(0.5)
    averages = stage.averages
    assert averages is not None
    sums = torch.zeros(len(averages.tasks), 2, dtype=torch.float64)
    sums[averages.tasks.index("other")] = torch.tensor([40.0, 4.0])
    averages.update(sums)
    stage.finish()
    for row, owner in zip(table, owners, strict=True):
        assert row.abs().sum() > 0 if owner == "line" else row.abs().sum() == 0


def test_a_model_without_a_linear_part_is_refused() -> None:
    with pytest.raises(ConfigError, match="no linear part"):
        linear(small_model())
    with pytest.raises(ConfigError, match="no linear part"):
        linear(stepper_of(propagator=False))
