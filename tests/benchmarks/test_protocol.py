"""ups-bench v1: budgets, recipes and tables follow from the asked models and tasks."""

from __future__ import annotations

import math

import pytest

from benchmarks.protocol.page import geometric_mean, markdown, number, ratios_of
from benchmarks.protocol.recipes import CPU_SECONDS, KEPT, MODELS, OWN_RATES, REFERENCE, SEEDS, entries, row
from ups.config.recipe import resolve
from ups.config.yaml_subset import dump
from ups.solvers.tasks import TASKS


def budget(entry):
    return sum(stage["budget_seconds"] for stage in entry.recipe["stages"])


def test_a_model_of_one_task_gets_the_budget_and_a_model_of_all_tasks_the_sum():
    protocol = entries(list(MODELS), list(TASKS), "data")
    single, joint = [e for e in protocol if len(e.tasks) == 1], [e for e in protocol if len(e.tasks) > 1]
    assert len(single) == 5 * len(TASKS)
    assert [budget(entry) for entry in single] == pytest.approx([CPU_SECONDS] * len(single))
    assert [budget(entry) for entry in joint] == pytest.approx([CPU_SECONDS * len(TASKS)] * len(SEEDS["ups"]))
    assert [entry.recipe["run"]["seed"] for entry in joint] == list(SEEDS["ups"])
    assert sum(budget(e) for e in protocol if e.model == "fno") == pytest.approx(budget(joint[0]))


@pytest.mark.parametrize(("baseline", "windows"), [("fno", 32), ("unet", 16)])
def test_the_baselines_with_our_training_differ_from_ours_in_the_network_and_what_was_tuned(baseline, windows):
    by_name = {e.name: e.recipe for e in entries(list(MODELS), list(TASKS), "data")}
    theirs, ours = by_name[f"{baseline}-plus-ks1d"]["stages"][-1], by_name["ups-alone-ks1d"]["stages"][-1]
    assert theirs.keys() == ours.keys()
    for key in ("loss", "balance", "noise"):
        assert theirs[key] == ours[key]
    tuned = {name: 2 * rate for name, rate in OWN_RATES.items()} | {"weight_decay": 0.0}
    assert theirs["optim"] == ours["optim"] | tuned
    assert by_name[f"{baseline}-plus-ks1d"]["data"]["tasks"][0]["batch_size"] == windows
    conserving = by_name[f"{baseline}-ks1d"]["model"] | {"conserve": True}
    assert by_name[f"{baseline}-plus-ks1d"]["model"] == conserving


@pytest.mark.parametrize("entry", entries(list(MODELS), list(TASKS), "data"), ids=lambda e: e.name)
def test_every_recipe_is_sound_and_counts_the_cpu_time_of_one_thread(entry, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(dump(entry.recipe))
    recipe = resolve(path).recipe
    assert {stage.budget_clock for stage in recipe.stages} == {"cpu"}
    assert recipe.engine.threads == 1
    assert [task.name for task in recipe.data.tasks] == list(entry.tasks)


def test_names_are_unique_because_they_are_directories():
    protocol = entries(list(MODELS), list(TASKS), "data")
    assert len({entry.name for entry in protocol}) == len(protocol)


def document(*rows):
    return {
        "protocol": "ups-bench v1",
        "command": "python -m benchmarks.protocol",
        "cpu_seconds_per_task": 240.0,
        "machine": {"cpu": "one"},
        "data": dict.fromkeys(TASKS, "0123456789abcdef0123"),
        "failures": [],
        "rows": list(rows),
    }


def scored(model, value, task="ks1d", **more):
    return row(model, task, dict.fromkeys(KEPT, value), **more)


def test_the_best_of_a_line_is_bold_and_a_gap_stays_a_gap():
    trained = {"parameters": 10, "steps": 5, "cpu_seconds": 239.6}
    page = markdown(
        document(
            scored(REFERENCE, 0.2),
            scored("fno", 0.1, **trained),
            scored("ups", math.inf, **trained),
            scored(REFERENCE, 0.3, "darcy2d"),
        )
    )
    assert "| ks1d | 0.2 | **0.1** | blew up |" in page
    assert "| darcy2d | **0.3** | - | - |" in page
    assert "| fno | ks1d | 0 | 10 | - | - | 5 | - | 240 | - |" in page
    assert "| ks1d | `0123456789abcdef` |" in page


def test_numbers_have_three_digits():
    assert [number(v) for v in (0.0, 0.012345, 1.5e-7, 123456.0, math.nan)] == [
        "0",
        "0.0123",
        "1.5e-07",
        "1.2e+05",
        "blew up",
    ]


def test_several_seeds_stand_with_their_median_and_spread_and_ratios_with_their_geometric_mean():
    trained = {"parameters": 10, "steps": 5, "cpu_seconds": 239.6}
    rows = [scored("ups", v, seed=seed, **trained) for seed, v in enumerate((0.3, 0.1, 0.2))]
    rows += [scored("fno", 0.8, **trained), scored("unet", 0.4, **trained)]
    rows += [scored("ups", 0.2, "darcy2d", **trained), scored("fno", 0.1, "darcy2d", **trained)]
    page = markdown(document(*rows))
    assert "| ks1d | 0.8 | 0.4 | **0.2** (0.1 to 0.3) |" in page
    assert ratios_of(rows, ["ks1d", "darcy2d"], "ups", ("fno", "unet"), "trmse") == {"ks1d": 0.5, "darcy2d": 2.0}
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert "| ks1d | 0.5 |" in page
    assert "| geometric mean | 1 |" in page


@pytest.mark.parametrize("other", [math.inf, math.nan])
def test_a_model_that_blew_up_leaves_no_geometric_mean(other: float):
    trained = {"parameters": 10, "steps": 5, "cpu_seconds": 239.6}
    rows = [scored("ups", 0.2, **trained), scored("ups", 0.2, "darcy2d", **trained)]
    rows += [scored("fno", other, **trained), scored("fno", 0.1, "darcy2d", **trained)]
    page = markdown(document(*rows))
    assert "| geometric mean | - |" in page
