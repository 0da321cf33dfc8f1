"""A run starts from another model's weights, keeps them, and does not start from what was put in their place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import ups
from tests.support.mixture import MODELS, mixture_recipe, write_mixture
from ups.errors import DataChangedError

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def first_loss(run: ups.Run) -> float:
    return float(next(row["loss"] for row in run.rows() if "loss" in row))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("warm")


@pytest.fixture(scope="module")
def tasks(folder: Path) -> list[dict[str, Any]]:
    return write_mixture(folder)


def recipe(folder: Path, tasks: list[dict[str, Any]], name: str, *stages: dict[str, Any]) -> Path:
    document = mixture_recipe(folder / name, tasks, model=MODELS["multiscale"], stages=list(stages))
    document["tracking"] = {"log_interval_steps": 1}
    document["checkpoint"] = {"interval_steps": 3, "keep": 1}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture(scope="module")
def source(folder: Path, tasks: list[dict[str, Any]]) -> ups.Run:
    stage = {"type": "operator", "steps": 60, "loss": "nrmse", "optim": {"learning_rate": 5e-3}}
    return ups.fit(str(recipe(folder, tasks[:2], "source", stage)), progress=False)


def test_a_run_starts_where_another_ended_and_says_what_is_new(
    folder: Path, tasks: list[dict[str, Any]], source: ups.Run
) -> None:
    stage = {"type": "operator", "steps": 4, "loss": "nrmse", "optim": {"learning_rate": 1e-6}}
    cold = ups.fit(str(recipe(folder, tasks[:1], "cold", stage)), progress=False)
    warm = ups.fit(str(recipe(folder, tasks[:1], "warm", stage | {"start_from": str(source.path)})), progress=False)
    assert first_loss(warm) < 0.7 * first_loss(cold)
    listed = json.loads((warm.path / "start/0.json").read_text())
    assert listed["new"] == []
    other = ups.fit(
        str(recipe(folder, tasks, "other", stage | {"start_from": str(source.path / "bundle")})), progress=False
    )
    listed = json.loads((other.path / "start/0.json").read_text())
    assert 0 < listed["taken"] < listed["weights"]
    assert any("darcy2d" in row for pair in listed["rows"].values() for row in pair["new"])
    assert not any("wave1d" in row for pair in listed["rows"].values() for row in pair["new"])
    assert set(listed["like"]) == {"darcy2d"}
    assert listed["made_smaller"] == 0  # tasks that are known must be predicted as before


def test_what_a_run_starts_from_is_its_own_and_cannot_be_replaced(
    folder: Path, tasks: list[dict[str, Any]], source: ups.Run
) -> None:
    stage = {"type": "operator", "steps": 6, "loss": "nrmse"}
    checkpoint = max(source.path.glob("checkpoints/step_*"))
    path = recipe(folder, tasks[:1], "kept", stage | {"start_from": str(checkpoint)})
    run = ups.fit(str(path), progress=False)
    shutil.rmtree(run.path / "checkpoints")
    shutil.rmtree(run.path / "start/0")
    shutil.copytree(run.path / "bundle", run.path / "start/0")
    with pytest.raises(DataChangedError, match="start/0 is not what the run was started with"):
        ups.fit(str(path), progress=False)


def test_a_stage_starts_from_an_earlier_one_by_its_type(folder: Path, tasks: list[dict[str, Any]]) -> None:
    stages = [
        {"type": "linear", "steps": 4},
        {"type": "operator", "steps": 6, "loss": "nrmse", "optim": {"learning_rate": 5e-3}},
        {"type": "operator", "steps": 2, "loss": "nrmse", "start_from": "linear", "optim": {"learning_rate": 1e-6}},
    ]
    run = ups.fit(str(recipe(folder, tasks[:2], "named", *stages)), progress=False)
    losses = {row["step"]: row["loss"] for row in run.rows() if "loss" in row}
    assert losses[11] == pytest.approx(losses[5], rel=0.3)  # as after the linear stage, not as after the second
    assert losses[11] > 1.2 * losses[10]
