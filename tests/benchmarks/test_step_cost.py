"""Budgets of CPU-seconds as numbers of steps."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.protocol import step_cost
from benchmarks.protocol.recipes import entries
from ups.solvers.request import make_request
from ups.solvers.sweep import generate


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    data = tmp_path_factory.mktemp("data")
    generate([make_request("advection1d", trajectories=(16, 2, 2))], data, num_processes=1)
    return entries(["ups-alone"], ["advection1d"], str(data), 100.0)[0].recipe


@pytest.mark.timeout(600)
def test_a_step_of_more_windows_costs_more(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_cost, "STEPS", 9)
    recipe["data"]["tasks"][0]["batch_size"] = 2
    few = step_cost.step_costs(recipe)
    recipe["data"]["tasks"][0]["batch_size"] = 64
    many = step_cost.step_costs(recipe)
    assert len(few) == len(recipe["stages"]) == 2
    assert few[1] > few[0] > 0  # the linear part alone is cheap
    assert many[1] > 1.5 * few[1]


def test_a_budget_pays_for_as_many_steps_as_it_can(recipe: dict[str, Any]) -> None:
    budgeted = step_cost.with_steps(recipe, [2.0, 50.0], 0.01)
    assert [stage["steps"] for stage in budgeted["stages"]] == [50, 198]  # 1 and 99 CPU-seconds
    assert not any("budget_seconds" in stage for stage in budgeted["stages"])
    assert all("budget_seconds" in stage for stage in recipe["stages"])  # a copy was changed


def test_a_pass_that_was_disturbed_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = step_cost._Turns()
    turns.steps = [10.0] * step_cost.WARM_UP_STEPS + [2.0, 2.0, 2.0, 9.0]
    turns.sticks = [1.0] * len(turns.steps) + [1.0]
    assert turns.cost() == 2.0
    # A machine at half its speed: steps and sticks take twice as long.
    turns.steps = [2 * s for s in turns.steps]
    turns.sticks = [2 * s for s in turns.sticks]
    assert turns.cost() == 2.0


def test_passes_of_the_yardstick_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_cost, "PASSES", 8)
    assert 0 < step_cost.yardstick_seconds() < 5


def test_one_bad_round_of_three_does_not_count() -> None:
    assert step_cost.middle([[1.0, 2.0], [9.0, 2.2], [1.1, 0.3]]) == [1.1, 2.0]
