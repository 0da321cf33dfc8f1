"""The recipe of the doctor's exact checks: nothing in it follows a clock."""

from __future__ import annotations

from ups.config.schema import Recipe
from ups.doctor.probes.parts import exact


def test_budgets_of_seconds_become_steps_and_steps_stay() -> None:
    stages = [
        {"type": "operator", "budget_seconds": 60, "budget_clock": "cpu"},
        {"type": "operator", "budget_seconds": 60},
        {"type": "operator", "steps": 7},
    ]
    data = {"tasks": [{"name": "line", "path": "line.zarr"}]}
    recipe = exact(Recipe.model_validate({"run": {"name": "r"}, "data": data, "stages": stages}), 2)
    assert [(s.steps, s.budget_seconds, s.counts_seconds) for s in recipe.stages] == [
        (1000, None, False),
        (1000, None, False),
        (7, None, False),
    ]


def test_a_few_trajectories_are_scored_and_not_as_many_on_each_rank() -> None:
    data = {"tasks": [{"name": "line", "path": "line.zarr"}]}
    document = {"run": {"name": "r"}, "data": data, "stages": [{"type": "operator", "steps": 7}]}
    for most, ranks, expected in ((64, 2, 9), (5, 2, 5), (64, 3, 13)):
        recipe = Recipe.model_validate({**document, "evaluate": {"max_trajectories": most}})
        assert exact(recipe, ranks).evaluate.max_trajectories == expected
