"""Stages: what a batch costs, what it trains, and that nothing depends on how a batch is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.small_model import (
    DEEP,
    LINE,
    PLANE,
    STEADY,
    TASKS,
    awake,
    batch_of,
    loss_of,
    small_model,
    statistics_of,
)
from ups.config.stage import AutoencodeStageConfig, OperatorStageConfig
from ups.errors import DataError
from ups.models.build import build_model
from ups.models.stepper import Stepper
from ups.spec.task import TaskSpec
from ups.training.stages import Stage, build_stage

each_encoder = pytest.mark.parametrize("encoder", [{}, DEEP], ids=["linear", "deep"])
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda t: t.name)


def operator(stepper: Stepper, **changes: object) -> Stage:
    return build_stage(OperatorStageConfig.model_validate({"steps": 1, "noise": 0.0, **changes}), stepper, seed=5)


def autoencode(stepper: Stepper, **changes: object) -> Stage:
    return build_stage(AutoencodeStageConfig.model_validate({"steps": 1, **changes}), stepper, seed=5)


def mean_of(pair: torch.Tensor) -> torch.Tensor:
    return pair[0] / pair[1]


@each_task
@each_encoder
def test_every_trained_parameter_has_a_gradient_after_any_task(task: TaskSpec, encoder: dict[str, int]) -> None:
    stage = operator(small_model(context_frames=2, **encoder), unroll_steps=2, pushforward_steps=1)
    loss_of(stage, batch_of(task, 4)).backward()
    assert [n for n, p in stage.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


@each_task
def test_the_loss_is_a_mean_over_samples_however_the_batch_is_cut(task: TaskSpec) -> None:
    stage = operator(awake(small_model()).double(), unroll_steps=2)
    batch = batch_of(task, 3, samples=4, dtype=torch.float64)
    whole = loss_of(stage, batch)
    cut = (loss_of(stage, batch.cut(0, 1)) + 3 * loss_of(stage, batch.cut(1, 4))) / 4
    torch.testing.assert_close(whole, cut, rtol=1e-12, atol=0)


@each_task
@each_encoder
@pytest.mark.parametrize("kind", ["autoencode", "latent"])
def test_stages_that_train_a_part_freeze_the_rest(task: TaskSpec, kind: str, encoder: dict[str, int]) -> None:
    stepper = small_model(context_frames=2, **encoder)
    stage = autoencode(stepper) if kind == "autoencode" else operator(stepper, space="latent", unroll_steps=2)
    loss_of(stage, batch_of(task, 4)).backward()
    inside = [id(p) for m in stage.trained_modules() for p in m.parameters()]
    for name, parameter in stage.named_parameters():
        trained = id(parameter) in inside
        assert parameter.requires_grad is trained, name
        assert (parameter.grad is not None) is trained, name
    assert sorted(map(id, stage.trainable_parameters())) == sorted(inside)
    later = operator(stepper)
    assert len(list(later.trainable_parameters())) == len(list(stepper.parameters())), "the next stage decides again"


@each_task
def test_losses_of_other_stages_are_means_over_samples_too(task: TaskSpec) -> None:
    stepper = awake(small_model(context_frames=2)).double()
    batch = batch_of(task, 4, samples=4, dtype=torch.float64)
    for stage in (autoencode(stepper), operator(stepper, space="latent", unroll_steps=2, pushforward_steps=1)):
        cut = (loss_of(stage, batch.cut(0, 1)) + 3 * loss_of(stage, batch.cut(1, 4))) / 4
        torch.testing.assert_close(loss_of(stage, batch), cut, rtol=1e-12, atol=0)


@pytest.mark.parametrize("context_frames", [1, 2])
def test_an_autoencoder_learns_to_give_fields_and_latents_back(context_frames: int) -> None:
    stage = autoencode(small_model(context_frames, width=64), inverse_weight=1.0)
    batches = [batch_of(task, context_frames, samples=8) for task in (LINE, STEADY)]
    optimizer = torch.optim.AdamW(stage.trainable_parameters(), lr=2e-2)
    before = [stage([b]).metrics for b in batches]
    for _ in range(40):
        optimizer.zero_grad()
        torch.stack([loss_of(stage, b) for b in batches]).sum().backward()
        optimizer.step()
    for old, batch in zip(before, batches, strict=True):
        new = stage([batch]).metrics
        for part in ("reconstruction", "inverse"):
            name = f"train/{batch.task.name}/{part}"
            assert new[name][0] < 0.3 * old[name][0], (name, old[name], new[name])


@each_encoder
def test_an_update_of_the_latent_decodes_to_the_change_of_the_fields(encoder: dict[str, int]) -> None:
    stepper = awake(small_model(**encoder)).double()
    batch = batch_of(PLANE, 1, dtype=torch.float64)
    latent = stepper.encode(*stepper.inputs(batch.state, batch.static, PLANE), PLANE)
    update = torch.randn(latent.shape, dtype=torch.float64)
    ratio = stepper.normalization.update_ratio(PLANE, latent)
    names = PLANE.channel_names("state")
    first, second = (
        stepper.normalization.restore("state", PLANE, stepper.decode(z, names, PLANE, batch.space), 1)
        for z in (latent, latent + ratio * update)
    )
    torch.testing.assert_close(
        stepper.scaled_change(first, second, PLANE), stepper.decode_update(update, PLANE, batch.space)
    )


@each_encoder
def test_one_step_in_latent_space_is_the_step_in_physical_space(encoder: dict[str, int]) -> None:
    stepper = awake(small_model(**encoder)).double()
    batch = batch_of(PLANE, 2, dtype=torch.float64)
    latent = mean_of(operator(stepper, space="latent")([batch]).metrics["train/plane/decoded"])
    torch.testing.assert_close(latent, loss_of(operator(stepper), batch), rtol=1e-10, atol=0)
    still = batch_of(STEADY, 0, dtype=torch.float64)
    latent = mean_of(operator(stepper, space="latent")([still]).metrics["train/steady/decoded"])
    torch.testing.assert_close(latent, loss_of(operator(stepper), still), rtol=1e-10, atol=0)


def test_an_untrained_model_has_the_error_of_persistence() -> None:
    batch = batch_of(LINE, 2)
    losses = operator(small_model(), relative_floor=1e-6)([batch])
    torch.testing.assert_close(losses.total, torch.tensor(float(batch.num_samples)))
    assert losses.metrics.keys() == {"loss", "train/line/loss"}
    assert mean_of(losses.metrics["train/line/loss"]) == pytest.approx(1.0)
    assert not losses.metrics["train/line/loss"].requires_grad
    change = (batch.state[:, 1] - batch.state[:, 0]) / 0.25
    torch.testing.assert_close(loss_of(operator(small_model(), loss="mse"), batch), change.square().mean())


def test_a_perfect_prediction_costs_nothing() -> None:
    stepper = awake(small_model()).double()
    batch = batch_of(PLANE, 3, dtype=torch.float64)
    state = batch.state.clone()
    with torch.no_grad():
        for frame in range(2):
            state[:, frame + 1] = stepper(batch.with_state(state[:, frame : frame + 1]))
        target = stepper(still := batch_of(STEADY, 0, dtype=torch.float64))
    assert loss_of(operator(stepper, unroll_steps=2, augment=False), replace(batch, state=state)) < 1e-5
    assert loss_of(operator(stepper), replace(still, target=target)) < 1e-5


def test_the_unroll_feeds_the_model_its_own_results() -> None:
    stepper = awake(small_model()).double()
    batch = batch_of(LINE, 3, dtype=torch.float64)
    once = stepper(batch.with_state(batch.state[:, :1]))
    twice = stepper(batch.with_state(once[:, None]))
    change = (batch.state[:, 2] - batch.state[:, 1]) / 0.25
    error = (twice - batch.state[:, 2]) / 0.25
    expected = (error.square().mean((1, 2)) / (change.square().mean((1, 2)) + 1e-12)).sqrt().mean()
    stage = operator(stepper, unroll_steps=2, pushforward_steps=1, augment=False, relative_floor=1e-6)
    torch.testing.assert_close(loss_of(stage, batch), expected, rtol=1e-9, atol=0)


def test_pushforward_steps_leave_no_gradient() -> None:
    batch = batch_of(LINE, 3, dtype=torch.float64)

    def gradient(pushforward: int, state: torch.Tensor) -> torch.Tensor:
        stepper = awake(small_model()).double()
        stage = operator(stepper, unroll_steps=2, pushforward_steps=pushforward, augment=False, loss="mse")
        loss_of(stage, replace(batch, state=state)).backward()
        return stepper.network.encoder.table.grad  # type: ignore[return-value]

    stepper = awake(small_model()).double()
    with torch.no_grad():
        once = stepper(batch.with_state(batch.state[:, :1]))
    stage = operator(awake(small_model()).double(), augment=False, loss="mse")
    given = torch.stack([once, batch.state[:, 2]], dim=1)
    loss_of(stage, replace(batch, state=given)).backward()
    torch.testing.assert_close(gradient(1, batch.state), stage.stepper.network.encoder.table.grad)
    assert not torch.allclose(gradient(0, batch.state), gradient(1, batch.state))


def test_a_stage_says_how_many_frames_it_needs_and_refuses_fewer() -> None:
    stage = operator(small_model(context_frames=3), unroll_steps=4)
    assert stage.window_frames(3) == 7
    with pytest.raises(DataError, match="needs 7 frames"):
        stage([batch_of(LINE, 6)])
    assert stage([batch_of(STEADY, 0)]).total.isfinite()


def test_a_few_steps_of_training_lower_the_loss_of_every_task_at_once() -> None:
    stage = operator(small_model(), loss="mse", augment=False)
    batches = [batch_of(task, 2) for task in TASKS]
    optimizer = torch.optim.AdamW(stage.trainable_parameters(), lr=1e-2)
    before = [loss_of(stage, b).item() for b in batches]
    for _ in range(15):
        optimizer.zero_grad()
        torch.stack([loss_of(stage, b) / v for b, v in zip(batches, before, strict=True)]).sum().backward()
        optimizer.step()
    after = [loss_of(stage, b).item() for b in batches]
    assert all(a < 0.97 * b for a, b in zip(after, before, strict=True)), (before, after)


def test_a_micro_batch_of_several_tasks_costs_the_sum_of_what_they_cost_alone() -> None:
    stepper = awake(small_model()).double()
    batches = [
        replace(batch_of(task, 2, dtype=torch.float64), sample_weight=weight)
        for task, weight in ((LINE, 0.05), (PLANE, 0.2), (STEADY, 0.01))
    ]
    stage = operator(stepper, balance=0.5, loss="nrmse")
    assert stage.averages is not None
    stage.averages.update(torch.rand(len(stage.averages.tasks), 2, dtype=torch.float64))
    together, apart = stage(batches), [stage([batch]) for batch in batches]
    torch.testing.assert_close(together.total, torch.stack([a.total for a in apart]).sum(), rtol=1e-12, atol=0)
    assert set(together.metrics) == {"loss", *(f"train/{b.task.name}/loss" for b in batches)}
    # A step may have a task twice.
    second = batch_of(LINE, 2, seed=5, dtype=torch.float64)
    again, once = stage([batches[0], second]), stage([second])
    name = f"train/{LINE.name}/loss"
    torch.testing.assert_close(again.metrics[name], apart[0].metrics[name] + once.metrics[name])


def test_a_balanced_loss_starts_relative_to_a_prediction_of_nothing_and_follows_the_averages() -> None:
    stage = operator(small_model(), balance=0.5, loss="nrmse")
    averages = stage.averages
    assert averages is not None
    start = dict(zip(averages.tasks, averages.start.tolist(), strict=True))
    assert stage.task_factor(LINE) == pytest.approx(1 / start["line"])
    sums = torch.zeros(len(averages.tasks), 2, dtype=torch.float64)
    sums[averages.tasks.index("line")] = torch.tensor([0.0, 4.0])
    averages.update(sums)
    assert averages.fraction("line") == pytest.approx(0.98)
    assert averages.fraction("plane") == 1.0, "a task that was not seen keeps its average"
    assert stage.task_factor(LINE) == pytest.approx(start["line"] ** -0.5 * (0.98 * start["line"]) ** -0.5)


def test_the_loss_of_nothing_is_the_usual_change_relative_to_the_field() -> None:
    stage = operator(small_model(), loss="nrmse", balance=1.0)
    assert stage.averages is not None
    start = dict(zip(stage.averages.tasks, stage.averages.start.tolist(), strict=True))
    assert start["line"] == pytest.approx(0.25 / (3.0**2 + 2.0**2) ** 0.5)
    assert start["steady"] == pytest.approx(4.0 / (1.0**2 + 4.0**2) ** 0.5)


def test_a_loss_that_is_no_number_or_huge_does_not_silence_a_task() -> None:
    stage = operator(small_model(), balance=0.5, loss="nrmse")
    averages = stage.averages
    assert averages is not None
    at = averages.tasks.index("line")
    for loss in (float("inf"), float("nan"), 1e20):
        sums = torch.zeros(len(averages.tasks), 2, dtype=torch.float64)
        sums[at] = torch.tensor([loss, 1.0])
        averages.update(sums)
    assert averages.values.isfinite().all()
    assert averages.fraction("line") < 1.3


def test_fields_of_any_physical_size_have_a_loss() -> None:
    size = 1e25  # its square is no number in float32
    usual = statistics_of(LINE)
    large = replace(
        usual, state_mean=(3.0 * size,), state_std=(2.0 * size,), difference_mean=(0.0,), difference_std=(0.25 * size,)
    )
    batch = batch_of(LINE, 2)
    losses = []
    for statistics, scale in ((usual, 1.0), (large, size)):
        stepper = build_model(small_model().config, [LINE], {"line": statistics}, context_frames=1)
        losses.append(loss_of(operator(stepper, loss="nrmse"), replace(batch, state=batch.state * scale)))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=0)
