"""Runs that differ in their seeds only are one group, with a mean and a spread."""

from __future__ import annotations

import math

import pytest

from tests.unit.evaluation.test_comparison import scored
from ups.evaluation.comparison import Scored, compare
from ups.evaluation.report import write_comparison
from ups.library.scores import seed_groups, seed_table


def run(label: str, factor: float, seed: object, rate: float = 0.1, more: str = "") -> Scored:
    text = f"run: {{name: {label}, dir: /runs/{label}, seed: {seed}}}\nrate: {rate}\n{more}"
    one = scored(label, factor)
    return Scored(label, one.results, text)


def test_seeds_of_a_recipe_are_a_group_with_mean_and_spread() -> None:
    runs = [run("w-a-seed_0", 0.9, 0), run("w-a-seed_1", 0.92, 1), run("w-a-seed_10", 0.94, 10)]
    runs += [run("w-b-seed_0", 0.99, 0, 0.2, "checkpoint: {keep: 1}"), run("w-b-seed_1", 0.98, 1, 0.2)]
    groups = seed_groups(runs)
    assert groups == {"w-a": ["w-a-seed_0", "w-a-seed_1", "w-a-seed_10"], "w-b": ["w-b-seed_0", "w-b-seed_1"]}
    (task,), _ = compare(runs)
    means = task.over_seeds(groups, "trmse")
    assert list(means) == ["w-b", "w-a"], "the best first"
    values = [task.summary(label)["trmse"] for label in groups["w-b"]]
    assert means["w-b"]["num_seeds"] == 2
    assert means["w-b"]["mean"] == pytest.approx(sum(values) / 2)
    assert means["w-b"]["std"] == pytest.approx(abs(values[0] - values[1]) / math.sqrt(2))
    table = seed_table(task, groups)
    assert all("persistence" in line or "training mean" in line for line in table.splitlines()[1:])
    page = write_comparison([task], [], title="t", changes={}, seeds={task.task: table})
    assert f"{means['w-b']['mean']:.4g}" in page


def test_models_of_one_seed_or_without_a_recipe_are_no_group() -> None:
    assert seed_groups([run("a", 0.9, 0), run("b", 0.9, 0, 0.2)]) == {}
    assert seed_groups([run("a", 0.9, 0), run("bundle", 0.9, 0)]) == {}, "the same model twice"
    assert seed_groups([scored("a", 0.9), scored("b", 0.99)]) == {}
    assert seed_groups([Scored("a", {}), Scored("b", {})]) == {}


def test_odd_names_and_seeds_make_no_wrong_group() -> None:
    groups = seed_groups(
        [run("x-seed_0", 1, 0), run("x-seed_1", 1, 1), run("x-seed_2", 1, 2, 0.2), run("z", 1, "'[a'", 9)]
    )
    assert groups == {"x": ["x-seed_0", "x-seed_1"], "x-seed_2": ["x-seed_2"], "z": ["z"]}


def test_a_run_that_diverged_makes_the_mean_infinite() -> None:
    runs = [run("a-seed_0", math.inf, 0), run("a-seed_1", 0.9, 1)]
    (task,), _ = compare(runs)
    row = task.over_seeds(seed_groups(runs), "trmse")["a"]
    assert row["mean"] == math.inf
    assert math.isnan(row["std"])
