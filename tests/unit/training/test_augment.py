"""A moved sample is a solution of the same problem; a move is a function of seed, step and window."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.small_model import LINE, PLANE, STEADY, batch_of
from ups.solvers.coarse_solver import RESTARTS, Given, Setting
from ups.solvers.problem import Draws
from ups.solvers.tasks import BENCH_TASKS, find_task
from ups.spec.batch import Batch
from ups.spec.task import AxisSpec, BoundaryValue, FieldSpec, TaskSpec
from ups.training.augment import Augmentation, moves_of, point_group

COPIES = 24
# Points and substeps of the solver for a stored grid of 32 points; its own round-off is the limit.
FINE = {"burgers1d": 128, "reacdiff1d": 64}


def solved(name: str) -> tuple[Batch, Setting]:
    """The same window of a task many times over: a frame and what the solver makes of it."""
    pytest.importorskip("exponax")
    task, points = find_task(name), 32
    spec = task.spec
    first = task.solve(Draws(0, name, "train", (3,)), points, 0 if spec.steady else 4)
    restart = RESTARTS[task.spec.name]
    setting = Setting(
        FINE.get(name, points), restart.substeps(FINE.get(name, points), spec.dt) if restart.substeps else 0
    )
    frame = torch.from_numpy(first.state[:, -1]).double() if not spec.steady else torch.zeros(1, 0, points, points)
    batch = Batch(
        task=spec,
        state=frame[:, None].expand(COPIES, *([-1] * (frame.ndim))).contiguous(),
        static=torch.from_numpy(first.static).double().expand(COPIES, *first.static.shape[1:]).contiguous(),
        target=torch.from_numpy(first.target).double().expand(COPIES, *first.target.shape[1:]).contiguous(),
        parameters=torch.from_numpy(first.parameters).double().expand(COPIES, -1).contiguous(),
        dt=torch.full((COPIES,), spec.dt, dtype=torch.float64),
        coordinates=tuple((torch.arange(points, dtype=torch.float64) + 0.5) / points * a.extent for a in spec.axes),
        numbers=torch.arange(COPIES),
        stage_step=5,
    )
    return batch, setting


def solution_of(batch: Batch, setting: Setting) -> torch.Tensor:
    """(B, C, *S): the next frame after the first one, or the target, by the solver."""
    given = Given(
        np.ascontiguousarray(batch.state[:, 0] if not batch.task.steady else batch.target),
        np.ascontiguousarray(batch.static),
        np.ascontiguousarray(batch.parameters),
    )
    found = RESTARTS[batch.task.name].run(batch.task, given, float(batch.dt[0]), 1, setting)
    return torch.from_numpy(np.asarray(found))[:, 0].double()


@pytest.mark.parametrize("name", BENCH_TASKS)
def test_a_moved_sample_is_a_solution(name: str) -> None:
    batch, setting = solved(name)
    following = solution_of(batch.cut(0, 1), setting).expand(COPIES, *([-1] * (len(batch.space) + 1)))
    if batch.task.steady:
        batch = replace(batch, target=following.contiguous())
    else:
        batch = replace(batch, state=torch.stack([batch.state[:, 0], following], dim=1))
    moved = Augmentation(seed=1)(batch)
    wanted = solution_of(moved, setting)
    found = moved.target if batch.task.steady else moved.state[:, 1]
    assert torch.allclose(found, wanted, rtol=0, atol=2e-5 * float(wanted.std()))
    kinds = {tuple(sample.flatten().tolist()) for sample in (moved.target if batch.task.steady else moved.state)}
    assert len(kinds) >= (2 if name == "euler1d" else 6)
    if name == "ns2d":
        assert torch.equal(moved.static, batch.static)


def test_a_vector_is_mirrored_and_turned_with_its_axes() -> None:
    """The gradient of a moved field is the moved gradient, in all eight positions."""
    task = TaskSpec(
        "vectors",
        (
            FieldSpec("potential"),
            FieldSpec("gradient", tensor_rank=1),
            FieldSpec("hessian", tensor_rank=2),
        ),
        (AxisSpec("x", "wall"), AxisSpec("y", "wall")),
        dt=1.0,
        symmetries=("reflection", "rotation90"),
    )
    points = (torch.arange(12, dtype=torch.float64) - 5.5) / 12
    x, y = torch.meshgrid(points, points, indexing="ij")
    a, b, c, d, e = 0.3, -0.7, 1.1, 0.4, 0.2  # potential: a x + b y + c x^2 + d x y + e y^2

    def fields(a: float, b: float, c: float, d: float, e: float) -> torch.Tensor:
        one = torch.ones_like(x)
        return torch.stack(
            [
                a * x + b * y + c * x * x + d * x * y + e * y * y,
                a + 2 * c * x + d * y,
                b + d * x + 2 * e * y,
                2 * c * one,
                d * one,
                d * one,
                2 * e * one,
            ]
        )

    state = fields(a, b, c, d, e).expand(64, 1, -1, -1, -1).contiguous()
    empty = torch.zeros(64, 0, 12, 12, dtype=torch.float64)
    batch = Batch(
        task=task,
        state=state,
        static=empty,
        target=empty,
        parameters=torch.zeros(64, 0),
        dt=torch.ones(64),
        coordinates=(points, points),
        numbers=torch.arange(64),
    )
    allowed = []
    for s, t in itertools.product((1, -1), repeat=2):
        allowed.append(fields(s * a, t * b, c, s * t * d, e))
        allowed.append(fields(t * b, s * a, e, s * t * d, c))
    found = Augmentation(seed=3)(batch).state[:, 0]
    seen = {next(i for i, f in enumerate(allowed) if torch.allclose(f, sample)) for sample in found}
    assert seen == set(range(8))


def test_turns_without_reflections_are_proper_ones() -> None:
    square = TaskSpec("s", (FieldSpec("u"),), (AxisSpec("x"), AxisSpec("y")), dt=1.0, symmetries=("rotation90",))
    assert len(point_group(square, (4, 4), (True, True))) == 4
    assert len(point_group(square, (4, 6), (True, True))) == 1
    cube = replace(square, axes=(*square.axes, AxisSpec("z")))
    assert len(point_group(cube, (4, 4, 4), (True,) * 3)) == 24
    assert len(point_group(cube, (4, 4, 8), (True,) * 3)) == 4
    both = replace(cube, symmetries=("rotation90", "reflection"))
    assert len(point_group(both, (4, 4, 4), (True,) * 3)) == 48
    assert len(point_group(both, (4, 5, 8), (True,) * 3)) == 8
    assert point_group(both, (4, 4, 4), (True,) * 3)[0] == ((0, 1, 2), (False,) * 3)


@pytest.mark.parametrize("task", [PLANE, STEADY], ids=["no symmetry", "steady without symmetry"])
def test_a_task_without_symmetries_is_left_alone(task: TaskSpec) -> None:
    batch = batch_of(task, 2)
    assert Augmentation(seed=1)(batch) is batch


def test_an_uneven_grid_is_left_alone() -> None:
    batch = batch_of(LINE, 2)
    assert moves_of(LINE, batch.coordinates) is not None
    assert moves_of(LINE, [batch.coordinates[0] ** 2]) is None


def test_a_periodic_axis_is_mirrored_only_where_it_may_be_rolled() -> None:
    coordinates = batch_of(LINE, 2).coordinates
    assert moves_of(replace(LINE, symmetries=("reflection",)), coordinates) is None
    assert moves_of(replace(LINE, symmetries=("reflection", "translation")), coordinates) is not None


def test_samples_are_rolled_each_by_its_own_shift() -> None:
    batch = batch_of(LINE, 2, samples=16)
    rolled = Augmentation(seed=1)(batch)
    shifts = [next(s for s in range(32) if torch.equal(batch.state[b].roll(s, -1), rolled.state[b])) for b in range(16)]
    assert len(set(shifts)) > 8


def test_a_transient_task_with_static_fields_is_rolled_where_they_are_constant() -> None:
    task = replace(
        PLANE,
        axes=(AxisSpec("x"), AxisSpec("y")),
        symmetries=("translation", "reflection", "rotation90"),
    )
    batch = batch_of(task, 1, samples=16)
    batch = replace(batch, static=batch.static[:, :, :, :1].expand_as(batch.static).contiguous())
    rolled = Augmentation(seed=1)(batch)
    assert torch.equal(rolled.static, batch.static)
    shifts = [next(s for s in range(8) if torch.equal(batch.state[b].roll(s, -1), rolled.state[b])) for b in range(16)]
    assert len(set(shifts)) > 3


def test_a_move_is_a_function_of_seed_step_and_window() -> None:
    task = replace(STEADY, symmetries=("reflection", "rotation90"))
    for batch in (batch_of(LINE, 2, samples=6), batch_of(task, 2, samples=6)):

        def fields(b: Batch, seed: int = 1) -> torch.Tensor:
            moved = Augmentation(seed)(b)
            return moved.target if b.task.steady else moved.state

        assert torch.equal(fields(batch)[2:4], fields(batch.cut(2, 4)))
        assert not torch.equal(fields(batch), fields(batch, seed=2))
        assert not torch.equal(fields(batch), fields(replace(batch, stage_step=8)))


def test_an_axis_whose_ends_differ_is_not_mirrored() -> None:
    symmetries = ("reflection", "rotation90")
    walls = replace(PLANE, fields=(FieldSpec("h"),), axes=(AxisSpec("x", "wall"), AxisSpec("y", "wall")))
    mixed = replace(walls, axes=(AxisSpec("x", ("wall", "open")), AxisSpec("y", ("wall", "open"))))
    coordinates = (torch.arange(8) / 8.0,) * 2
    assert moves_of(replace(mixed, symmetries=symmetries), coordinates) is None
    assert moves_of(replace(walls, symmetries=symmetries), coordinates) is not None


def test_an_axis_whose_ends_have_other_values_is_not_mirrored_or_turned() -> None:
    task = replace(
        PLANE,
        fields=(FieldSpec("h"),),
        axes=(AxisSpec("x", "dirichlet"), AxisSpec("y", "dirichlet")),
        symmetries=("reflection", "rotation90"),
    )
    coordinates = (torch.arange(8) / 8.0,) * 2

    def elements(*values: BoundaryValue) -> int:
        moves = moves_of(replace(task, boundary_values=values), coordinates)
        return 1 if moves is None else len(moves.first)

    assert elements() == 8
    assert elements(BoundaryValue("h", "x", "first", 0.0), BoundaryValue("h", "x", "last", 1.0)) == 2  # y alone
    assert elements(BoundaryValue("h", "x", "first", 1.0), BoundaryValue("h", "x", "last", 1.0)) == 4  # no turns
    vector = replace(task, fields=(FieldSpec("v", tensor_rank=1),))
    given = (BoundaryValue("v_x", "x", "first", 1.0), BoundaryValue("v_x", "x", "last", 1.0))
    assert moves_of(replace(vector, boundary_values=given), coordinates) is None
