"""ups-bench v1: budgets, recipes and tables follow from models and tasks; stored rows are of these recipes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.protocol.page import geometric_mean, markdown, number, ratios_of
from benchmarks.protocol.recipes import (
    CPU_SECONDS,
    JOINT,
    KEPT,
    MODELS,
    OF_PLUGIN,
    OWN_RATES,
    PLUGIN,
    REFERENCE,
    SEEDS,
    entries,
    row,
)
from benchmarks.protocol.step_cost import with_steps
from benchmarks.protocol.trainings import Bench, costs_key
from tests.support.checkout import ROOT
from ups import registry
from ups.config.recipe import resolve
from ups.config.yaml_subset import dump
from ups.solvers.tasks import BENCH_TASKS, TASKS

STORED = ROOT / "benchmarks" / "results"
# Models of which stored rows may still be those of the tables in docs/benchmark.md, while they are made again.
EARLIER = ("fno+", "unet+", "ups-alone", "ups")


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The models that only the protocol has."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(registry, "_scripts", {})
    registry.use_script(PLUGIN)
    yield
    for name in OF_PLUGIN:
        registry.MODELS.unregister(name)


def budget(entry):
    return sum(stage["budget_seconds"] for stage in entry.recipe["stages"])


def test_a_model_of_one_task_gets_the_budget_and_a_model_of_all_tasks_the_sum():
    protocol = entries(list(MODELS), list(TASKS), "data")
    single, joint = [e for e in protocol if len(e.tasks) == 1], [e for e in protocol if e.model == "ups"]
    law = [entry for entry in single if entry.model == "law"]
    whole = [model for model in MODELS if model not in (REFERENCE, "law", *JOINT)]
    assert len(single) == sum(len(SEEDS.get(model, (0,))) * len(TASKS) for model in whole) + len(law)
    assert not any(TASKS[entry.tasks[0]].spec.steady for entry in law)
    assert all(budget(entry) == pytest.approx(CPU_SECONDS) for entry in single if entry not in law)
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
def test_every_recipe_is_sound_and_counts_the_cpu_time_of_one_thread(entry, tmp_path, plugin):
    path = tmp_path / "recipe.yaml"
    path.write_text(dump(entry.recipe))
    recipe = resolve(path).recipe
    assert {stage.budget_clock for stage in recipe.stages} == {"cpu"}
    assert recipe.engine.threads == 1
    assert [task.name for task in recipe.data.tasks] == list(entry.tasks)


def test_equal_windows_are_numbers_of_steps_in_which_a_task_has_the_windows_of_a_model_of_its_own():
    costs = json.loads((STORED / "costs.json").read_text())
    (joint,) = (entry for entry in entries(["ups=windows"], list(BENCH_TASKS), "../data"))
    assert with_steps(joint.recipe, [1.0, 1.0], 0.1)["stages"][-1]["steps"] == joint.recipe["stages"][-1]["steps"]
    for alone in entries(["ups-alone"], list(BENCH_TASKS), "../data"):
        if alone.seed or costs_key(alone) not in costs["costs"]:
            continue
        stages = costs["costs"][costs_key(alone)]["stages"]
        steps = with_steps(alone.recipe, stages, costs["yardstick_seconds"])["stages"][-1]["steps"]
        own = steps * alone.recipe["data"]["tasks"][0]["batch_size"]
        (here,) = (task["batch_size"] for task in joint.recipe["data"]["tasks"] if task["name"] == alone.tasks[0])
        assert joint.recipe["stages"][-1]["steps"] * here == pytest.approx(own, rel=0.2), alone.name


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
    assert "### Steps of training\n\n| task | fno | ups |\n|---|---|---|\n| ks1d | 5 | 5 |\n| darcy2d | - | - |" in page
    assert "### Memory" not in page
    assert "Identities: ks1d `0123456789abcdef`, darcy2d" in page


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


def test_every_stored_row_is_used_again_or_said_to_be_of_an_earlier_network(plugin: None) -> None:
    costs = json.loads((STORED / "costs.json").read_text())
    bench = Bench(list(MODELS), list(BENCH_TASKS), Path("data"), STORED, cpu_seconds=CPU_SECONDS, small=False)
    wanted = {entry.name: entry for entry in entries(list(MODELS), list(BENCH_TASKS), "../data")}
    page = (ROOT / "docs" / "benchmark.md").read_text()
    assert "are made again" in page
    files = sorted(STORED.glob("results/*.json"))
    known = ("fno", "unet", "fno+", "unet+", *EARLIER)
    kept = {name for name, one in wanted.items() if one.model in known and (one.seed == 0 or one.model == "ups")}
    assert kept <= {file.stem for file in files}
    for file in files:
        entry, stored = wanted[file.stem], json.loads(file.read_text())
        if costs_key(entry) not in costs["costs"]:
            assert entry.model in EARLIER, entry.name
            continue
        stages = costs["costs"][costs_key(entry)]["stages"]
        trained = replace(entry, recipe=with_steps(entry.recipe, stages, costs["yardstick_seconds"]))
        rows = bench.kept_rows(trained, stored["data"])
        assert rows is not None or entry.model in EARLIER, entry.name
        assert rows is None or [row["task"] for row in rows] == list(entry.tasks)
