"""The multiscale network: one set of weights for lines, planes and cubes, groups of tasks as one graph."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.support.small_model import CUBE, LINE, PLANE, SPACE, STEADY, TASKS, batch_of, statistics_of, step
from ups.config.model import MultiscaleConfig
from ups.errors import ConfigError
from ups.models.build import build_model
from ups.models.multiscale import MultiscaleNetwork
from ups.models.stepper import Stepper
from ups.spec.batch import Batch
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

SMALL = {"widths": [8, 16, 16], "blocks": [1, 1, 1], "num_heads": 2}
OPEN_LINE = replace(LINE, name="open_line", axes=(AxisSpec("x", "open"),), symmetries=())
RING = replace(
    LINE,
    name="ring",
    fields=(FieldSpec("u"), FieldSpec("force", role="static")),
    parameters=(ParameterSpec("speed", minimum=0.0, maximum=2.0),),
    symmetries=(),
)
LINES = (LINE, OPEN_LINE, RING)
WALLS = replace(PLANE, name="walls", axes=(AxisSpec("x", "wall"), AxisSpec("y", "wall")))
TORUS = replace(PLANE, name="torus", axes=(AxisSpec("x"), AxisSpec("y")), symmetries=("translation",))
PLANES = (PLANE, WALLS, TORUS, STEADY)
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda t: t.name)
own_or_not = pytest.mark.parametrize("own", [False, True], ids=["shared kernels", "own kernels"])


def small(tasks: tuple[TaskSpec, ...] = TASKS, context_frames: int = 1, seed: int = 0, **changes: object) -> Stepper:
    config = MultiscaleConfig.model_validate({**SMALL, **changes})
    return build_model(config, tasks, {t.name: statistics_of(t) for t in tasks}, context_frames, seed)


def awake(stepper: Stepper, size: float = 0.05) -> Stepper:
    """With weights everywhere, so that a new model's zeros hide nothing; small, because there is no norm on the way."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in stepper.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(size * noise.to(parameter.dtype))
    return stepper


def samples_of(task: TaskSpec, space: tuple[int, ...], frames: int = 1, samples: int = 3, seed: int = 0) -> Batch:
    """`batch_of` in float64 on any grid."""
    return batch_of(task, frames, samples, dtype=torch.float64, seed=seed, space=space)


@each_task
@pytest.mark.parametrize("context_frames", [1, 3])
def test_every_task_gets_a_field_of_its_own_shape(task: TaskSpec, context_frames: int) -> None:
    stepper = awake(small(context_frames=context_frames))
    result = step(stepper, batch_of(task, context_frames))
    channels = task.num_channels("target" if task.steady else "state")
    assert result.shape == (3, channels, *SPACE[task.name])
    assert result.isfinite().all()


def test_a_new_model_is_exactly_persistence_and_the_training_mean() -> None:
    stepper = small()
    for task in (LINE, PLANE, CUBE):
        assert not stepper.predict(batch_of(task, 1)).any()
    still = batch_of(STEADY, 0)
    assert torch.equal(step(stepper, still), torch.full_like(still.target, -1.0))


@each_task
def test_the_model_depends_on_everything_it_is_given(task: TaskSpec) -> None:
    stepper = awake(small(context_frames=2)).double()
    batch = batch_of(task, 2, dtype=torch.float64)
    reference = stepper.predict(batch)

    def changes(**other: torch.Tensor) -> bool:
        found = stepper.predict(replace(batch, **other))  # type: ignore[arg-type]
        return bool(((found - reference).abs().amax(tuple(range(1, found.ndim))) > 1e-6).all())

    if task.parameters:
        assert changes(parameters=batch.parameters * 1.5)
    if task.num_channels("static"):
        assert changes(static=batch.static.flip(-1))
    if not task.steady:
        assert changes(dt=batch.dt * 2)
        for frame in range(2):
            assert changes(state=batch.state.index_add(1, torch.tensor([frame]), torch.ones_like(batch.state[:, :1])))


@pytest.mark.parametrize(
    ("tasks", "space"),
    [(LINES, (32,)), (LINES, (27,)), (PLANES, (8, 16)), (PLANES, (9, 6)), ((CUBE,), (5, 8, 6))],
    ids=["lines", "odd lines", "planes", "odd planes", "odd cube"],
)
def test_a_group_is_what_its_tasks_are_alone(tasks: tuple[TaskSpec, ...], space: tuple[int, ...]) -> None:
    stepper = awake(small(tasks, context_frames=2)).double()
    batches = [samples_of(task, space, 2, samples=2 + n, seed=n) for n, task in enumerate(tasks)]
    together = stepper.predict_group(batches)
    for batch, found in zip(batches, together, strict=True):
        assert found.shape[2:] == space
        torch.testing.assert_close(found, stepper.predict(batch), rtol=0, atol=1e-12)
        halves = torch.cat([stepper.predict(batch.cut(0, 1)), stepper.predict(batch.cut(1, batch.num_samples))])
        torch.testing.assert_close(found, halves, rtol=0, atol=1e-12)


@own_or_not
@pytest.mark.parametrize("tasks", [(LINE, RING), (STEADY,), (WALLS, STEADY), (CUBE,)], ids=str)
def test_every_parameter_has_a_gradient_whatever_the_group(tasks: tuple[TaskSpec, ...], own: bool) -> None:
    stepper = awake(small((*LINES, *PLANES, CUBE), own_kernels=own))
    space = {1: (16,), 2: (8, 8), 3: (8, 8, 8)}[tasks[0].num_spatial_dims]
    stepper.double()
    losses = [x.square().mean() for x in stepper.predict_group([samples_of(task, space) for task in tasks])]
    torch.stack(losses).sum().backward()
    assert [name for name, p in stepper.named_parameters() if p.grad is None] == []
    network = stepper.network
    assert isinstance(network, MultiscaleNetwork)
    rows = network.lift.table.grad.flatten(1).any(1).tolist()  # type: ignore[union-attr]
    used = {name for task in tasks for name in network.lift.names_of(task)}
    assert {name for name, moved in zip(network.lift.row_names, rows, strict=True) if moved} == used


@pytest.mark.parametrize(("task", "shifts"), [(LINE, (8,)), (CUBE, (4, 0, 4)), (TORUS, (4, 8))], ids=lambda x: str(x))
def test_periodic_tasks_commute_with_shifts_by_the_coarse_cell(task: TaskSpec, shifts: tuple[int, ...]) -> None:
    stepper = awake(small((LINE, CUBE, TORUS))).double()
    batch = samples_of(task, {1: (32,), 2: (8, 16), 3: (8, 8, 8)}[len(shifts)])
    dims = tuple(range(-len(shifts), 0))
    rolled = replace(batch, state=batch.state.roll(shifts, dims), static=batch.static.roll(shifts, dims))
    torch.testing.assert_close(stepper(rolled), stepper(batch).roll(shifts, dims), rtol=0, atol=1e-10)


@pytest.mark.parametrize("task", [RING, OPEN_LINE], ids=lambda t: t.name)
def test_a_task_without_translation_symmetry_sees_where_it_is(task: TaskSpec) -> None:
    stepper = awake(small((task,))).double()
    batch = samples_of(task, (32,))
    flat = replace(batch, state=torch.ones_like(batch.state), static=torch.ones_like(batch.static))
    cells = stepper(flat)[0, 0, ::4]
    assert (cells[1:] - cells[:-1]).abs().min() > 1e-6


@own_or_not
def test_weights_of_planes_serve_lines_and_cubes(own: bool) -> None:
    """Extended kernels change nothing for the tasks that they come from, and a new axis is one more to learn."""
    plane = awake(small((LINE, TORUS), own_kernels=own)).double()
    cube = small((LINE, TORUS, CUBE), own_kernels=own).double()
    network = cube.network
    assert isinstance(network, MultiscaleNetwork)
    taken = network.extended(plane.network.state_dict(), axes=2)
    for name, table in network.tables().items():
        known = plane.network.get_submodule(name).row_names  # type: ignore[union-attr]
        rows = [table.row_names.index(row) for row in known]
        for parameter, _ in table.named_parameters():
            whole = network.state_dict()[f"{name}.{parameter}"].clone()
            whole[rows] = taken[f"{name}.{parameter}"]
            taken[f"{name}.{parameter}"] = whole
    network.load_state_dict(taken)
    for task, space in ((LINE, (32,)), (TORUS, (8, 12))):
        batch = samples_of(task, space)
        torch.testing.assert_close(cube.predict(batch), plane.predict(batch), rtol=0, atol=1e-12)


def test_switches_take_their_part_away() -> None:
    whole = sum(p.numel() for p in small().parameters())
    for name in ("attention", "propagator"):
        assert sum(p.numel() for p in small(**{name: False}).parameters()) < whole

    def ratio(stepper: Stepper) -> float:
        batch = batch_of(LINE, 1, dtype=torch.float64)
        weak, strong = (replace(batch, state=3.0 + size * batch.state) for size in (1e-2, 1.0))  # 3 is the mean
        with torch.no_grad():
            return float(stepper.predict(weak).norm() / stepper.predict(strong).norm())

    assert ratio(awake(small(propagator=False, amplitude=True)).double()) < 0.03
    batch = batch_of(LINE, 1)
    scaled, plain = (awake(small(amplitude=kind)).predict(batch) for kind in (True, False))
    assert not torch.allclose(scaled, plain)


def test_sizes_are_taken_out_where_frames_go_through_orders_of_magnitude() -> None:
    batch = batch_of(LINE, 1)
    for spread, same in ((0.5, False), (2.0, True)):
        known = {t.name: replace(statistics_of(t), size_spread=spread) for t in (LINE, TORUS)}
        auto, always, never = (
            awake(build_model(MultiscaleConfig.model_validate({**SMALL, **kind}), (LINE, TORUS), known, 1))
            for kind in ({}, {"amplitude": True}, {"amplitude": False})
        )
        alike = always if same else never
        torch.testing.assert_close(auto.predict(batch), alike.predict(batch))


def test_a_weak_frame_is_seen_like_a_strong_one_and_told_apart() -> None:
    stepper = awake(small(propagator=False, amplitude=True)).double()
    batch = batch_of(LINE, 1, dtype=torch.float64)
    strong, weak = (replace(batch, state=3.0 + size * batch.state) for size in (1.0, 1e-2))
    ratio = stepper.predict(strong) / (100 * stepper.predict(weak))
    assert 0.2 < ratio.median() < 5
    assert (ratio - 1).abs().max() > 1e-3


@each_task
def test_the_whole_model_runs_in_float64_and_agrees_with_float32(task: TaskSpec) -> None:
    single = awake(small())
    double = copy.deepcopy(single).double()
    exact = step(double, batch_of(task, 1, dtype=torch.float64))
    assert exact.dtype == torch.float64
    torch.testing.assert_close(step(single, batch_of(task, 1)).double(), exact, rtol=1e-4, atol=1e-4)


@each_task
def test_bfloat16_autocast_leaves_states_in_float32(task: TaskSpec) -> None:
    stepper = awake(small())
    batch = batch_of(task, 1)
    exact = step(stepper, batch)
    with torch.autocast("cpu", torch.bfloat16):
        rough = step(stepper, batch)
    assert rough.dtype == torch.float32
    change = exact - (batch.state[:, -1] if not task.steady else 0)
    assert 0 < (rough - exact).square().mean() < 0.01 * change.square().mean()


def test_bfloat16_does_not_touch_the_linear_part() -> None:
    stepper = awake(small())
    network = stepper.network
    assert isinstance(network, MultiscaleNetwork)
    given = stepper.network_input(batch_of(LINE, 1))
    with torch.autocast("cpu", torch.bfloat16):
        rough = network.linear(given)
    assert torch.equal(rough, network.linear(given))


class DtypesOf(TorchDispatchMode):
    """Remembers in which precision each operation ran."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.dtype for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()}
        self.found.setdefault(func.overloadpacket.__name__, set()).update(given)
        return func(*args, **(kwargs or {}))


@each_task
def test_bfloat16_convolutions_and_float32_scores(task: TaskSpec) -> None:
    stepper = awake(small())
    batch = batch_of(task, 1)
    with DtypesOf() as dtypes, torch.autocast("cpu", torch.bfloat16):
        step(stepper, batch)
    if task.num_spatial_dims > 1:  # in 1D they are products
        assert dtypes.found["convolution"] == {torch.bfloat16}
    scores = [found for name, found in dtypes.found.items() if name.startswith("_scaled_dot_product")]
    assert scores == [{torch.float32}]
    assert torch.float32 in dtypes.found["mm"] | dtypes.found["addmm"]  # condition and the last part
    assert torch.bfloat16 in dtypes.found["mm"] | dtypes.found["addmm"]  # matrices of the attention, convolutions in 1D


def test_bfloat16_weights_work_too() -> None:
    stepper = awake(small())
    stepper.network.to(torch.bfloat16)
    for task in TASKS:
        result = step(stepper, batch_of(task, 1))
        assert result.dtype == torch.float32
        assert result.isfinite().all()


def test_the_order_of_tasks_does_not_change_the_weights() -> None:
    forward, backward = small().state_dict(), small(tasks=TASKS[::-1]).state_dict()
    assert all(torch.equal(forward[k], backward[k]) for k in forward)


def test_a_model_is_rebuilt_from_a_state_dict_of_plain_tensors_on_a_device_without_memory() -> None:
    stepper = awake(small(context_frames=2))
    batch = batch_of(PLANE, 2)
    expected = step(stepper, batch)  # fills the caches: they are no part of the state
    state = stepper.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    stored = save({k: v.contiguous() for k, v in state.items()})
    twin = build_model(stepper.config, stepper.tasks, stepper.statistics, 2, device="meta").to_empty(device="cpu")
    twin.load_state_dict(load(stored))
    assert torch.equal(step(twin, batch), expected)


def test_units_hold_nearly_all_weights_and_every_matrix_for_muon() -> None:
    stepper = small(widths=[32, 64, 128], blocks=[1, 1, 2], num_heads=4)
    network = stepper.network
    units = network.shard_units()
    inside = {id(p) for unit in units for p in unit.parameters()}
    assert len(inside) == sum(1 for unit in units for _ in unit.parameters()), "no parameter is in two units"
    matrices = network.matrices()
    assert {p.ndim for p in matrices} == {2}
    assert sum(p.numel() for p in matrices) > 0.8 * sum(p.numel() for p in network.parameters())
    names = {name for name, p in network.named_parameters() if id(p) in {id(m) for m in matrices}}
    assert not any(name.startswith(("lift", "lower", "condition", "propagator")) for name in names)


@own_or_not
@pytest.mark.parametrize("how", ["recomputed", "compiled"])
def test_units_can_be_replaced_one_by_one(how: str, own: bool) -> None:
    tasks = (LINE, OPEN_LINE)
    plain = awake(small((*tasks, TORUS), own_kernels=own)).double()
    other = copy.deepcopy(plain)
    network = other.network
    assert isinstance(network, MultiscaleNetwork)
    if how == "recomputed":
        for unit in other.shard_units():
            unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)  # type: ignore[method-assign]
    else:  # one of each kind: compilation takes seconds
        for unit in (network.middle[0], network.attention["0"]):
            unit.forward = torch.compile(unit.forward, backend="aot_eager", fullgraph=True)  # type: ignore[method-assign]
    batches = [samples_of(task, (16,)) for task in tasks]
    for stepper in (plain, other):
        sum(x.square().mean() for x in stepper.predict_group(batches)).backward()  # type: ignore[union-attr]
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)


def test_no_two_kernels_share_memory_even_with_one_tap() -> None:
    network = small(kernel_size=1, own_kernels=True).network
    places = [p.data_ptr() for p in network.parameters() if p.numel()]
    assert len(set(places)) == len(places)


@own_or_not
def test_kept_kernels_are_those_of_the_weights_and_a_copy_can_be_trained(own: bool) -> None:
    stepper = awake(small(own_kernels=own))
    batches = [batch_of(task, 1) for task in TASKS]
    expected = [step(stepper, batch) for batch in batches]
    stepper.network.fix_weights()
    with torch.no_grad():
        for _ in range(2):
            assert all(torch.equal(step(stepper, b), x) for b, x in zip(batches, expected, strict=True))
    twin = copy.deepcopy(stepper)
    twin.network.fix_weights(False)
    twin.requires_grad_(True)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)  # changes weights without a trace
    for batch in batches:
        optimizer.zero_grad()
        twin(batch).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        silent = twin(batches[0])
    torch.testing.assert_close(silent, twin(batches[0]).detach(), rtol=0, atol=0)


def test_a_frame_of_nothing_has_a_finite_gradient() -> None:
    stepper = awake(small())
    batch = batch_of(LINE, 1)
    mean = stepper.normalization.column("state_mean", LINE, batch.state, 1)
    state = mean.reshape(1, 1, -1, 1).expand(batch.state.shape).clone().requires_grad_()
    stepper(batch.with_state(state)).sum().backward()
    assert state.grad is not None
    assert state.grad.isfinite().all()


def test_a_size_that_does_not_fit_is_named() -> None:
    for bad, why in (
        ({"widths": [8, 16]}, "must name the same"),
        ({"kernel_size": 4}, "must be odd"),
        ({"num_heads": 3}, "must divide a quarter"),
        ({"blocks": [1, 1, 0]}, "attention follows a block"),
    ):
        with pytest.raises(ValueError, match=why):
            MultiscaleConfig.model_validate({**SMALL, **bad})


def test_a_network_tells_the_ends_of_an_axis_apart() -> None:
    ends = {
        name: replace(OPEN_LINE, axes=(AxisSpec("x", name),)) for name in ("open", ("open", "wall"), ("wall", "open"))
    }
    named = {name: small((task,)).network.condition.boundaries.row_names for name, task in ends.items()}
    assert ("", "0", "open first") in named["open", "wall"]
    assert ("", "0", "open last") in named["wall", "open"]
    assert ("", "0", "open") in named["open"]


def test_attention_that_would_be_blind_along_an_axis_of_space_is_refused() -> None:
    settings = MultiscaleConfig(widths=[8, 16], blocks=[1, 1], num_heads=4)
    build_model(settings, [PLANE], {"plane": statistics_of(PLANE)}, 1)
    with pytest.raises(ConfigError, match="3D attention needs at least 6 channels per head"):
        build_model(settings, [CUBE], {"cube": statistics_of(CUBE)}, 1)


@pytest.mark.parametrize(("attention", "numbers"), [(True, ["0", "1"]), ("last", ["1"]), (False, [])])
def test_attention_stands_after_each_block_or_the_last_or_nowhere(attention: bool | str, numbers: list[str]) -> None:
    stepper = awake(small((LINE,), blocks=[1, 1, 2], attention=attention, propagator=False, conserve=False)).double()
    assert list(stepper.network.attention) == numbers
    batch = samples_of(LINE, (256,), samples=1)
    spike = torch.zeros_like(batch.state)
    spike[..., 0] = 1.0
    # Half of the axis away: further than kernels reach on three grids.
    seen = (stepper.predict(replace(batch, state=batch.state + spike)) - stepper.predict(batch))[..., 128]
    assert bool((seen != 0).any()) == bool(numbers)
