"""The stages of kind flow: residuals that are measured, draws that learn a law with two sides, and their student."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.small_model import LINE, PLANE, STEADY, batch_of, loss_of, statistics_of
from ups.config.model import MultiscaleConfig
from ups.config.stage import CorrectorStageConfig, DistillStageConfig, OperatorStageConfig, SteadyStageConfig
from ups.errors import ConfigError
from ups.models.build import build_model
from ups.models.ensemble import FlowMembers, members_of
from ups.models.flow import FLOW, STUDENT, PredictedStep, endpoints, flow_of, noise_of, trained_flow
from ups.models.stepper import Stepper
from ups.spec.batch import Batch
from ups.spec.task import TaskSpec
from ups.training.corrector_stage import FlowStage
from ups.training.distill_stage import DistillStage
from ups.training.stages import Stage, build_stage

TASKS = (LINE, PLANE, STEADY)
CONFIG = MultiscaleConfig(widths=[8, 8], blocks=[1, 1], num_heads=2)
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def stepper_of(tasks: tuple[TaskSpec, ...] = TASKS) -> Stepper:
    configs = dict.fromkeys(("operator", FLOW, STUDENT), CONFIG)
    return build_model(configs, tasks, {t.name: statistics_of(t) for t in tasks}, 1)


def stage_of(stepper: Stepper, kind: str, **changes: object) -> Stage:
    settings = {"steps": 1, "augment": False, **changes}
    if kind == "distill":
        return build_stage(DistillStageConfig.model_validate(settings), stepper, seed=5)
    return build_stage(CorrectorStageConfig.model_validate({"kind": "flow", **settings}), stepper, seed=5)


@each_task
@pytest.mark.parametrize("kind", ["flow", "distill"])
def test_the_operator_is_frozen_and_every_trained_parameter_has_a_gradient(task: TaskSpec, kind: str) -> None:
    stepper = stepper_of()
    stage = stage_of(stepper, kind)
    assert isinstance(stage, FlowStage if kind == "flow" else DistillStage)
    loss_of(stage, batch_of(task, 3)).backward()
    trained = FLOW if kind == "flow" else STUDENT
    for name, parameter in stepper.named_parameters():
        inside = name.startswith(f"networks.{trained}.inner.")
        assert parameter.requires_grad == inside, name
        assert (parameter.grad is not None) == inside, name


@each_task
def test_no_sample_sees_another_and_draws_are_those_of_its_number(task: TaskSpec) -> None:
    stepper = stepper_of().double()
    stage = stage_of(stepper, "flow")
    batch = batch_of(task, 3, dtype=torch.float64)
    (whole,) = stage.sample_losses([batch])
    for at in range(3):
        (one,) = stage.sample_losses([batch.cut(at, at + 1)])
        torch.testing.assert_close(one["loss"][0], whole["loss"][at])
    (later,) = stage.sample_losses([replace(batch, stage_step=8)])
    assert bool((later["loss"] != whole["loss"]).all())


def test_residuals_are_measured_channel_by_channel_before_the_first_step() -> None:
    stepper = stepper_of()
    stage = stage_of(stepper, "flow", unroll_steps=1, tasks=["plane"])
    assert isinstance(stage, FlowStage)
    stage.measure(True)
    batch = batch_of(PLANE, 2, samples=4)
    with torch.no_grad():
        stage([batch])
    stage.begin()
    # A new operator predicts no change: the whole change is left over.
    change = stepper.scaled_change(batch.state[:, 0], batch.state[:, 1], PLANE)
    expected = change.square().mean((0, 2, 3)).sqrt()
    torch.testing.assert_close(flow_of(stepper, FLOW).size(PLANE, change).flatten(), expected)
    assert float(flow_of(stepper, FLOW).size(STEADY, change)) == 1.0  # is not trained
    again = flow_of(stepper, FLOW).scale.clone()
    stage.begin()
    torch.testing.assert_close(flow_of(stepper, FLOW).scale.data, again)


def measured(stepper: Stepper, task: TaskSpec) -> FlowStage:
    """A stage on one task that has begun."""
    stage = stage_of(stepper, "flow", unroll_steps=1, tasks=[task.name])
    assert isinstance(stage, FlowStage)
    stage.measure(True)
    with torch.no_grad():
        stage([batch_of(task, 2, samples=4)])
    stage.begin()
    return stage


def test_a_later_corrector_leaves_the_tasks_of_an_earlier_one_as_they_are() -> None:
    stepper = stepper_of()
    measured(stepper, LINE)
    before = flow_of(stepper, FLOW).scale.clone()
    measured(stepper, PLANE)
    assert [trained_flow(stepper, task) for task in TASKS] == [FLOW, FLOW, ""]
    assert float(flow_of(stepper, FLOW).scale[0]) == float(before[0])


def test_a_task_that_no_step_had_is_refused_and_one_bad_sample_spoils_nothing() -> None:
    stepper = stepper_of()
    stage = stage_of(stepper, "flow", unroll_steps=1, tasks=["line", "plane"])
    assert isinstance(stage, FlowStage)
    stage.measure(True)
    batch = batch_of(LINE, 2, samples=4)
    state = batch.state.clone()
    state[0] = torch.nan
    with torch.no_grad():
        stage([batch.with_state(state)])
    assert not stage.measured_enough()
    with pytest.raises(ConfigError, match="no finite residual of task 'plane'"):
        stage.begin()
    stage.measure(True)
    with torch.no_grad():
        stage([batch.with_state(state)])
        stage([batch_of(PLANE, 2, samples=4)])
    assert stage.measured_enough()
    stage.begin()
    change = stepper.scaled_change(batch.state[1:, 0], batch.state[1:, 1], LINE)
    assert float(flow_of(stepper, FLOW).scale[0]) == pytest.approx(float(change.square().mean().sqrt()))


def test_a_corrector_is_forgotten_when_what_it_corrects_is_trained_on() -> None:
    configs = dict.fromkeys(("operator", FLOW, STUDENT, "steady"), CONFIG)
    stepper = build_model(configs, TASKS, {t.name: statistics_of(t) for t in TASKS}, 1)
    for task in TASKS:
        measured(stepper, task)
    stage_of(stepper, "distill").begin()
    assert [trained_flow(stepper, task) for task in TASKS] == [STUDENT] * 3
    build_stage(SteadyStageConfig(steps=1), stepper, seed=5).begin()
    assert [trained_flow(stepper, task) for task in TASKS] == [STUDENT, STUDENT, ""]
    # Also of tasks that the stage leaves out: one network predicts them all.
    build_stage(OperatorStageConfig(steps=1, tasks=["line"]), stepper, seed=5).begin()
    assert [trained_flow(stepper, task) for task in TASKS] == ["", "", ""]


def test_a_student_draws_for_the_tasks_that_it_learned_alone_and_an_old_one_for_none() -> None:
    stepper = stepper_of()
    measured(stepper, LINE)
    measured(stepper, PLANE)
    with pytest.raises(ConfigError, match="there is none of task 'steady'") as refused:
        stage_of(stepper, "distill").check_start()
    assert "tasks: [line, plane]" in str(refused.value.hint)
    stage_of(stepper, "distill", tasks=["line"]).begin()
    assert [trained_flow(stepper, task) for task in TASKS] == [STUDENT, FLOW, ""]
    plane = batch_of(PLANE, 1)
    with torch.no_grad():
        found = members_of(stepper, PLANE, 2)(plane.repeated(2))
        torch.testing.assert_close(found, FlowMembers(stepper, 2, 0, FLOW)(plane.repeated(2)))
    measured(stepper, LINE)  # a new teacher
    assert [trained_flow(stepper, task) for task in TASKS] == [FLOW, FLOW, ""]


def test_a_student_without_a_teacher_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is none of task 'line'") as refused:
        stage_of(stepper_of(), "distill", tasks=["line"]).check_start()
    assert "put a stage of type corrector" in str(refused.value.hint)


def coin(step: int, samples: int = 24) -> Batch:
    """A field that jumps up or down by one usual change everywhere, by chance."""
    batch = batch_of(LINE, 2, samples=samples, seed=step, space=(8,))
    batch = replace(batch, numbers=torch.arange(samples) + 1000 * step, stage_step=step)
    side = torch.rand(samples, generator=torch.Generator().manual_seed(step)).sub(0.5).sign()
    state = batch.state.clone()
    state[:, 1] = state[:, 0] + 0.25 * side[:, None, None]
    return batch.with_state(state)


def ends(stepper: Stepper, name: str, num_steps: int) -> Tensor:
    """(B,) mean over space of draws of a batch that was not trained on."""
    batch = coin(10_000, samples=64)
    given = batch.with_state(batch.state[:, :1])
    with torch.no_grad():
        step = PredictedStep(given, stepper.predict(given))
        (found,) = endpoints(stepper, flow_of(stepper, name), [step], [noise_of(batch, 9, 0)], num_steps)
    return found.mean((1, 2))


@pytest.mark.timeout(600)
def test_draws_learn_a_law_with_two_sides_and_a_student_needs_one_evaluation() -> None:
    stepper = stepper_of((LINE,))
    flow = stage_of(stepper, "flow", unroll_steps=1)
    assert isinstance(flow, FlowStage)
    flow.measure(True)
    with torch.no_grad():
        flow([coin(-1)])
    flow.begin()
    first, last = train(flow, 200)
    assert last < 0.8 * first
    drawn = ends(stepper, FLOW, 4)
    # Neither between the sides, as a mean would be, nor on one of them.
    assert float((drawn.abs() - 1).abs().mean()) < 0.35
    assert 0.2 < float((drawn > 0).double().mean()) < 0.8
    student = stage_of(stepper, "distill", unroll_steps=1)
    student.begin()
    torch.testing.assert_close(ends(stepper, STUDENT, 1), ends(stepper, FLOW, 1))  # it starts as its teacher
    before = float((ends(stepper, STUDENT, 1) - drawn).abs().mean())
    train(student, 100)
    assert float((ends(stepper, STUDENT, 1) - drawn).abs().mean()) < 0.7 * before


def train(stage: Stage, steps: int) -> tuple[float, float]:
    """Mean losses of the first and of the last twenty steps."""
    optimizer = torch.optim.AdamW(list(stage.trainable_parameters()), 5e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(stage, coin(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[:20]) / 20, sum(losses[-20:]) / 20
