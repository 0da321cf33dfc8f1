"""`ups train` from a recipe to a verdict, with real processes: stages, ranks, resume, a request to leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.mixture import mixture_recipe, write_mixture
from ups.record.checkpoints import latest_verified, read_progress
from ups.training.checkpoint import read_weights

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]

STAGES = [
    {"type": "autoencode", "steps": 4},
    {"type": "operator", "space": "latent", "steps": 5},
    {"type": "operator", "steps": 6},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def recipe(folder: Path) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(mixture_recipe(folder / "run", write_mixture(folder), stages=STAGES)))
    return path


def command(recipe: Path, run_dir: Path, ranks: int, *overrides: str) -> list[str]:
    options = [part for o in (f"run.dir={run_dir}", *overrides) for part in ("--set", o)]
    return [sys.executable, "-m", "ups.cli.main", "train", str(recipe), "--ranks", str(ranks), *options]


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def train(recipe: Path, run_dir: Path, ranks: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(recipe, run_dir, ranks, *overrides), env=environment(), capture_output=True, text=True, timeout=600
    )


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(recipe: Path, folder: Path) -> Path:
    """Three stages on two ranks, undisturbed."""
    done = train(recipe, folder / "whole", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "VERDICT state=completed" in done.stdout
    assert "stage 3/3 operator  step 6/6  loss" in done.stderr
    return folder / "whole"


def test_all_stages_run_and_the_last_step_is_committed(whole: Path) -> None:
    found = latest_verified(whole)
    assert found is not None
    progress = read_progress(found)["progress"]
    assert (progress["step"], progress["stage_index"], progress["stage_finished"]) == (15, 2, True)
    steps = [(row["stage"], row["stage_step"]) for row in rows(whole) if "loss" in row]
    assert steps == [(0, 2), (0, 4), (1, 2), (1, 4), (1, 5), (2, 2), (2, 4), (2, 6)]
    scores = [row for row in rows(whole) if any(name.startswith("valid/") for name in row)]
    assert [row["step"] for row in scores] == [4, 9, 15]
    for name in ("logs/attempt_0/rank_00000.out", "logs/attempt_0/rank_00001.err", "env.json", "statistics.json"):
        assert (whole / name).exists(), name


def test_a_killed_rank_costs_an_exit_code_and_the_same_command_goes_on_bitwise(
    recipe: Path, folder: Path, whole: Path
) -> None:
    run_dir = folder / "killed"
    with subprocess.Popen(
        command(recipe, run_dir, 2), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            kill_rank_when(run_dir, process, step=6)
            output = process.communicate(timeout=400)[0]
        finally:
            process.kill()
    assert process.returncode == 6, output
    assert "FAILED rank=1/2" in output
    done = train(recipe, run_dir, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (latest_verified(path) for path in (whole, run_dir))
    assert first is not None
    assert second is not None
    ours, theirs = read_weights(first), read_weights(second)
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert ours.keys() == theirs.keys()


def kill_rank_when(run_dir: Path, process: subprocess.Popen[str], step: int) -> None:
    """SIGKILL rank 1 once the run has logged `step`."""
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and process.poll() is None:
        path = run_dir / "metrics.jsonl"
        if path.exists() and any(row["step"] >= step for row in rows(run_dir)):
            pids = json.loads((run_dir / "run.json").read_text())["blackbox_dir"]
            os.kill(json.loads((Path(pids) / "rank_00001.pid").read_text())["rank_pid"], signal.SIGKILL)
            return
        time.sleep(0.02)
    raise AssertionError("the run never got so far")


def test_sigterm_saves_and_leaves_and_nothing_is_lost(recipe: Path, folder: Path) -> None:
    run_dir = folder / "asked"
    with subprocess.Popen(
        command(recipe, run_dir, 1, "stages.2.steps=100000"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            deadline = time.monotonic() + 400
            while not (run_dir / "metrics.jsonl").exists() or not any(r["step"] >= 12 for r in rows(run_dir)):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            output = process.communicate(timeout=150)[0]
        finally:
            process.kill()
    assert process.returncode == 143, output
    assert "VERDICT state=preempted" in output
    assert "lost=0" in output
    found = latest_verified(run_dir)
    assert found is not None
    assert read_progress(found)["progress"]["stage_index"] == 2


def test_one_rank_runs_without_a_launcher(recipe: Path, folder: Path) -> None:
    """The composition root works as a plain process, for a debugger."""
    from ups.config.recipe import resolve
    from ups.data.open import open_tasks
    from ups.run.directory import ensure_run_statistics, prepare

    resolved = resolve(
        recipe, [f"run.dir={folder / 'plain'}", "stages.0.steps=2", "stages.1.steps=2", "stages.2.steps=2"]
    )
    prepare(folder / "plain", resolved, 1)
    with open_tasks(resolved.recipe.data) as readers:
        ensure_run_statistics(folder / "plain", resolved.recipe, readers)
    done = subprocess.run(
        [sys.executable, "-m", "ups.run.rank_main", str(folder / "plain")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = latest_verified(folder / "plain")
    assert found is not None
    assert found.name == "step_00000006"


def test_an_error_in_a_rank_keeps_its_exit_code(folder: Path) -> None:
    (folder / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "ups.run.rank_main", str(folder / "empty")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 3, done.stderr
    assert (folder / "empty" / "failures" / "attempt_0" / "rank_00000.json").exists()
