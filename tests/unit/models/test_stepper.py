"""The stepper: any task in, physical units in and out, one set of weights for all."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, save

from tests.support.small_model import CUBE, LINE, PLANE, SPACE, STEADY, TASKS, awake, batch_of, small_model, step
from ups.errors import ConfigError, DataError
from ups.models.build import build_model
from ups.spec.task import AxisSpec, TaskSpec

each_task = pytest.mark.parametrize("task", TASKS, ids=lambda t: t.name)


@each_task
@pytest.mark.parametrize("context_frames", [1, 3])
@pytest.mark.parametrize("attention", ["global", "windowed", "alternating"])
def test_every_task_gets_a_field_of_its_own_shape(task: TaskSpec, context_frames: int, attention: str) -> None:
    stepper = awake(small_model(context_frames, attention=attention))
    result = step(stepper, batch_of(task, context_frames))
    channels = task.num_channels("target" if task.steady else "state")
    assert result.shape == (3, channels, *SPACE[task.name])
    assert result.isfinite().all()


def test_a_new_model_is_persistence_and_the_training_mean() -> None:
    stepper = small_model()
    moving, still = batch_of(PLANE, 1), batch_of(STEADY, 0)
    torch.testing.assert_close(step(stepper, moving), moving.state[:, -1])
    torch.testing.assert_close(step(stepper, still), torch.full_like(still.target, -1.0))


@each_task
def test_the_model_depends_on_everything_it_is_conditioned_on(task: TaskSpec) -> None:
    stepper = awake(small_model(context_frames=2))
    batch = batch_of(task, 2)
    reference = stepper.predict(batch)

    def changes(**other: torch.Tensor) -> bool:
        found = stepper.predict(replace(batch, **other))  # type: ignore[arg-type]
        return bool(((found - reference).abs().amax(tuple(range(1, found.ndim))) > 1e-4).all())

    if task.parameters:
        assert changes(parameters=batch.parameters * 1.5)
    if task.num_channels("static"):
        assert changes(static=batch.static.flip(-1))
    if not task.steady:
        assert changes(dt=batch.dt * 2)
        for frame in range(2):
            assert changes(state=batch.state.index_add(1, torch.tensor([frame]), torch.ones_like(batch.state[:, :1])))


@pytest.mark.parametrize(("task", "shifts"), [(LINE, (8,)), (CUBE, (4, 0, 4))], ids=["line", "cube"])
def test_global_attention_commutes_with_rolls_by_patches(task: TaskSpec, shifts: tuple[int, ...]) -> None:
    stepper = awake(small_model(attention="global")).double()
    batch = batch_of(task, 1, dtype=torch.float64)
    dims = tuple(range(-len(shifts), 0))
    before = stepper(batch.with_state(batch.state.roll(shifts, dims)))
    after = step(stepper, batch).roll(shifts, dims)
    torch.testing.assert_close(before, after, rtol=0, atol=1e-10)


@pytest.mark.parametrize("attention", ["windowed", "alternating"])
def test_windowed_attention_commutes_with_rolls_by_windows(attention: str) -> None:
    stepper = awake(small_model(attention=attention, depth=4)).double()
    batch = batch_of(LINE, 1, dtype=torch.float64)
    rolled = stepper(batch.with_state(batch.state.roll(8, -1)))
    torch.testing.assert_close(rolled, step(stepper, batch).roll(8, -1), rtol=0, atol=1e-10)


def test_declared_conserved_fields_keep_their_integral_and_others_do_not() -> None:
    closed = replace(PLANE, conserved=("height",))
    batch = batch_of(closed, 1, dtype=torch.float64)
    for conserve in (True, False):
        stepper = awake(small_model(tasks=(closed,), conserve=conserve)).double()
        drift = (step(stepper, batch) - batch.state[:, -1]).mean((2, 3)).abs().amax(0)  # (C,)
        assert bool(drift[0] < 1e-14) is conserve
        assert drift[1:].min() > 1e-4


def test_a_task_without_translation_symmetry_sees_where_it_is() -> None:
    stepper = awake(small_model(attention="global"))
    batch = batch_of(PLANE, 1)
    result = stepper(replace(batch, state=torch.ones_like(batch.state), static=torch.ones_like(batch.static)))
    patches = result[0, 0, ::4, ::4]
    assert (patches[0] - patches[1]).abs().min() > 1e-4, "walls along x"
    assert (patches[:, 0] - patches[:, 1]).abs().min() > 1e-4, "an undeclared symmetry along y"


@each_task
def test_samples_do_not_see_each_other(task: TaskSpec) -> None:
    stepper = awake(small_model()).double()
    batch = batch_of(task, 1, samples=4, dtype=torch.float64)
    whole = step(stepper, batch)
    parts = torch.cat([step(stepper, batch.cut(0, 1)), step(stepper, batch.cut(1, 4))])
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-12)


@each_task
def test_the_whole_model_runs_in_float64_and_agrees_with_float32(task: TaskSpec) -> None:
    single = awake(small_model())
    double = copy.deepcopy(single).double()
    exact = step(double, batch_of(task, 1, dtype=torch.float64))
    assert exact.dtype == torch.float64
    torch.testing.assert_close(step(single, batch_of(task, 1)).double(), exact, rtol=1e-4, atol=1e-4)


@each_task
def test_bfloat16_autocast_leaves_states_in_float32(task: TaskSpec) -> None:
    stepper = awake(small_model())
    batch = batch_of(task, 1)
    exact = step(stepper, batch)
    with torch.autocast("cpu", torch.bfloat16):
        rough = step(stepper, batch)
    assert rough.dtype == torch.float32
    change = exact - (batch.state[:, -1] if not task.steady else 0)
    assert (rough - exact).square().mean() < 0.01 * change.square().mean()


def test_half_precision_does_not_touch_the_state_itself() -> None:
    stepper = small_model()
    batch = batch_of(LINE, 1)
    big = batch.state + 1000.0
    with torch.autocast("cpu", torch.bfloat16):
        result = stepper(batch.with_state(big))
    assert torch.equal(result, big[:, -1])


def test_bfloat16_weights_work_too() -> None:
    stepper = awake(small_model())
    stepper.network.to(torch.bfloat16)
    for task in TASKS:
        result = step(stepper, batch_of(task, 1))
        assert result.dtype == torch.float32
        assert result.isfinite().all()


def test_the_same_seed_gives_the_same_weights_whatever_the_process_drew_before() -> None:
    torch.manual_seed(1)
    first = small_model(seed=3).state_dict()
    torch.manual_seed(2)
    drawn = torch.rand(1)
    second = small_model(seed=3).state_dict()
    torch.manual_seed(2)
    assert torch.equal(torch.rand(1), drawn), "building a model must not use up the process' generator"
    assert all(torch.equal(first[k], second[k]) for k in first)
    other = small_model(seed=4).state_dict()
    assert any(not torch.equal(first[k], other[k]) for k in first)


def test_the_order_of_tasks_does_not_change_the_weights() -> None:
    forward, backward = small_model().state_dict(), small_model(tasks=TASKS[::-1]).state_dict()
    assert all(torch.equal(forward[k], backward[k]) for k in forward)


def test_a_model_is_rebuilt_from_its_parts_and_a_state_dict_of_plain_tensors() -> None:
    stepper = awake(small_model(context_frames=2))
    stored = save({k: v.contiguous() for k, v in stepper.state_dict().items()})
    twin = build_model(stepper.config, stepper.tasks, stepper.statistics, stepper.context_frames, seed=99)
    twin.load_state_dict(load(stored))
    batch = batch_of(PLANE, 2)
    assert torch.equal(step(twin, batch), step(stepper, batch))


def test_shard_units_are_the_blocks() -> None:
    stepper = small_model(depth=3)
    units = stepper.shard_units()
    assert len(units) == 3
    inside = sum(p.numel() for u in units for p in u.parameters())
    assert inside > 0.3 * sum(p.numel() for p in stepper.parameters())


def test_what_does_not_fit_is_refused_with_a_reason() -> None:
    stepper = small_model()
    batch = batch_of(LINE, 1)
    with pytest.raises(DataError, match="and their coordinates"):
        stepper(replace(batch, state=batch.state[..., :30], static=batch.static[..., :30]))
    with pytest.raises(DataError, match="1 context frames, not 2"):
        stepper(batch.with_state(batch.state.repeat(1, 2, 1, 1)))
    with pytest.raises(DataError, match="has 1 parameters, not 0"):
        stepper(replace(batch, parameters=batch.parameters[:, :0]))
    with pytest.raises(DataError, match="does not know task 'other'"):
        stepper(replace(batch, task=TaskSpec("other", LINE.fields, LINE.axes, dt=1.0)))
    imposter = TaskSpec("line", PLANE.fields, PLANE.axes, dt=1.0)
    with pytest.raises(DataError, match="other fields, axes, boundaries or parameters"):
        stepper(replace(batch, task=imposter))
    with pytest.raises(ConfigError, match="two tasks are called 'line'"):
        small_model(tasks=(LINE, LINE))


def test_the_latent_operator_tells_the_ends_of_an_axis_apart() -> None:
    found = []
    for ends in ("wall", ("wall", "open"), ("open", "wall"), "open"):
        task = replace(PLANE, axes=(AxisSpec("x", ends), AxisSpec("y")))
        stepper = awake(small_model(tasks=(task,)))
        found.append(step(stepper, batch_of(task, 1)))
    for one, other in itertools.combinations(found, 2):
        assert not torch.allclose(one, other)
