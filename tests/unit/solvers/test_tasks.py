"""The table of tasks and the keyed draws."""

from __future__ import annotations

import numpy as np
import pytest

from ups.errors import ConfigError
from ups.solvers.problem import Draws, solver_points
from ups.solvers.request import make_request
from ups.solvers.tasks import TASKS, check_size, find_task
from ups.spec.task import TaskSpec

NAMES = ["advection1d", "burgers1d", "ks1d", "reacdiff1d", "euler1d", "ns2d", "swe2d", "diffreact2d", "darcy2d"]


def test_the_nine_tasks_are_there_in_the_order_of_the_benchmark():
    assert list(TASKS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_task_has_the_stored_size_of_the_benchmark_and_survives_json(name):
    task = TASKS[name]
    assert task.spec == TaskSpec.from_json(task.spec.to_json())
    assert task.resolution == (128 if task.spec.num_spatial_dims == 1 else 32)
    assert task.num_frames == {1: 41, 2: 0 if name == "darcy2d" else 21}[task.spec.num_spatial_dims]
    assert len({a.extent for a in task.spec.axes}) == 1
    check_size(task, task.resolution, task.num_frames)


@pytest.mark.parametrize(("wrong", "right"), [("burger1d", "burgers1d"), ("ns", "ns2d"), ("Darcy2D", "darcy2d")])
def test_a_misspelled_task_is_answered_with_the_nearest_name(wrong, right):
    with pytest.raises(ConfigError) as caught:
        find_task(wrong)
    assert right in caught.value.hint


@pytest.mark.parametrize(("resolution", "frames"), [(8, 5), (33, 5), (10**6, 5), (64, 1), (64, 10**9)])
def test_impossible_sizes_are_refused_with_a_hint(resolution, frames):
    with pytest.raises(ConfigError) as caught:
        check_size(TASKS["ks1d"], resolution, frames)
    assert caught.value.hint


def test_a_steady_task_has_no_frames():
    with pytest.raises(ConfigError):
        check_size(TASKS["darcy2d"], 32, 5)


def test_solvers_use_at_least_twice_the_stored_points():
    assert solver_points(128) == 256
    assert solver_points(48, 100) == 144
    assert solver_points(512, 100) == 1024


class TestDraws:
    def test_a_trajectory_draws_the_same_whatever_stands_next_to_it(self):
        many = Draws(3, "ks1d", "train", tuple(range(10)))
        alone = Draws(3, "ks1d", "train", (7,))
        for kind in ("uniform", "normal"):
            assert np.array_equal(getattr(many, kind)("a", 5)[7], getattr(alone, kind)("a", 5)[0])

    @pytest.mark.parametrize(
        "other",
        [
            Draws(4, "ks1d", "train", (0,)),
            Draws(3, "ns2d", "train", (0,)),
            Draws(3, "ks1d", "valid", (0,)),
            Draws(3, "ks1d", "train", (1,)),
        ],
    )
    def test_seed_task_split_and_number_each_change_the_draw(self, other):
        assert not np.array_equal(Draws(3, "ks1d", "train", (0,)).uniform("a", 3), other.uniform("a", 3))

    def test_distributions(self):
        draws = Draws(0, "x", "train", tuple(range(20_000)))
        normal = draws.normal("n", 1)
        assert abs(normal.mean()) < 0.03
        assert normal.std() == pytest.approx(1.0, abs=0.02)
        assert np.isfinite(normal).all()
        logs = np.log(draws.log_uniform("l", 1, 0.01, 0.1))
        assert logs.mean() == pytest.approx(np.log(0.01 * 0.1) / 2, abs=0.02)
        assert set(np.unique(draws.integers("i", 1, 2, 4))) == {2, 3, 4}

    def test_parameters_are_in_their_ranges_and_can_be_fixed(self):
        for task in TASKS.values():
            values = Draws(0, task.spec.name, "train", tuple(range(200))).parameters(task.spec)
            assert values.shape == (200, len(task.spec.parameters))
            for column, parameter in zip(values.T, task.spec.parameters, strict=True):
                assert parameter.minimum <= column.min()
                assert column.max() <= parameter.maximum
        spec = TASKS["reacdiff1d"].spec
        fixed = Draws(0, "reacdiff1d", "train", (0, 1), {"rho": 2.0}).parameters(spec)
        assert (fixed[:, 1] == 2.0).all()
        assert fixed[0, 0] != fixed[1, 0]

    @pytest.mark.parametrize("fixed", [{"gamma": 1.0}, {"nu": 5.0}, {"nu": float("nan")}])
    def test_a_wrong_fixed_parameter_is_refused(self, fixed):
        with pytest.raises(ConfigError):
            make_request("burgers1d", fixed=fixed)
