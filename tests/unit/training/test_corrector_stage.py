"""The operator as an ensemble: members start as one, and learn to be as far from each other as from the truth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.small_model import LINE, PLANE, STEADY, awake, batch_of, loss_of, small_model, statistics_of
from ups.config.model import MultiscaleConfig
from ups.config.stage import CorrectorStageConfig, OperatorStageConfig
from ups.errors import ConfigError
from ups.models.build import build_model
from ups.models.ensemble import Ensemble, FlowMembers, by_member, has_members, members_of
from ups.models.flow import FLOW, flow_of
from ups.models.stepper import Stepper, rollout
from ups.models.transfer import transfer
from ups.spec.task import TaskSpec
from ups.training.corrector_stage import EnsembleStage
from ups.training.losses import almost_fair_crps
from ups.training.stages import build_stage

SMALL = {"widths": [8, 8], "blocks": [1, 1], "num_heads": 2, "noise_size": 4}
each_task = pytest.mark.parametrize("task", [LINE, PLANE, STEADY], ids=lambda task: task.name)


def stepper_of(context_frames: int = 1, **changes: object) -> Stepper:
    tasks = [LINE, PLANE, STEADY]
    config = MultiscaleConfig.model_validate({**SMALL, **changes})
    return build_model(config, tasks, {t.name: statistics_of(t) for t in tasks}, context_frames)


def ensemble_stage(stepper: Stepper, **changes: object) -> EnsembleStage:
    config = CorrectorStageConfig.model_validate({"kind": "ensemble", "steps": 1, "balance": 0.0, **changes})
    stage = build_stage(config, stepper, seed=5)
    assert isinstance(stage, EnsembleStage)
    stage.begin()
    return stage


def test_the_score_of_two_members_is_that_of_the_formula() -> None:
    errors = torch.tensor([[[[1.0, -2.0]], [[3.0, 2.0]]]])  # (B, M, C, X)
    fields = torch.full((1, 2, 1, 2), 4.0)
    # |1| |3| apart 2 and |-2| |2| apart 4: the mean of (4 - 2 k) / 2 and (4 - 4 k) / 2, relative to 4
    for fairness, kept in ((1.0, 1.0), (0.0, 0.5), (0.95, 0.975)):
        expected = ((4 - 2 * kept) / 2 + (4 - 4 * kept) / 2) / 2 / 4
        found = almost_fair_crps(errors, fields, torch.zeros(1), fairness)
        assert found.item() == pytest.approx(expected, rel=1e-5)


def test_three_members_count_all_pairs_and_equal_members_score_their_absolute_error() -> None:
    values = torch.tensor([0.5, -1.0, 2.0])
    errors = values.reshape(1, 3, 1, 1).expand(1, 3, 1, 4)
    apart = 1.5 + 1.5 + 3.0
    expected = 3.5 / 3 - (1 - 0.05 / 3) * apart / 6
    found = almost_fair_crps(errors, torch.ones(1, 1, 1, 4), torch.zeros(1))
    assert found.item() == pytest.approx(expected, rel=1e-5)
    same = almost_fair_crps(torch.full((1, 3, 1, 4), -0.25), torch.ones(1, 1, 1, 4), torch.zeros(1))
    assert same.item() == pytest.approx(0.25)


@each_task
def test_at_the_start_every_member_is_the_operator(task: TaskSpec) -> None:
    with_noise, without = stepper_of(), stepper_of(noise_size=0)
    assert not has_members(with_noise)
    batch = batch_of(task, 1)
    frames = by_member(Ensemble(with_noise, 3)(batch.repeated(3)), 3)
    alone = without(batch)
    for member in range(3):
        torch.testing.assert_close(frames[:, member], alone, rtol=1e-5, atol=1e-5)


def test_a_task_with_a_network_of_its_own_has_no_members_of_the_operators_noise() -> None:
    tasks, config = [LINE, STEADY], MultiscaleConfig.model_validate(SMALL)
    stepper = build_model(
        {"operator": config, "steady": config}, tasks, {t.name: statistics_of(t) for t in tasks}, context_frames=1
    )
    awake(stepper)
    assert has_members(stepper)
    assert [has_members(stepper, task) for task in tasks] == [True, False]


def test_a_task_that_the_stage_left_out_has_no_members() -> None:
    stepper = stepper_of()
    stage = ensemble_stage(stepper, tasks=[LINE.name], members=2, unroll_steps=1)
    optimizer = torch.optim.Adam(stage.parameters(), lr=1e-2)
    for _ in range(4):  # zeros of a new network keep gradients from noise at first
        loss_of(stage, batch_of(LINE, 2)).backward()
        optimizer.step()
    assert has_members(stepper)
    assert [has_members(stepper, task) for task in (LINE, PLANE, STEADY)] == [True, False, False]
    frames = by_member(Ensemble(stepper, 2)(batch_of(PLANE, 1).repeated(2)), 2)
    assert torch.equal(frames[:, 0], frames[:, 1])


def test_a_stage_that_goes_on_leaves_the_size_of_noise_as_it_is() -> None:
    stepper = awake(stepper_of())
    table, names = stepper.network.noise_sizes() or pytest.fail("no noise")
    with torch.no_grad():
        table[names.index(PLANE.name)] = 0.0
    before = table.detach().clone()
    ensemble_stage(stepper)
    assert table[names.index(PLANE.name)] == 1
    others = [row for row, name in enumerate(names) if name != PLANE.name]
    assert torch.equal(table[others], before[others])


def test_members_are_forgotten_when_the_operator_is_trained_on() -> None:
    stepper = awake(stepper_of())
    assert has_members(stepper, LINE)
    build_stage(OperatorStageConfig(steps=1, tasks=[LINE.name]), stepper, seed=5).begin()
    assert not has_members(stepper)


def test_each_task_has_the_members_of_its_own_corrector() -> None:
    tasks = [LINE, PLANE]
    config = MultiscaleConfig.model_validate(SMALL)
    stepper = build_model({"operator": config, FLOW: config}, tasks, {t.name: statistics_of(t) for t in tasks}, 1)
    ensemble_stage(stepper, tasks=[LINE.name])
    flow = flow_of(stepper, FLOW)
    with torch.no_grad():
        flow.scale[[number for number, (task, _) in enumerate(flow.row_names) if task == PLANE.name]] = 0.5
    assert [has_members(stepper, task) for task in tasks] == [True, True]
    assert [type(members_of(stepper, task, 2)) for task in tasks] == [Ensemble, FlowMembers]


def test_sizes_of_noise_do_not_go_over_without_what_it_is_multiplied_by() -> None:
    source, same, other = awake(stepper_of()), stepper_of(), stepper_of(noise_size=8)
    transfer(source, same)
    transfer(source, other)
    assert has_members(same)
    assert not has_members(other)


def test_members_depend_on_seed_step_sample_and_member_and_on_nothing_else() -> None:
    stepper = awake(stepper_of()).double()
    assert has_members(stepper)
    batch = batch_of(LINE, 1, dtype=torch.float64)
    two, three = (list(rollout(Ensemble(stepper, m, seed=1), batch.repeated(m), 2)) for m in (2, 3))
    for few, many in zip(two, three, strict=True):
        torch.testing.assert_close(by_member(few, 2), by_member(many, 3)[:, :2])
    frames = by_member(three[0], 3)
    assert (frames[:, 0] - frames[:, 1]).abs().max() > 1e-3
    other = by_member(Ensemble(stepper, 3, seed=2)(batch.repeated(3)), 3)
    assert (frames - other).abs().max() > 1e-3
    noise = [
        Ensemble(stepper, 2, seed=1).with_noise(replace(batch.repeated(2), stage_step=at), step).noise
        for at, step in ((0, 0), (1, 0), (0, 1))
    ]
    assert len({tuple(n.flatten().tolist()) for n in noise if n is not None}) == 3
    alone = by_member(Ensemble(stepper, 3, seed=1)(batch.cut(1, 2).repeated(3)), 3)
    torch.testing.assert_close(alone, frames[1:2])


@each_task
@pytest.mark.parametrize("members", [2, 4])
def test_the_loss_is_a_mean_over_samples_however_the_batch_is_cut(task: TaskSpec, members: int) -> None:
    stage = ensemble_stage(awake(stepper_of(context_frames=2)).double(), members=members, unroll_steps=2)
    batch = batch_of(task, 4, samples=4, dtype=torch.float64)
    whole = loss_of(stage, batch)
    cut = (loss_of(stage, batch.cut(0, 1)) + 3 * loss_of(stage, batch.cut(1, 4))) / 4
    torch.testing.assert_close(whole, cut, rtol=1e-12, atol=0)


@each_task
def test_every_parameter_is_in_the_graph_of_every_task(task: TaskSpec) -> None:
    stage = ensemble_stage(stepper_of())
    loss_of(stage, batch_of(task, 3)).backward()
    assert all(p.grad is not None for p in stage.parameters())


def test_members_learn_to_be_as_far_from_each_other_as_from_the_truth() -> None:
    """The next frame is the frame plus one of two constants, which nothing in the frame tells."""
    stage = ensemble_stage(stepper_of(), members=4, unroll_steps=1, augment=False)
    batch = batch_of(LINE, 2, samples=32)
    state = batch.state.clone()
    sign = torch.where(torch.arange(32) % 2 == 0, 1.0, -1.0).reshape(-1, 1, 1)
    state[:, 0] = state[:, 0] * 0.1 + 3.0
    state[:, 1] = state[:, 0] + 0.5 * sign
    batch = replace(batch, state=state)
    optimizer = torch.optim.Adam(stage.parameters(), lr=3e-3)
    ratios = []
    for step in range(150):  # many more, and the network knows the 32 frames by heart
        losses = stage.sample_losses([replace(batch, stage_step=step)])[0]
        optimizer.zero_grad()
        losses["loss"].mean().backward()
        optimizer.step()
        ratios.append(float(losses["spread"].mean() / losses["error"].mean()))
    assert 0.7 < sum(ratios[-25:]) / 25 < 1.4
    assert has_members(stage.stepper)


def test_a_network_without_noise_has_no_members() -> None:
    with pytest.raises(ConfigError, match="takes no noise"):
        Ensemble(small_model(), 2)
