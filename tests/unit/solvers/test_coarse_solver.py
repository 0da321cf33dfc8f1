"""A solver that starts from a stored frame continues as the data does, and coarser is worse."""

from __future__ import annotations

import numpy as np
import pytest

from ups.errors import MissingExtraError
from ups.formats.base import Source
from ups.solvers.coarse_solver import RESTARTS, Given, Setting, _regrid, own_task
from ups.solvers.problem import Draws, require_solvers
from ups.solvers.tasks import TASKS
from ups.spec.task import TaskSpec

pytest.importorskip("exponax")

# task, stored points, solver setting that follows the data, its error, and a coarse one with its error
CASES = {
    "advection1d": (32, Setting(32), 1e-5, Setting(6), 0.1),
    "burgers1d": (128, Setting(1024, 103), 1e-6, Setting(32, 4), 0.05),
    "ks1d": (128, Setting(256, 20), 1e-6, Setting(32, 20), 0.5),
    "reacdiff1d": (64, Setting(256, 20), 1e-3, Setting(16, 20), 0.01),
    "euler1d": (128, Setting(512), 0.02, Setting(32), 0.04),
    "ns2d": (32, Setting(64, 12), 1e-3, Setting(16, 3), 0.05),
    "swe2d": (32, Setting(64), 0.01, Setting(8), 0.04),
    "diffreact2d": (32, Setting(96, 4), 2e-3, Setting(8, 4), 0.2),
    "darcy2d": (32, Setting(128, 24), 1e-6, Setting(8, 16), 0.02),
}


def error_of(solved: np.ndarray, truth: np.ndarray) -> float:
    assert solved.shape == truth.shape
    return float(np.sqrt(((solved - truth) ** 2).mean() / (truth**2).mean()))


def test_every_task_can_be_started_again():
    assert set(CASES) == set(RESTARTS) == set(TASKS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_a_solver_started_from_a_stored_frame_follows_the_data(name):
    resolution, fine, small, coarse, large = CASES[name]
    task = TASKS[name]
    steady = task.spec.steady
    solution = task.solve(Draws(0, name, "test", (0, 1)), resolution, 0 if steady else 4)
    start = np.zeros((2, 0, resolution, resolution)) if steady else solution.state[:, 0].astype(np.float64)
    truth = solution.target[:, None] if steady else solution.state[:, 1:]
    inputs = Given(start, solution.static.astype(np.float64), solution.parameters.astype(np.float64))
    run = RESTARTS[task.spec.name].run
    steps = 1 if steady else 3  # with the given frame as many as were solved for, so that nothing is compiled twice
    assert error_of(run(task.spec, inputs, task.spec.dt, steps, fine), truth) < small
    assert error_of(run(task.spec, inputs, task.spec.dt, steps, coarse), truth) > large


@pytest.mark.parametrize("name", TASKS)
def test_settings_begin_coarse_and_with_large_steps(name):
    task = TASKS[name]
    grids = RESTARTS[task.spec.name].settings(task.resolution, task.spec.dt)
    points = [grid[0].points for grid in grids]
    assert points == sorted(set(points))
    assert points[0] <= task.resolution // 4
    assert points[-1] >= 2 * task.resolution
    for grid in grids:
        assert [s.substeps for s in grid] == sorted({s.substeps for s in grid})


def test_a_missing_library_is_named_before_anything_is_scored(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "exponax" else object())
    with pytest.raises(MissingExtraError, match="exponax"):
        require_solvers()


def test_data_of_others_has_no_solver_and_says_so():
    from tests.support.memory_reader import MemoryReader

    task, reason = own_task(MemoryReader())
    assert task is None
    assert "not made by one of our solvers" in reason


def test_our_data_is_known_under_any_name_and_time_stride_but_not_thinned_in_space():
    from dataclasses import replace

    from tests.support.memory_reader import MemoryReader
    from ups.formats.base import GridReader, Subsampling

    class Named(MemoryReader):
        def __init__(self, task: TaskSpec, subsampling: Subsampling) -> None:
            axis = np.arange(16) / 16
            GridReader.__init__(self, Source(task, (axis,), 9, {"train": 1, "test": 1}), subsampling)

    spec = replace(TASKS["burgers1d"].spec, name="mine")
    assert own_task(Named(spec, Subsampling(time_stride=2)))[0] is TASKS["burgers1d"]
    task, reason = own_task(Named(spec, Subsampling(space_stride=2)))
    assert task is None
    assert "space_stride" in reason


def test_settings_near_the_cheapest_are_coarser_faster_or_in_float32():
    near = RESTARTS["burgers1d"].cheaper(Setting(128, 4))
    assert Setting(112, 4) in near
    assert Setting(128, 3) in near
    assert Setting(128, 4, single=True) in near
    assert Setting(128, 8, order=2) in near
    assert RESTARTS["advection1d"].cheaper(Setting(4)) == [], "nothing is below the smallest grid"
    assert RESTARTS["swe2d"].cheaper(Setting(32)) == [Setting(28), Setting(32, single=True)]


@pytest.mark.parametrize("name", ["euler1d", "diffreact2d"])
def test_float32_is_as_accurate_as_a_model_needs(name):
    task = TASKS[name]
    solution = task.solve(Draws(0, name, "test", (0, 1)), 32, 3)
    given = (solution.state[:, 0], solution.static, solution.parameters)
    inputs = Given(*(values.astype(np.float64) for values in given))
    frames = [
        RESTARTS[name].run(task.spec, inputs, task.spec.dt, 2, Setting(24, 2, single=single))
        for single in (False, True)
    ]
    assert 0 < error_of(frames[1], frames[0]) < 1e-4


@pytest.mark.parametrize("wanted", [8, 24, 40, 48])
def test_another_grid_keeps_integrals(wanted):
    averages = np.random.default_rng(0).normal(size=(2, 32, 32))
    assert np.allclose(_regrid(averages, wanted, 2).mean(axis=(1, 2)), averages.mean(axis=(1, 2)), atol=1e-13)
