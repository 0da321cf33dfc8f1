"""The corrector of kind flow: what its network is built for, how it draws, and what a draw depends on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.small_model import LINE, PLANE, STEADY, batch_of, statistics_of
from tests.support.small_model import SMALL as SMALL_LATENT
from ups.config.model import LatentOperatorConfig, ModelConfig, MultiscaleConfig
from ups.models.build import build_model
from ups.models.ensemble import by_member, has_members, members_of
from ups.models.flow import FLOW, STUDENT, flow_of, flow_task, heun, noise_of, trained_flow
from ups.models.stepper import Stepper, rollout
from ups.models.transfer import transfer
from ups.spec.task import TaskSpec

TASKS = (LINE, PLANE, STEADY)
CONFIGS: dict[str, ModelConfig] = {
    "multiscale": MultiscaleConfig(widths=[8, 8], blocks=[1, 1], num_heads=2),
    "latent_operator": LatentOperatorConfig.model_validate(SMALL_LATENT),
}
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
each_type = pytest.mark.parametrize("kind", CONFIGS)


def stepper_of(
    kind: str = "multiscale", tasks: tuple[TaskSpec, ...] = TASKS, names: tuple[str, ...] = (FLOW,)
) -> Stepper:
    """Networks with small weights everywhere, as if they had been trained."""
    configs = dict.fromkeys(("operator", *names), CONFIGS[kind])
    stepper = build_model(configs, tasks, {t.name: statistics_of(t) for t in tasks}, 1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in stepper.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return stepper


def test_a_velocity_that_is_linear_in_time_is_followed_exactly_but_for_the_last_half_step() -> None:
    def velocity(x: list[Tensor], time: float) -> list[Tensor]:
        return [torch.full_like(x[0], 2 * time)]

    start = torch.zeros(2, 1, 4)
    for steps in (1, 2, 4, 8):
        (end,) = heun(velocity, [start], steps)
        assert end.flatten().tolist() == pytest.approx([1 - 1 / steps**2] * 8)


@each_task
@each_type
def test_a_model_with_a_corrector_has_members_that_differ_and_is_its_operator_without(
    task: TaskSpec, kind: str
) -> None:
    stepper = stepper_of(kind)
    assert has_members(stepper)
    assert trained_flow(stepper) == FLOW
    batch = batch_of(task, 1)
    frames = by_member(members_of(stepper, task, 3)(batch.repeated(3)), 3)
    assert frames.shape[:2] == (3, 3)
    assert float((frames[:, 0] - frames[:, 1]).detach().abs().max()) > 1e-3
    alone = build_model(CONFIGS[kind], TASKS, {t.name: statistics_of(t) for t in TASKS}, 1)
    alone.load_state_dict({n: t for n, t in stepper.state_dict().items() if ".flow." not in n})
    torch.testing.assert_close(stepper(batch), alone(batch))


def test_a_member_depends_on_seed_step_and_sample_and_not_on_how_many_there_are() -> None:
    stepper = stepper_of().double()
    batch = batch_of(LINE, 1, dtype=torch.float64)
    two, three = (list(rollout(members_of(stepper, LINE, m, 1), batch.repeated(m), 2)) for m in (2, 3))
    for few, many in zip(two, three, strict=True):
        torch.testing.assert_close(by_member(few, 2), by_member(many, 3)[:, :2])
    half = list(rollout(members_of(stepper, LINE, 2, 1), batch.cut(1, 3).repeated(2), 2))
    torch.testing.assert_close(by_member(two[1], 2)[1:], by_member(half[1], 2))
    draws = [
        noise_of(batch, 1, 0),
        noise_of(batch, 2, 0),
        noise_of(batch, 1, 1),
        noise_of(replace(batch, stage_step=8), 1, 0),
    ]
    assert all(bool((draws[0] != other).all()) for other in draws[1:])
    assert float(torch.stack(draws).std()) == pytest.approx(1.0, abs=0.1)


def test_what_a_draw_adds_keeps_what_the_task_conserves() -> None:
    task = replace(LINE, conserved=("u",))
    stepper = stepper_of(tasks=(task,)).double()
    batch = batch_of(task, 1, dtype=torch.float64)
    frame = members_of(stepper, task, 2)(batch.repeated(2))
    torch.testing.assert_close(frame.mean(2), batch.repeated(2).state[:, 0].mean(2))


def test_an_untrained_corrector_is_none_and_a_student_is_taken_before_its_teacher() -> None:
    new = build_model(
        dict.fromkeys(("operator", FLOW), CONFIGS["multiscale"]), [LINE], {"line": statistics_of(LINE)}, 1
    )
    assert trained_flow(new) == ""
    assert not has_members(new)
    assert trained_flow(stepper_of(names=(FLOW, STUDENT))) == STUDENT


def test_the_network_sees_two_more_fields_for_each_predicted_one_and_the_time() -> None:
    assert flow_task(PLANE).channel_names("static") == (
        *("floor", "predicted.height", "predicted.velocity_x", "predicted.velocity_y"),
        *("noisy.height", "noisy.velocity_x", "noisy.velocity_y"),
    )
    assert [p.name for p in flow_task(LINE).parameters] == ["nu", "flow_time"]
    long = replace(LINE, fields=(replace(LINE.fields[0], name="u" * 64),))
    assert len(flow_task(long).channel_names("static")) == 2


@each_type
def test_a_corrector_goes_over_to_a_model_with_more_tasks(kind: str) -> None:
    source, target = stepper_of(kind, tasks=(LINE,)), stepper_of(kind, tasks=(LINE, STEADY))
    with torch.no_grad():
        flow_of(source, FLOW).scale.fill_(0.25)
    with torch.no_grad():
        flow_of(target, FLOW).scale.fill_(1.0)
    taken = transfer(source, target)
    if kind == "latent_operator":
        # Tables for lines do not serve planes: those of the target are new, and a new corrector is no trained one.
        assert "flow/inner.encoder.table" in taken.new
        assert trained_flow(target, LINE) == ""
    else:
        assert taken.rows["flow/scale"] == (("line/u",), ("steady/u",))
        assert float(flow_of(target, FLOW).size(LINE, torch.zeros(1))) == 0.25
    bare = build_model(CONFIGS[kind], [LINE], {"line": statistics_of(LINE)}, 1)
    assert any(name.startswith("flow/inner.") for name in transfer(bare, stepper_of(kind, tasks=(LINE,))).new)
