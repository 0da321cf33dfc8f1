"""The comparison with APEBench: its metric, the matching of coefficients, trainings that are not repeated, the page."""

from __future__ import annotations

import ast
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.apebench import published
from benchmarks.apebench.__main__ import main
from benchmarks.apebench.metric import mean_nrmse, score
from benchmarks.apebench.page import markdown, read_rows
from benchmarks.apebench.recipes import LARGE, MODELS, OF_LARGE, SMALL, Entry, entries
from benchmarks.apebench.scenarios import (
    BATCH,
    NETWORKS,
    OPTIMIZER,
    SCENARIOS,
    SCORED_STEPS,
    UPDATES,
    same_coefficients,
)
from benchmarks.apebench.trainings import Trainings
from tests.support.checkout import ROOT
from ups.config.model import MultiscaleConfig
from ups.config.schema import Recipe
from ups.errors import DataError
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec
from ups.training.optim import learning_rate

TASK = TaskSpec("ks", (FieldSpec("u"),), (AxisSpec("x", "periodic", 1.0),), dt=1.0)


def meta_of(name: str, **changes: Any) -> dict[str, Any]:
    scenario = SCENARIOS[name]
    return {
        "scenario": scenario.key,
        "coefficients": dict(scenario.coefficients),
        "optimizer": OPTIMIZER,
        "batch_size": BATCH,
        "versions": {"apebench": "0.1.1"},
        **changes,
    }


def write_data(folder: Path, name: str, meta: dict[str, Any]) -> None:
    """Waves that move, in the shapes of APEBench."""
    draw, x = np.random.default_rng(0), np.arange(160) / 160
    arrays = {}
    for split, (count, frames) in {"train": (50, 51), "valid": (10, 101), "test": (30, 201)}.items():
        phase = draw.random((count, 1, 1, 1))
        moved = x - 0.01 * np.arange(frames)[:, None, None] + phase
        arrays[split] = np.sin(2 * np.pi * moved).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{name}.npz", meta=json.dumps(meta), **arrays)


def test_the_error_of_a_step_is_relative_to_the_true_frame() -> None:
    truth = np.array([[[[3.0, 4.0]], [[1.0, 1.0]]], [[[2.0, 0.0]], [[0.0, 2.0]]]])  # (2, 2, 1, 2)
    predicted = truth + np.array([[[[0.0, 5.0]], [[1.0, 1.0]]], [[[1.0, 0.0]], [[0.0, 0.0]]]])
    # Step 0: 5 / 5 and 1 / 2; step 1: 1 and 0.
    assert mean_nrmse(predicted, truth) == pytest.approx([0.75, 0.5])


def test_errors_of_channels_are_added() -> None:
    truth = np.array([[[[1.0, 1.0], [2.0, 2.0]]]])
    assert mean_nrmse(truth + 1.0, truth) == pytest.approx([1.0 + 0.5])


def test_rollouts_of_unequal_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of equal shape, got \(1, 2, 1, 4\)"):
        mean_nrmse(np.zeros((1, 2, 1, 4)) + np.zeros((3, 1, 1, 1)), np.ones((1, 2, 1, 4)))


def test_the_score_is_the_geometric_mean_over_the_first_steps() -> None:
    errors = [0.01] * (SCORED_STEPS // 2) + [1.0] * (SCORED_STEPS // 2) + [1e9] * 100
    assert score(errors) == pytest.approx(0.1)
    assert score([math.nan, *errors]) == math.inf
    with pytest.raises(ValueError, match="the score is of 100 steps, and the rollout has 3"):
        score([1.0, 1.0, 1.0])


def test_one_equation_is_the_same_numbers_under_the_same_names() -> None:
    assert same_coefficients(
        {"gammas": (0, 1.5), "convection_delta": -1}, {"convection_delta": -1.0, "gammas": [0, 1.5]}
    )
    assert not same_coefficients({"gammas": [0.0, 1.5]}, {"gammas": [0.0, 1.4]})
    assert not same_coefficients({"gammas": [0.0, 1.5]}, {"gammas": [0.0, 1.5], "deltas": [0.0]})


def test_a_published_figure_is_shown_only_for_its_own_equation() -> None:
    assert published.comparable("ks")["Res"] == 0.229
    assert published.comparable("kdv")["Dil"] == 0.066
    assert not published.comparable("ks", {"gammas": [0.0, 0.0, -2.0, 0.0, -15.0], "deltas": [0.0, 0.0, -6.0]})
    assert not published.comparable("ks_cons")  # the published rows have hyper-diffusion -15, 0.1.1 has -18
    assert not published.comparable("fisher")


@pytest.mark.parametrize(("settings", "expected"), [(SMALL, 30_000), (LARGE, 581_000)])
def test_the_network_has_as_many_parameters_as_theirs(settings: dict[str, Any], expected: int) -> None:
    from ups.models.multiscale import MultiscaleNetwork

    network = MultiscaleNetwork(MultiscaleConfig.model_validate(settings), [TASK], 1)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == pytest.approx(expected, rel=0.05)
    sizes = [size for _, size in NETWORKS.values()]
    assert settings is LARGE or min(sizes) < count < max(sizes)


def test_the_small_network_is_trained_as_the_protocol_says() -> None:
    recipe = Recipe.model_validate(Entry("ups", "ks", 3).recipe(Path("ks.zarr"), Path("run")))
    (stage,) = recipe.stages
    assert (stage.steps, recipe.data.batch_sizes, recipe.run.seed) == (10_000, [20], 3)
    assert (stage.loss, stage.noise, stage.augment, stage.unroll_steps) == ("mse", 0.0, False, 1)
    assert not recipe.engine.ema.enabled
    name, updates, schedule, first, peak, warmup = OPTIMIZER.split(";")
    assert (name, int(updates), schedule, float(first)) == ("adam", UPDATES, "warmup_cosine", 0.0)
    rates = [learning_rate(stage.optim, n / UPDATES) for n in (0, 1000, int(warmup), 6000, UPDATES)]
    assert rates == pytest.approx([0.0, 5e-4, float(peak), 5e-4, 0.0], abs=1e-12)
    assert (stage.optim.beta1, stage.optim.beta2, stage.optim.weight_decay) == (0.9, 0.999, 0.0)
    assert (stage.optim.clip_norm, stage.optim.clip_ratio) == (0.0, 0.0)


@pytest.mark.parametrize("model", list(MODELS))
def test_every_model_has_the_same_number_of_updates(model: str) -> None:
    recipe = Recipe.model_validate(Entry(model, "kdv", 0).recipe(Path("kdv.zarr"), Path("run")))
    assert sum(stage.steps or 0 for stage in recipe.stages) == UPDATES
    assert recipe.data.batch_sizes == [BATCH]


def test_scenarios_come_before_seeds_and_the_large_network_last() -> None:
    found = entries(MODELS, list(SCENARIOS))
    ours = [entry for entry in found if entry.model == "ups+training"]
    assert {entry.scenario for entry in ours[: len(SCENARIOS)]} == set(SCENARIOS)
    counts = {name: sum(entry.scenario == name for entry in ours) for name in SCENARIOS}
    assert counts == {"ks": 10, "kdv": 10, "burgers": 3, "ks_cons": 3, "fisher": 3, "disp": 3}
    assert [entry.scenario for entry in found[-len(OF_LARGE) :]] == list(OF_LARGE)
    assert len({entry.name for entry in found}) == len(found)


@pytest.mark.parametrize("name", ["generate.py", "networks.py", "scenarios.py", "metric.py"])
def test_what_runs_next_to_apebench_needs_nothing_of_ups(name: str) -> None:
    tree = ast.parse((ROOT / "benchmarks" / "apebench" / name).read_text())
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    neighbors = {f"benchmarks.apebench.{name}" for name in ("scenarios", "metric", "generate")}
    others = {module.split(".")[0] for module in modules if module not in neighbors}
    assert others <= {*sys.stdlib_module_names, "numpy", "apebench", "jax"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"coefficients": {"gammas": [0.0], "convection_delta": -1.5}}, "is of another equation: expected"),
        ({"batch_size": 10}, "has another batch size: expected 20, got 10"),
        ({"scenario": "diff_ks"}, "has another scenario: expected diff_burgers, got diff_ks"),
    ],
)
def test_other_data_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    write_data(tmp_path / "data", "burgers", meta_of("burgers", **changes))
    with pytest.raises(DataError, match=said):
        Trainings(tmp_path / "data", tmp_path / "out").finish(Entry("ups", "burgers", 0))


def test_missing_data_say_how_they_are_made(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ks\.npz does not exist") as caught:
        Trainings(tmp_path, tmp_path).finish(Entry("ups", "ks", 0))
    assert "generate.py" in caught.value.hint


@pytest.mark.processes
@pytest.mark.long
def test_a_finished_training_is_not_repeated_and_a_seed_gives_the_same_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data(tmp_path / "data", "disp", meta_of("disp"))
    entry = Entry("ups", "disp", 0)
    rows = [Trainings(tmp_path / "data", tmp_path / out, 4).finish(entry) for out in ("first", "second")]
    assert rows[0] is not None
    assert rows[1] is not None
    assert rows[0]["score"] == rows[1]["score"] > 0
    assert rows[0]["errors"] == rows[1]["errors"]
    assert (len(rows[0]["errors"]), rows[0]["updates"], rows[0]["seed"]) == (SCORED_STEPS, 4, 0)
    again = Trainings(tmp_path / "data", tmp_path / "first", 4)
    monkeypatch.setattr(Trainings, "_train", lambda *_: pytest.fail("trained again"))
    assert again.finish(entry) == rows[0]
    with pytest.raises(DataError, match="is of another recipe"):
        Trainings(tmp_path / "data", tmp_path / "first", 5).finish(entry)
    with pytest.raises(DataError, match="has rows of 4 updates, and the protocol has 10000"):
        read_rows(tmp_path / "first")


def row_of(model: str, scenario: str, seed: int, value: float | None) -> dict[str, Any]:
    return {
        "model": model,
        "scenario": scenario,
        "seed": seed,
        "score": value,
        "coefficients": dict(SCENARIOS[scenario].coefficients),
        "parameters": 31_295,
        "cpu_seconds": 100.0,
        "updates": UPDATES,
        "data": meta_of(scenario),
    }


def test_the_page_shows_published_figures_only_where_coefficients_agree(tmp_path: Path) -> None:
    rows = [row_of("ups", "ks", seed, value) for seed, value in enumerate((0.1, 0.2, 0.3))]
    rows += [row_of("ups", "fisher", 0, None), row_of("ups+training", "kdv", 0, 0.07)]
    networks = [row_of("Conv", "fisher", 0, 0.5)]
    page = markdown(rows, networks)
    assert "| ks | 0.2 (0.1 to 0.3) | - | 0.313 | 0.229 | 0.421 | 0.279 | 1.03 |" in page
    assert "| kdv | - | 0.07 | 0.14 | 0.884 | 0.084 | 0.066 | 0.227 |" in page
    assert "`ups` is better than the best of them on 1 of 1" in page
    assert "`ups+training` is better than the best of them on 0 of 1" in page
    assert "| fisher | blew up | - | 0.5 | - | - | - | - |" in page
    assert "No published figure is shown for fisher" in page
    changed = [row | {"coefficients": {"gammas": [1.0], "deltas": [1.0]}} for row in rows if row["scenario"] == "ks"]
    assert "0.313" not in markdown(changed, [])
    assert page.count("## Limits") == 1


def test_a_page_without_rows_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no rows: there is nothing to show yet"):
        main(["page", "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())
