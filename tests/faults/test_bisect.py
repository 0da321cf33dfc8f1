"""`ups doctor RECIPE --bisect` names the part that a planted fault needs. Nothing in it knows what was planted.

A plant is a Python file that breaks a part of the product inside the processes of the trials, or a file of data that is
damaged on the disk; the search gets a recipe and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
import zarr

from tests.support.faults.doctor_data import write_data, write_recipe
from tests.support.faults.planted import planted, run_forked
from tests.support.faults.supervised import PATIENCE
from ups.config.recipe import resolve
from ups.doctor import examine
from ups.doctor.bisect import Bisection, Finding, located, next_step, place_of, to_json, verdict
from ups.doctor.trials import Trials, Variant

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of two tasks."""
    folder = tmp_path_factory.mktemp("bisect")
    write_data(folder)
    return folder


def recipe_of(data: Path, folder: Path, **engine: Any) -> Path:
    """The recipe of both tasks with a deeper model, two loader workers and other settings of the engine."""
    document = yaml.safe_load(write_recipe(data).read_text())
    document["run"]["dir"] = str(folder / "run")
    document["model"]["depth"] = 2
    document["engine"] = engine
    document["data"]["loader"] = {"workers": 2}
    path = folder / "failing.yaml"
    path.write_text(json.dumps(document))
    return path


def search(recipe: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, plant: str = "", **options: Any) -> Finding:
    """The whole search; its processes are forked from one that has imported torch, which saves minutes."""
    monkeypatch.setattr(examine, "run_program", run_forked)
    trials = Trials(folder / "trials", folder / "run", planted(plant), **options)
    return Bisection(trials, Variant(resolve(recipe).recipe, 2, steps=2), 500.0).run()


def test_a_layer_that_gives_nan_is_named(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = search(recipe_of(prepared, tmp_path), tmp_path, monkeypatch, "nan_layer")
    assert finding.needs == [], "no strategy, task, worker or precision makes it appear"
    name = "stepper.networks.operator.operator.blocks.1"
    culprit = place_of(finding)["culprit"]
    assert (culprit["module"], culprit["unit"], culprit["network"]) == (f"{name}.mlp_out", name, "operator")
    assert culprit["inputs_finite"]
    assert verdict(finding) == f"the failure needs: the model: {name}.mlp_out"
    assert finding.failure is not None
    assert finding.failure.cause == "not_finite"
    smallest = resolve(str(finding.smallest)).recipe
    assert (finding.ranks, len(smallest.data.tasks), smallest.data.loader.workers) == (1, 1, 0)


def test_a_value_that_is_not_finite_is_found_by_task_and_trajectory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_data(tmp_path)
    store: Any = zarr.open_group(str(tmp_path / "wave.zarr"), mode="r+")
    store["train/state"][4, 2] = np.nan
    finding = search(recipe_of(tmp_path, tmp_path), tmp_path, monkeypatch)
    assert located(finding) == ["task wave"]
    failed = finding.failure and finding.failure.failed
    assert failed is not None
    assert "trajectory 4" in failed.says
    assert failed.exit_code == 4


@pytest.mark.long
def test_a_file_that_cannot_be_read_is_found_by_task_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_data(tmp_path)
    for chunk in (tmp_path / "still.zarr" / "train" / "static" / "c").rglob("*"):
        if chunk.is_file():
            chunk.write_bytes(chunk.read_bytes()[: chunk.stat().st_size // 2])
    finding = search(recipe_of(tmp_path, tmp_path), tmp_path, monkeypatch)
    assert located(finding) == ["task still"]
    failed = finding.failure and finding.failure.failed
    assert failed is not None
    assert "still.zarr" in failed.says


@pytest.mark.long
def test_a_window_whose_loss_is_not_finite_is_found_among_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite when it was measured, and not anymore when it is trained on: only the losses of windows tell."""
    write_data(tmp_path)
    finding = search(recipe_of(tmp_path, tmp_path), tmp_path, monkeypatch, "poisoned_window")
    assert finding.kind == "rehearsal", "opening and measuring was well"
    assert located(finding) == ["task still"]
    windows = place_of(finding)["windows"]
    assert (windows["task"], windows["trajectories"]) == ("still", [3])


def test_a_fault_of_fsdp_alone_is_named(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = search(recipe_of(prepared, tmp_path, strategy="fsdp"), tmp_path, monkeypatch, "broken_shards")
    assert verdict(finding) == "the failure needs: strategy fsdp"
    assert "ddp on 2 ranks" in [outcome.label for outcome in finding.outcomes if outcome.ok]
    assert place_of(finding)["culprit"]["module"] == "stepper.networks.operator.operator.blocks.1"


@pytest.mark.long
def test_a_fault_of_bfloat16_alone_is_named(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = search(recipe_of(prepared, tmp_path, precision="bfloat16"), tmp_path, monkeypatch, "rounded_away")
    assert verdict(finding) == "the failure needs: precision bfloat16"
    assert place_of(finding)["culprit"]["module"] == "stepper.networks.operator.operator.blocks.0"
    assert "engine.precision=float32" in next_step(finding, "recipe.yaml")


def test_a_loader_worker_that_dies_is_named(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = search(recipe_of(prepared, tmp_path), tmp_path, monkeypatch, "dying_worker")
    assert verdict(finding) == "the failure needs: loader workers (data.loader.workers: 2)"
    assert finding.failure is not None
    assert finding.failure.cause == "worker_killed(SIGKILL)"


@pytest.mark.long
def test_a_rank_that_stands_still_is_a_finding_with_its_module(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = search(
        recipe_of(prepared, tmp_path), tmp_path, monkeypatch, "standing_still", still_seconds=15.0 * PATIENCE
    )
    assert finding.failure is not None
    assert finding.failure.cause == "stalled"
    assert located(finding) == ["strategy ddp on 2 ranks"]
    assert place_of(finding)["culprit"]["module"] == "stepper.networks.operator.decoder"


@pytest.mark.long
@pytest.mark.parametrize(("plant", "kind"), [("bypassed_ddp", "rehearsal"), ("scaled_learning_rate", "parity")])
def test_ranks_that_train_otherwise_than_one_are_found_though_every_number_is_finite(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: str, kind: str
) -> None:
    """Gradients that are not averaged are seen in the steps; a wrong learning rate only by comparison with one rank."""
    finding = search(recipe_of(prepared, tmp_path), tmp_path, monkeypatch, plant)
    assert (finding.kind, located(finding)) == (kind, ["strategy ddp on 2 ranks"])


def test_a_recipe_that_does_not_fail_is_said_to_be_so(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = search(recipe_of(prepared, tmp_path), tmp_path, monkeypatch)
    assert finding.failure is None
    assert verdict(finding).startswith("the recipe does not fail here")
    document = to_json(finding, "recipe.yaml")
    assert (document["ok"], document["located"], len(document["trials"])) == (True, None, 3)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_command_finds_a_dead_worker_with_processes_of_its_own(prepared: Path, tmp_path: Path) -> None:
    recipe = recipe_of(prepared, tmp_path)
    command = [sys.executable, "-m", "ups.cli.main", "doctor", str(recipe), "--ranks", "2", "--bisect", "--json"]
    environment = {**os.environ, **planted("dying_worker"), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, cwd=tmp_path, env=environment)
    document = json.loads(done.stdout)
    assert done.returncode == 6, done.stdout + done.stderr
    assert document["needs"] == ["loader workers (data.loader.workers: 2)"]
    assert not document["comes_and_goes"]
    assert Path(document["failure"]["log"]).is_dir()
    assert not (tmp_path / "run").exists()
