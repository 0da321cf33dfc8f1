"""The solver's error and cost are next to the model's, and the sentence says what the numbers say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.memory_reader import MemoryReader
from ups.evaluation.cost import cpu_seconds, solver_cost, verdict
from ups.evaluation.rollout import RolloutPlan
from ups.formats.store_writer import StoreWriter
from ups.formats.zarr_store import StoreReader
from ups.models.stepper import persistence
from ups.solvers.problem import SPLITS, Draws
from ups.solvers.tasks import TASKS

pytest.importorskip("scipy")


def store(path: Path, name: str, num_frames: int) -> StoreReader:
    from ups.solvers.problem import cell_centers

    task = TASKS[name]
    centers = [cell_centers(16, axis.extent) for axis in task.spec.axes]
    with StoreWriter(path, task.spec, centers, num_frames) as writer:
        for split in SPLITS:
            solution = task.solve(Draws(0, name, split, (0, 1, 2)), 16, num_frames)
            for i in range(3):
                writer.append(split, **{k: v[i] for k, v in solution.arrays().items() if v.shape[1]})
    return StoreReader(path)


def test_a_transient_task_is_solved_from_its_stored_frames(tmp_path: Path) -> None:
    reader = store(tmp_path / "a.zarr", "diffreact2d", 4)
    plan = RolloutPlan.whole(reader, context_frames=2)
    cost = solver_cost(reader, plan, persistence, 0.05, batch_size=2)
    errors = {(s["points"], s["substeps"]): s["error"] for s in cost["settings"]}
    assert cost["num_trajectories"] == 3
    assert errors[(16, 4)] < errors[(8, 4)] < errors[(4, 4)]
    assert errors[(64, 4)] < 0.05
    assert all(s["milliseconds"] > 0 for s in cost["settings"])
    assert cost["cheapest"]["error"] <= 0.05
    assert "times faster" in cost["sentence"], "copying a frame costs less than any solver"


def test_a_steady_task_is_solved_from_its_medium(tmp_path: Path) -> None:
    reader = store(tmp_path / "a.zarr", "darcy2d", 0)

    def zero(batch):
        return torch.zeros_like(batch.static)

    cost = solver_cost(reader, RolloutPlan.whole(reader, 1), zero, 1.0)
    assert cost["settings"][0]["points"] == 4
    assert cost["settings"][-1]["error"] < 0.1
    assert "per sample" in cost["sentence"]


def test_grids_that_would_take_too_long_are_left_out_and_named(tmp_path: Path) -> None:
    reader = store(tmp_path / "a.zarr", "diffreact2d", 4)
    cost = solver_cost(reader, RolloutPlan.whole(reader, 1), persistence, 1e-9, budget_seconds=0.0)
    assert [s["points"] for s in cost["settings"]] == [4] * 3, "the first grid is always tried"
    assert cost["left_out"] == [6, 8, 12, 16, 32, 64]
    assert cost["cheapest"] is None


def test_a_task_without_a_solver_says_why():
    reader = MemoryReader()
    cost = solver_cost(reader, RolloutPlan.whole(reader, 1), persistence, 0.1)
    assert cost == {
        "reason": "no solver can start from a frame of this task: it was not made by one of our solvers",
    }


def settings(*rows: tuple[float, float]) -> list[dict[str, float]]:
    return [{"points": 8 * i, "substeps": 2, "error": e, "milliseconds": c} for i, (e, c) in enumerate(rows, 1)]


def test_the_cheapest_setting_that_is_as_accurate_is_the_measure():
    tried = settings((0.5, 0.1), (0.1, 4.0), (0.05, 2.0), (0.01, 9.0))
    cost = verdict(tried, {"error": 0.1, "milliseconds": 0.5}, steady=False)
    assert cost["cheapest"] == tried[2]
    assert cost["speedup"] == 4.0
    assert "(24 points per axis, 2 steps per frame, error 0.05) costs 2 ms per step and trajectory" in cost["sentence"]
    assert cost["sentence"].endswith("the model costs 0.5 ms: 4 times faster.")
    slower = verdict(tried, {"error": 0.1, "milliseconds": 8.0}, steady=False)
    assert slower["sentence"].endswith("the model costs 8 ms: 4 times slower.")


def test_a_model_that_no_setting_reaches_is_said_so_and_a_blow_up_reaches_nothing():
    tried = settings((0.5, 0.1), (float("inf"), 0.01))
    cost = verdict(tried, {"error": 0.1, "milliseconds": 0.5}, steady=False)
    assert cost["cheapest"] is None
    assert cost["sentence"].startswith("None of 2 solver settings is as accurate as the model (error 0.1)")
    failed = verdict(tried[:1], {"error": float("inf"), "milliseconds": 0.5}, steady=False)
    assert failed["cheapest"] == tried[0]


def test_time_is_that_of_the_processor_not_of_the_clock():
    import time

    assert cpu_seconds(lambda: time.sleep(0.02)) < 0.01
