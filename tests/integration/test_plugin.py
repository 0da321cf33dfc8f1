"""A foreign package adds a part of each kind by entry points alone; nothing of ours is edited.

Its wheel is installed next to ours in an environment of its own (`environments.core_environment`). The order of the
tests is the order of a user: they share one directory.
"""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.integration.environments import ROOT, core_environment, run, start
from ups.errors import BundleError
from ups.inference.bundle import load_bundle

PLUGIN = ROOT / "tests" / "plugins" / "sample_plugin"
DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
PARTS = {"models": "ring", "stages": "outliers", "readers": "rawgrid", "tasks": "heat1d", "trackers": "csv"}
CONVERT = """
from pathlib import Path
from ups.data.open import open_paths
from ups_sample_plugin.reader import write
write(Path("heat1d.rawgrid"), open_paths("data/heat1d.zarr"))
"""
SIMULATE = """
import numpy as np, ups
simulator = ups.Simulator.load("runs/heat/bundle", device="cpu")
state = np.sin(2 * np.pi * (np.arange(64) + 0.5) / 64)[None, None].astype("float32")
result = simulator.rollout(state, 3, {"nu": 0.005})
print(bool(np.isfinite(result.u).all()))
"""

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def bin_directory(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin")
    built = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", built, PLUGIN, cwd=built)
    (plugin,) = built.glob("*.whl")
    binaries = core_environment(folder / "environment", wheel, DEPENDENCIES)
    target = folder / "environment" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", target, "install", "-q", "--no-deps", plugin, cwd=folder)
    return binaries


@pytest.fixture(scope="module")
def desk(bin_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the plugin's recipe and data: solved by its solver, stored in its format."""
    desk = tmp_path_factory.mktemp("desk")
    (desk / "recipe.yaml").write_text((PLUGIN / "recipe.yaml").read_text())
    run(bin_directory / "ups", "data", "generate", "heat1d", "--trajectories", "16,4,4", "--out", "data", cwd=desk)
    run(bin_directory / "python", "-c", CONVERT, cwd=desk)
    return desk


@pytest.fixture(scope="module")
def trained(bin_directory: Path, desk: Path) -> Path:
    run(bin_directory / "ups", "train", "recipe.yaml", "--ranks", "2", cwd=desk)
    return desk / "runs" / "heat"


def test_the_version_lists_what_came_from_where(bin_directory: Path, desk: Path) -> None:
    parts = json.loads(run(bin_directory / "ups", "--version", "--verbose", "--json", cwd=desk))["parts"]
    theirs = [part for part in parts if part["distribution"] == "ups-sample-plugin"]
    assert {part["kind"]: part["name"] for part in theirs} == PARTS
    assert {part["version"] for part in theirs} == {"0.3.1"}
    assert not [part for part in parts if "error" in part]


def test_settings_of_the_plugin_are_explained_and_in_the_schema(bin_directory: Path, desk: Path) -> None:
    done = start(bin_directory / "ups", "config", "check", "recipe.yaml", "--set", "stages.0.power=9", cwd=desk)
    assert done.returncode == 3
    assert "stages.0.power = 9: expected at most 8 -> Power of a sample's error" in done.stderr
    schema = run(bin_directory / "ups", "config", "schema", cwd=desk)
    for name in ("RingConfig", "OutlierStageConfig", "CsvTrackerConfig"):
        assert name in json.loads(schema)["$defs"]


def test_two_ranks_train_its_model_by_its_stage_on_its_data_with_its_tracker(trained: Path) -> None:
    verdict = json.loads((trained / "run.json").read_text())
    assert verdict["state"] == "completed", verdict
    with (trained / "heat.csv").open(newline="") as file:
        names = {name for _, name, _ in csv.reader(file)}
    assert "train/heat1d/loss" in names


@pytest.mark.long
def test_the_doctor_finds_parity_in_its_recipe(bin_directory: Path, desk: Path) -> None:
    done = start(bin_directory / "ups", "doctor", "recipe.yaml", "--ranks", "2", "--json", cwd=desk)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"parity", done.stdout)


def test_the_run_is_scored_and_its_bundle_loads(bin_directory: Path, desk: Path, trained: Path) -> None:
    run(bin_directory / "ups", "eval", "runs/heat", "--no-report", "--json", cwd=desk)
    assert run(bin_directory / "python", "-c", SIMULATE, cwd=desk) == "True\n"


def test_the_bundle_names_the_package_that_it_needs(trained: Path) -> None:
    """Here, where the package is not installed."""
    needs = json.loads((trained / "bundle" / "bundle.json").read_text())["needs"]
    assert needs == [{"kind": "models", "name": "ring", "distribution": "ups-sample-plugin", "version": "0.3.1"}]
    with pytest.raises(
        BundleError, match=r"needs model 'ring' of package ups-sample-plugin 0\.3\.1, which is not inst"
    ):
        load_bundle(trained / "bundle")


def test_a_killed_rank_is_named(bin_directory: Path, desk: Path, trained: Path) -> None:
    changes = ("run.name=killed", "stages.0.steps=100000", "supervise.max_restarts=0")
    options = [word for change in changes for word in ("--set", change)]
    command = [str(bin_directory / "ups"), "train", "recipe.yaml", "--ranks", "2", *options]
    run_dir = desk / "runs" / "killed"
    with subprocess.Popen(command, cwd=desk, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            _kill_rank_1(run_dir, process)
            output = process.communicate(timeout=400)[0]
        finally:
            process.kill()
    assert process.returncode == 6, output
    reported = run(bin_directory / "ups", "why", "runs/killed", cwd=desk)
    assert reported.startswith("FAILED rank=1/2")
    assert "cause=killed(SIGKILL)" in reported


def _kill_rank_1(run_dir: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        if (run_dir / "metrics.jsonl").exists() and (run_dir / "metrics.jsonl").stat().st_size:
            pids = Path(json.loads((run_dir / "run.json").read_text())["blackbox_dir"])
            os.kill(json.loads((pids / "rank_00001.pid").read_text())["rank_pid"], signal.SIGKILL)
            return
        time.sleep(0.05)
    raise AssertionError("the run never got so far")
