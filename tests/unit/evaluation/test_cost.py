"""The cheapest solver that is as accurate is next to the model, and the sentence says what the numbers say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.memory_reader import MemoryReader
from ups.evaluation import cost
from ups.evaluation.cost import break_even, cpu_seconds, sentence
from ups.evaluation.rollout import RolloutPlan
from ups.formats.held_out import HeldOutElsewhere
from ups.formats.store_writer import StoreWriter
from ups.formats.zarr_store import StoreReader
from ups.models.stepper import persistence
from ups.solvers.problem import SPLITS, Draws, cell_centers
from ups.solvers.tasks import TASKS

pytest.importorskip("exponax")


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "BLOCKS", 1)
    monkeypatch.setattr(cost, "CANDIDATES", 1)


def store(path: Path, name: str, num_frames: int) -> StoreReader:
    task = TASKS[name]
    centers = [cell_centers(16, axis.extent) for axis in task.spec.axes]
    with StoreWriter(path, task.spec, centers, num_frames) as writer:
        for split in SPLITS:
            solution = task.solve(Draws(0, name, split, (0, 1, 2)), 16, num_frames)
            for i in range(3):
                writer.append(split, **{k: v[i] for k, v in solution.arrays().items() if v.shape[1]})
    return StoreReader(path)


def test_a_model_that_copies_frames_is_matched_on_both_kinds_of_error(tmp_path: Path) -> None:
    own = store(tmp_path / "a.zarr", "diffreact2d", 4)
    reader = HeldOutElsewhere(own, own)  # as of a bundle whose data is named
    plan = RolloutPlan.whole(reader, context_frames=1)
    found = break_even(reader, plan, persistence, training_seconds=100.0)
    assert (found["num_trajectories"], found["num_steps"]) == (3, 3)
    assert set(found["matched"]) == {cost.INSTANT, cost.AVERAGED}
    for name, by_batch in found["matched"].items():
        assert set(by_batch) == {"1", "3"}
        for one in by_batch.values():
            key = cost.TARGETS[name]
            assert one["setting"][key] <= found["model"][key]
            gain = 1e-3 * 3 * one["solver"] * (1 - one["ratio"])
            # On a busy machine even copying a frame may seem to cost more than a solver on so few points.
            solves = pytest.approx((found["data_seconds"] + 100.0) / gain) if gain > 0 else None
            assert one["num_solves"] == solves
    assert "Break-even: " in found["sentence"]
    assert any(s["single"] for s in found["settings"]), "settings near the cheapest are tried"


def test_a_steady_task_is_solved_from_its_medium(tmp_path: Path) -> None:
    reader = store(tmp_path / "a.zarr", "darcy2d", 0)
    found = break_even(reader, RolloutPlan.whole(reader, 1), lambda batch: torch.zeros_like(batch.static))
    assert set(found["matched"]) == {cost.INSTANT}
    assert found["settings"][0]["points"] == 4
    assert "per sample" in found["sentence"]
    assert "training not counted" in found["sentence"]


def test_grids_that_would_take_too_long_are_left_out_and_an_error_that_none_reaches_is_named(tmp_path: Path) -> None:
    reader = store(tmp_path / "a.zarr", "diffreact2d", 4)
    plan = RolloutPlan.whole(reader, 1)
    found = break_even(reader, plan, lambda batch: batch.state[:, 0] * 0.9999, budget_seconds=0.0)
    assert {s["points"] for s in found["settings"]} == {4}, "the first grid is always tried"
    assert found["left_out"] == [6, 8, 10, 12, 16, 20, 24, 32, 64]
    assert "no solver setting reaches" in found["sentence"]
    assert all(one["num_solves"] is None for one in found["matched"][cost.INSTANT].values())


def test_data_of_others_needs_the_cost_of_a_solve() -> None:
    reader = MemoryReader()
    plan = RolloutPlan.whole(reader, 1)
    assert "state what a solve costs" in break_even(reader, plan, persistence)["reason"]
    found = break_even(reader, plan, persistence, solve_seconds=10.0, training_seconds=50.0)
    one = found["matched"][cost.INSTANT]["1"]
    solves = 10.0 * (reader.splits["train"] + reader.splits["valid"]) + 50.0
    assert one["num_solves"] == pytest.approx(solves / 10.0, rel=0.01)
    assert "as stated" in found["sentence"]
    free = break_even(reader, plan, persistence, solve_seconds=1e-9)
    assert free["sentence"].startswith("Break-even: never (5 at once: model")


def result(ratio: float, **changes: Any) -> dict[str, Any]:
    setting = {"points": 96, "substeps": 2, "order": 2, "single": True, "error": 0.001}
    one = {"model": ratio * 0.5, "solver": 0.5, "ratio": ratio, "setting": setting}
    one["num_solves"] = cost._num_solves(one, 300.0, 40)
    return {
        "steady": False,
        "model": {"error": 0.002, "error_of_average": 0.001},
        "matched": {cost.INSTANT: {"32": one}},
        "data_seconds": 60.0,
        "training_seconds": 240.0,
        "trained": True,
        "stated": False,
        "judged": True,
        "steal": 0.0,
    } | changes


def test_a_model_that_costs_more_than_the_solver_never_pays() -> None:
    text = sentence(result(2.0))
    assert text.startswith(
        "Break-even: never (32 at once: model 1 ms per step and trajectory, solver 0.5 ms with 96 points"
    )
    assert "2 steps per frame, float32, error 0.001)." in text
    assert text.endswith("data 60 s, training 240 s.")


def test_the_number_of_solves_pays_back_what_was_spent_before() -> None:
    assert sentence(result(0.5)).startswith("Break-even: after 30,000 solves (32 at once:")
    assert "a guess" in sentence(result(0.5, trained=False))


def test_times_on_a_machine_that_others_use_are_not_judged() -> None:
    assert sentence(result(0.5, judged=False, steal=0.3)).endswith("other machines took 30 % of the processors.")


def test_time_is_that_of_the_processor_not_of_the_clock() -> None:
    import time

    assert cpu_seconds(lambda: time.sleep(0.02)) < 0.01
