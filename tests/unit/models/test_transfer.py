"""Weights go from one model to another by name, row by row where rows belong to names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from tests.support.small_model import LINE, PLANE, STEADY, awake, batch_of, statistics_of
from ups.config.model import LatentOperatorConfig, ModelConfig, MultiscaleConfig, UnetConfig
from ups.errors import ConfigError
from ups.models.build import build_model
from ups.models.multiscale import MultiscaleNetwork
from ups.models.stepper import Stepper
from ups.models.transfer import transfer
from ups.models.warm_start import unit_change
from ups.spec.statistics import Statistics
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

LATENT = LatentOperatorConfig(width=16, depth=1, num_heads=2, patch_size=4)
DEEP = LatentOperatorConfig(width=16, depth=1, num_heads=2, patch_size=4, encoder_blocks=2, latent_channels=3)
MULTISCALE = MultiscaleConfig(widths=[8, 8], blocks=[1, 1], num_heads=2)


def model(config: ModelConfig, tasks: Sequence[TaskSpec], seed: int = 0) -> Stepper:
    return build_model(config, tasks, {t.name: statistics_of(t) for t in tasks}, context_frames=1, seed=seed)


@pytest.mark.parametrize("config", [LATENT, DEEP, MULTISCALE], ids=["linear", "deep", "multiscale"])
def test_a_model_that_got_all_weights_answers_like_the_other(config: ModelConfig) -> None:
    source, target = awake(model(config, [LINE, PLANE])), model(config, [PLANE, LINE], seed=1)
    taken = transfer(source, target)
    assert taken.new == ()
    assert taken.num_taken == taken.num_weights
    for task in (LINE, PLANE):
        batch = batch_of(task, 1)
        assert torch.equal(source(batch), target(batch))


@pytest.mark.parametrize("config", [LATENT, MULTISCALE], ids=lambda c: c.type)
def test_another_set_of_tasks_takes_what_is_shared_and_says_what_is_new(config: ModelConfig) -> None:
    source, target = awake(model(config, [LINE, PLANE])), model(config, [PLANE, STEADY], seed=1)
    before = {name: p.detach().clone() for name, p in target.named_parameters()}
    taken = transfer(source, target)
    batch = batch_of(PLANE, 1)
    torch.testing.assert_close(source(batch), target(batch))
    assert 0 < taken.num_taken < taken.num_weights
    assert any("steady" in name for _, new in taken.rows.values() for name in new)
    assert "weights" in taken.describe()
    assert "new rows: " in taken.describe()
    # What is new is what the new model drew, or begins like a known task.
    borrowed = target.network.borrowed_rows(STEADY, PLANE)
    for name, rows in target.network.named_rows().items():
        for place, row in enumerate(rows.names):
            if row in taken.rows.get(name, ((), ()))[1] and row not in borrowed.get(name, {}):
                now = dict(target.network.named_parameters())[name].select(rows.dim, place)
                assert torch.equal(now, before[f"networks.operator.{name}"].select(rows.dim, place))


def test_kernels_of_lines_become_kernels_of_planes() -> None:
    source, target = awake(model(MULTISCALE, [LINE])), model(MULTISCALE, [LINE, PLANE], seed=1)
    transfer(source, target)
    batch = batch_of(LINE, 1)
    torch.testing.assert_close(source(batch), target(batch), rtol=1e-5, atol=1e-5)


def test_kernels_of_planes_become_kernels_of_lines() -> None:
    source, target = awake(model(MULTISCALE, [LINE, PLANE])), model(MULTISCALE, [LINE], seed=1)
    taken = transfer(source, target)
    assert taken.new == ()
    batch = batch_of(LINE, 1)
    torch.testing.assert_close(source(batch), target(batch), rtol=1e-5, atol=1e-5)


def test_sizes_that_do_not_fit_are_new_and_not_an_error() -> None:
    deeper = MultiscaleConfig(widths=[8, 8], blocks=[1, 2], num_heads=2)
    wider = MultiscaleConfig(widths=[8, 16], blocks=[1, 1], num_heads=2)
    for config in (deeper, wider):
        taken = transfer(model(MULTISCALE, [LINE]), model(config, [LINE, PLANE], seed=1))
        assert 0 < taken.num_taken < taken.num_weights
        assert any(name.startswith("middle.") for name in taken.new)


@pytest.mark.parametrize(
    "changes",
    [{"attention": "last"}, {"blocks": [1, 3]}, {"blocks": [2, 2]}],
    ids=["less attention", "deeper", "finer"],
)
def test_what_the_condition_tells_a_block_goes_with_the_block(changes: dict[str, object]) -> None:
    sizes = {"widths": [8, 8], "blocks": [1, 2], "num_heads": 2, "attention": True}
    source = awake(model(MultiscaleConfig.model_validate(sizes), [LINE]))
    target = model(MultiscaleConfig.model_validate(sizes | changes), [LINE], seed=1)
    transfer(source, target)
    blocks = [dict(_modulations(one)) for one in (source, target)]
    assert len(blocks[0].keys() & blocks[1].keys()) >= 5
    for name in blocks[0].keys() & blocks[1].keys():
        torch.testing.assert_close(blocks[1][name], blocks[0][name])
    if "attention" not in changes:  # a new block adds nothing: the law is the same
        batch = batch_of(LINE, 1)
        torch.testing.assert_close(target(batch), source(batch))


def _modulations(stepper: Stepper) -> list[tuple[str, Tensor]]:
    """Name of each block, and its rows of the condition."""
    network = stepper.network
    assert isinstance(network, MultiscaleNetwork)
    blocks = network.modulated_blocks()
    rows = network.condition.out.weight.detach().split([size for _, size in blocks])
    return [(name, row) for (name, _), row in zip(blocks, rows, strict=True)]


def test_sizes_of_noise_are_not_taken_without_its_weights() -> None:
    sizes = {"widths": [8, 8], "num_heads": 2}
    source, target = (
        model(MultiscaleConfig.model_validate(sizes | {"blocks": [1, blocks], "noise_size": size}), [LINE], seed)
        for seed, (blocks, size) in enumerate([(1, 4), (2, 8)])
    )
    assert {"condition.noise.weight", "condition.noise.sizes.table"} <= set(transfer(source, target).new)


def test_blocks_that_meet_other_blocks_than_before_predict_no_change() -> None:
    source = awake(model(MULTISCALE, [LINE]))
    batch = batch_of(LINE, 1)
    assert source.predict(batch).any()
    for changes in ({"widths": [8, 16]}, {"kernel_size": 5}):
        target = model(MultiscaleConfig.model_validate(MULTISCALE.model_dump() | changes), [LINE], seed=1)
        taken = transfer(source, target)
        assert "lower.weight" in taken.new
        law = target.network.linear(target.network_input(batch))
        torch.testing.assert_close(target.predict(batch), law)


def test_what_a_known_task_has_more_than_before_says_nothing_at_first() -> None:
    more = replace(
        LINE,
        fields=(*LINE.fields, FieldSpec("force", role="static")),
        parameters=(*LINE.parameters, ParameterSpec("gravity", minimum=0.0, maximum=2.0)),
    )
    source, target = awake(model(MULTISCALE, [LINE])), model(MULTISCALE, [more], seed=1)
    taken = transfer(source, target)
    assert "line/force/given" in taken.rows["lift.table"][1]
    batch = batch_of(more, 1)
    found = target.predict(batch)
    others = replace(batch, static=2 * batch.static)
    torch.testing.assert_close(target.predict(others), found)
    assert found.any()


def test_sizes_that_do_not_fit_at_all_are_said_and_not_the_type() -> None:
    wider = MultiscaleConfig(widths=[16, 32], blocks=[1, 1], num_heads=2)
    other = replace(PLANE, name="other")
    with pytest.raises(ConfigError, match="no weight to start from matches this model"):
        transfer(model(MULTISCALE, [LINE]), model(wider, [other], seed=1))


def test_the_last_frame_stays_the_last_where_more_are_given() -> None:
    tasks = [LINE]
    statistics = {t.name: statistics_of(t) for t in tasks}
    source = build_model(MULTISCALE, tasks, statistics, context_frames=1)
    target = build_model(MULTISCALE, tasks, statistics, context_frames=2, seed=1)
    taken = transfer(source, target)
    assert taken.rows["lift.table"][1] == ("line/u/-2",)
    names = target.network.named_rows()["lift.table"].names
    theirs = source.network.named_rows()["lift.table"].names
    tables = [dict(s.network.named_parameters())["lift.table"] for s in (source, target)]
    assert torch.equal(tables[1][names.index("line/u/-1")], tables[0][theirs.index("line/u/-1")])


def test_models_of_other_kinds_have_nothing_to_give() -> None:
    unet = model(UnetConfig(width=8, levels=1, blocks=1), [LINE])
    with pytest.raises(ConfigError, match="no weights for one of type 'multiscale'"):
        transfer(unet, model(MULTISCALE, [LINE]))


def test_blocks_elsewhere_do_not_take_modulations_that_happen_to_be_as_many() -> None:
    source, target = (
        model(MultiscaleConfig(widths=[4, 8, 16], blocks=blocks, num_heads=1, attention=True), [LINE], seed)
        for seed, blocks in enumerate(([1, 1, 2], [1, 3, 1]))
    )
    shapes = [dict(s.network.named_parameters())["condition.out.weight"].shape for s in (source, target)]
    assert shapes[0] == shapes[1]
    taken = transfer(source, target)
    assert {"condition.out.weight", "condition.hidden.weight"} <= set(taken.whole)
    theirs, mine = (dict(_modulations(stepper)) for stepper in (source, target))
    assert all(torch.equal(theirs[name], mine[name]) for name in theirs.keys() & mine.keys())
    assert "down.1.2" in mine.keys() - theirs.keys()


def other_parameters(task: TaskSpec) -> tuple[TaskSpec, Statistics]:
    """The same task with another range of its parameter, and other statistics of it."""
    new = replace(task, parameters=tuple(replace(p, maximum=3 * p.maximum) for p in task.parameters))
    return new, replace(statistics_of(task), parameter_mean=(-0.4,), parameter_std=(1.3,))


@pytest.mark.parametrize("scale", ["log", "linear"])
def test_other_statistics_of_a_parameter_do_not_change_what_a_model_says(scale: Literal["log", "linear"]) -> None:
    task = replace(LINE, parameters=(replace(LINE.parameters[0], scale=scale),))
    new, statistics = other_parameters(task)
    source = awake(model(MULTISCALE, [task])).double()
    target = build_model(MULTISCALE, [new], {new.name: statistics}, context_frames=1, seed=1).double()
    taken = transfer(source, target)
    assert taken.converted == ("line",)
    assert "converted to other units of time, length or parameters: line" in taken.describe()
    batch = batch_of(task, 1, dtype=torch.float64)
    torch.testing.assert_close(source(batch), target(replace(batch, task=new)), rtol=1e-9, atol=1e-9)


def test_a_model_that_converts_nothing_does_not_say_so() -> None:
    new, statistics = other_parameters(LINE)
    target = build_model(LATENT, [new], {new.name: statistics}, context_frames=1, seed=1)
    assert transfer(model(LATENT, [LINE]), target).converted == ()


def test_a_slope_that_two_tasks_share_stays_where_their_units_change_differently() -> None:
    other = replace(LINE, name="other")
    new, statistics = other_parameters(LINE)
    source = awake(model(MULTISCALE, [LINE, other]))
    target = build_model(
        MULTISCALE, [new, other], {new.name: statistics, other.name: statistics_of(other)}, context_frames=1, seed=1
    )
    source, target = source.double(), target.double()
    transfer(source, target)
    batch = batch_of(LINE, 1, dtype=torch.float64)
    same = replace(batch, task=other)
    torch.testing.assert_close(source(same), target(same))
    linear = [s.network.linear(s.network_input(b)) for s, b in ((source, batch), (target, replace(batch, task=new)))]
    torch.testing.assert_close(linear[0], linear[1], rtol=1e-9, atol=1e-9)


def test_a_linear_law_holds_for_other_time_steps_and_extents() -> None:
    new = replace(LINE, dt=2.5 * LINE.dt, axes=(replace(LINE.axes[0], extent=2 * LINE.axes[0].extent),))
    source, target = (model(MULTISCALE, [task]).double() for task in (LINE, new))
    with torch.no_grad():
        table = dict(source.network.named_parameters())["propagator.table"]
        table.copy_(0.1 * torch.randn(table.shape, generator=torch.Generator().manual_seed(0), dtype=table.dtype))
    assert transfer(source, target).converted == ("line",)
    batch = batch_of(LINE, 1, dtype=torch.float64)
    # Twice the same waves, on an axis twice as long.
    twice = batch_of(new, 1, dtype=torch.float64, space=(64,))
    twice = replace(twice, state=torch.cat([batch.state] * 2, -1), parameters=batch.parameters, dt=batch.dt)
    here, there = (s.network.linear(s.network_input(b)) for s, b in ((source, batch), (target, twice)))
    torch.testing.assert_close(torch.cat([here] * 2, -1), there, rtol=1e-9, atol=1e-9)


def test_frames_that_only_one_model_divides_by_their_size_are_named() -> None:
    always = MULTISCALE.model_copy(update={"amplitude": True})
    taken = transfer(model(always, [LINE, STEADY]), model(MULTISCALE, [LINE, STEADY], seed=1))
    assert taken.other_scaling == ("line",)
    assert "frames of line are divided by their size in only one of the two models" in taken.describe()
    assert transfer(model(always, [LINE]), model(always, [LINE], seed=1)).other_scaling == ()


def test_kernels_that_a_sharing_model_does_not_take_are_named() -> None:
    own = MULTISCALE.model_copy(update={"own_kernels": True})
    taken = transfer(model(own, [LINE, PLANE]), model(MULTISCALE, [LINE, PLANE], seed=1))
    assert taken.other_kernels == ("line",)
    assert "line got the kernels of tasks with more dimensions" in taken.describe()
    both = [LINE, PLANE]
    for source, target, tasks in ((own, own, both), (MULTISCALE, own, both), (own, MULTISCALE, [LINE])):
        assert transfer(model(source, both), model(target, tasks, seed=1)).other_kernels == ()
    # Kernels of lines in the center of those of planes: nothing was left.
    assert transfer(model(own, [LINE]), model(MULTISCALE, [LINE, PLANE], seed=1)).other_kernels == ()


def test_a_new_task_meets_trained_blocks_as_the_task_does_that_it_is_like() -> None:
    """There is no norm: where trained blocks meet a condition as drawn, features grow from block to block."""
    source = awake(model(MULTISCALE, [LINE, PLANE]))
    other = replace(PLANE, name="other", axes=(replace(PLANE.axes[0], boundary="neumann"), PLANE.axes[1]))
    target = model(MULTISCALE, [other, LINE], seed=1)
    features: list[torch.Tensor] = []
    for stepper in (source, target):
        stepper.network.lower.register_forward_pre_hook(lambda _, args: features.append(args[0]))
    taken = transfer(source, target)
    assert taken.like == {"other": "plane"}
    assert "new tasks begin other like plane (a guess from their descriptions)" in taken.describe()
    batch = batch_of(PLANE, 1)
    source(batch)
    predicted = target(replace(batch, task=other))
    torch.testing.assert_close(features[0], features[1])
    # What leaves the network is new: no change is predicted.
    assert torch.equal(predicted, batch.state[:, -1])


FLOOD = TaskSpec(
    "aflood",
    (FieldSpec("bed", role="static"), FieldSpec("z"), FieldSpec("a", tensor_rank=1)),
    (AxisSpec("y", "wall"), AxisSpec("b")),
    dt=0.1,
)
WAVE = replace(LINE, name="wave", fields=(FieldSpec("beta"),), parameters=(replace(LINE.parameters[0], name="c"),))


@pytest.mark.parametrize(("task", "known"), [(FLOOD, PLANE), (WAVE, LINE)], ids=["plane", "line"])
def test_a_task_predicts_at_once_as_a_known_one_under_names_of_its_own(task: TaskSpec, known: TaskSpec) -> None:
    source, target = awake(model(MULTISCALE, [LINE, PLANE, STEADY])), model(MULTISCALE, [task], seed=1)
    taken = transfer(source, target, known.name)
    assert taken.like == {task.name: known.name}
    assert taken.new == ()
    batch = batch_of(known, 1)
    torch.testing.assert_close(source(batch), target(replace(batch, task=task)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tasks", "start"), [([WAVE], "plane"), ([WAVE], "none"), ([WAVE, FLOOD], "line")])
def test_a_start_task_that_cannot_stand_for_the_data_is_refused(tasks: list[TaskSpec], start: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot begin as start_task '{start}'"):
        transfer(model(MULTISCALE, [LINE, PLANE]), model(MULTISCALE, tasks), start)
    if len(tasks) == 1:  # rows of a latent operator are shared by tasks, and no name of them is of one alone
        with pytest.raises(ConfigError, match="cannot begin"):
            transfer(model(LATENT, [LINE]), model(LATENT, tasks), "line")


def test_a_new_parameter_says_nothing_at_first() -> None:
    other = replace(LINE, name="other", parameters=(replace(LINE.parameters[0], name="unknown"),))
    source, target = model(MULTISCALE, [LINE]), model(MULTISCALE, [other], seed=1)
    transfer(source, target)
    scalars = target.network.condition.scalars
    assert not scalars.row(("", "unknown")).any()
    assert scalars.row(("", "log dt")).any()


def sizes(stepper: Stepper) -> list[float]:
    """Of each matrix, relative to a new one."""
    return [float(m.square().mean() * m[0].numel()) ** 0.5 for m in stepper.network.matrices()]


@torch.no_grad()
def test_large_matrices_are_made_as_small_as_new_ones_where_no_task_is_known() -> None:
    source = model(MULTISCALE, [LINE])
    for number, matrix in enumerate(source.network.matrices()):
        matrix.normal_(std=(4.0 if number % 2 else 0.2) / matrix[0].numel() ** 0.5)
    before = sizes(source)
    other = replace(LINE, name="other")
    target = model(MULTISCALE, [other], seed=1)
    limits = [max(size, 1.0) for size in sizes(target)]  # some are drawn as zeros, and those that grow a grid larger
    taken = transfer(source, target)
    expected = [min(size, limit) for size, limit in zip(before, limits, strict=True)]
    assert sizes(target) == pytest.approx(expected, rel=1e-5)
    assert taken.made_smaller == len(before) // 2
    assert f"{taken.made_smaller} large matrices were rescaled to their initial norm" in taken.describe()
    # A known task must answer as before, so that a model keeps what it has for all.
    taken = transfer(source, target := model(MULTISCALE, [LINE, other], seed=1))
    assert sizes(target) == pytest.approx(before, rel=1e-5)
    assert taken.made_smaller == 0
    assert "large matrices" not in taken.describe()


def test_matrices_as_they_were_drawn_are_not_made_smaller() -> None:
    other = replace(PLANE, name="other")
    assert transfer(model(MULTISCALE, [PLANE]), model(MULTISCALE, [other], seed=1)).made_smaller == 0


@torch.no_grad()
def test_matrices_that_were_not_taken_stay_as_they_were_drawn() -> None:
    source = model(MULTISCALE, [LINE])
    for matrix in source.network.matrices():
        matrix.mul_(10)
    wider = MultiscaleConfig(widths=[8, 16], blocks=[1, 1], num_heads=2)
    target = model(wider, [replace(LINE, name="other")], seed=1)
    before = {name: p.clone() for name, p in target.network.named_parameters()}
    taken = transfer(source, target)
    assert taken.made_smaller > 0
    assert taken.new
    assert all(torch.equal(p, before[name]) for name, p in target.network.named_parameters() if name in taken.new)


def test_tables_that_were_not_taken_are_not_converted() -> None:
    new, statistics = other_parameters(LINE)
    wider = MultiscaleConfig(widths=[8, 16], blocks=[1, 1], num_heads=2)
    target = build_model(wider, [new], {new.name: statistics}, context_frames=1, seed=1)
    before = {name: p.detach().clone() for name, p in target.network.named_parameters()}
    taken = transfer(model(MULTISCALE, [LINE]), target)
    assert "condition.scalars.table" in taken.new
    assert torch.equal(
        dict(target.network.named_parameters())["condition.scalars.table"], before["condition.scalars.table"]
    )


def test_channels_begin_like_those_in_the_same_place() -> None:
    fields = tuple(replace(PLANE.fields_of("state")[0], name=name, tensor_rank=0) for name in ("p", "q", "r"))
    other = replace(PLANE, name="other", fields=fields)
    like = replace(PLANE, fields=tuple(replace(field, name=name) for field, name in zip(fields[:2], "uv", strict=True)))
    statistics = {t.name: statistics_of(t) for t in (other, like)}
    lift = build_model(MULTISCALE, [other, like], statistics, context_frames=2).network.lift
    found = {new: old for new, old in lift.borrowed_rows(other, like).items() if "position" not in new}
    names = {"p": "u", "q": "v", "r": "u"}
    assert found == {f"other/{n}/{f}": f"{like.name}/{o}/{f}" for f in (-2, -1) for n, o in names.items()}


def test_each_end_begins_like_that_of_the_same_axis() -> None:
    axes = [replace(PLANE.axes[0], boundary=kinds) for kinds in (("dirichlet", "neumann"), "neumann")]
    other = replace(PLANE, name="other", axes=(axes[0], replace(PLANE.axes[1], boundary="neumann")))
    like = replace(PLANE, axes=tuple(replace(axis, boundary="dirichlet") for axis in PLANE.axes))
    condition = model(MULTISCALE, [other, like]).network.condition
    found = condition.borrowed_rows(other, like)["boundaries"]
    assert found["/0/dirichlet first"] == found["/0/neumann last"] == "/0/dirichlet"
    assert found["/1/neumann"] == "/1/dirichlet"


def test_numbers_in_other_units_are_no_other_length_or_time() -> None:
    old = replace(LINE, axes=(replace(LINE.axes[0], extent=1.0, unit="km"),), dt=1.0, time_unit="h")
    statistics = statistics_of(LINE)
    same = replace(old, axes=(replace(old.axes[0], extent=1000.0, unit="m"),), dt=3600.0, time_unit="s")
    longer = replace(old, axes=(replace(old.axes[0], extent=2.0),))
    assert unit_change(old, statistics, same, statistics) is None
    change = unit_change(old, statistics, longer, statistics)
    assert change is not None
    assert change.lengths == (0.5,)
