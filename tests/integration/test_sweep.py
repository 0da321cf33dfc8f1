"""`ups sweep` with real runs: a failed run stops no other, and a killed sweep continues where it was."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.environments import ROOT
from ups.supervise.run_file import read_run, was_started

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

RECIPE = """
version: 1
run: { name: wave }
data: { tasks: [{ name: wave1d, path: data/wave1d.zarr }], batch_size: 4 }
model: { type: latent_operator, width: 8, depth: 1, num_heads: 1 }
stages: [{ type: operator, steps: 120 }]
checkpoint: { interval_steps: 10 }
"""


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "tests" / "integration" / "runs" / "data", tmp_path / "data")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def start(desk: Path, *options: str, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ups", "sweep", "recipe.yaml", *options],
        cwd=desk,
        env=os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **more,
    )


def states(desk: Path) -> dict[str, dict[str, Any]]:
    """Name of each run that was started -> its record."""
    return {path.name: read_run(path) for path in (desk / "runs").glob("*") if was_started(path)}


def finished(desk: Path) -> dict[str, float]:
    """Name of each run that is bundled -> when its training ended."""
    return {
        name: document["ended"]
        for name, document in states(desk).items()
        if document["state"] == "completed" and (desk / "runs" / name / "bundle" / "bundle.json").is_file()
    }


def left_of(desk: Path) -> list[str]:
    """Processes that work in the directory; waits until those that are about to end have ended."""
    deadline = time.monotonic() + 60
    while True:
        left = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(path / "cwd") == str(desk):
                    left.append((path / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def wait_until(condition: Any, process: subprocess.Popen[str], what: str) -> None:
    deadline = time.monotonic() + 1200
    while not condition():
        assert time.monotonic() < deadline, f"waited too long for {what}"
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


def test_a_failed_run_stops_no_other_and_finished_ones_are_kept(desk: Path) -> None:
    options = ["--over", "data.tasks.0.path=[data/missing.zarr, data/wave1d.zarr]", "--set", "stages.0.steps=4"]
    with start(desk, *options, "--jobs", "2") as process:
        shown, notes = process.communicate(timeout=400)
    assert process.returncode == 6, shown + notes
    bad, good = (line.split(maxsplit=2) for line in shown.splitlines()[1:])
    assert good[1] == "completed"
    assert "(training mean" in good[2] or "(persistence" in good[2], "a score has its reference next to it"
    assert bad[1] == "failed"
    assert "missing.zarr of task 'wave1d' does not exist" in bad[2]
    assert "1 of 2 runs are completed; to continue: ups sweep recipe.yaml --over" in notes
    before = finished(desk)
    with start(desk, *options, "--json") as process:
        document = json.loads(process.communicate(timeout=400)[0])
    assert finished(desk) == before, "nothing was trained again"
    assert [run["state"] for run in document["runs"]] == ["failed", "completed"]
    assert document["runs"][1]["values"] == {"data.tasks.0.path": "data/wave1d.zarr"}
    assert document["runs"][1]["scores"][0]["task"] == "wave1d"


def test_a_run_that_fails_while_it_trains_is_named_with_ups_why(desk: Path) -> None:
    # So large a learning rate makes the losses infinite, and the run stops by its own rule.
    rates = ["--over", "stages.0.optim.learning_rate=[10]", "--set", "stages.0.optim.type=sgd"]
    more = ["--set", "engine.max_skipped_steps=1", "--set", "stages.0.optim.clip_norm=0", "--set", "stages.0.noise=1"]
    with start(desk, *rates, *more) as process:
        shown, notes = process.communicate(timeout=400)
    assert process.returncode == 6, shown + notes
    assert shown.splitlines()[1].split(maxsplit=2)[1:] == ["failed", "ups why runs/wave-learning_rate_10"]


def test_values_are_checked_before_the_first_run_starts(desk: Path) -> None:
    with start(desk, "--over", "model.width=[8, wide]") as process:
        notes = process.communicate(timeout=100)[1]
    assert process.returncode == 3
    assert "model.width" in notes
    assert not (desk / "runs").exists()


def test_a_sweep_goes_to_slurm_with_the_same_names(desk: Path) -> None:
    with start(desk, "--over", "run.seed=[0, 1]", "--slurm", "--time 30 --dry-run") as process:
        script, notes = process.communicate(timeout=100)
    assert process.returncode == 0, notes
    assert "#SBATCH --array=0-1" in script
    assert f"--set run.seed=1 --set run.name=wave-seed_1 --set run.dir={desk}/runs/wave-seed_1" in script


@pytest.mark.long
def test_the_search_with_optuna_runs_as_the_page_has_it(desk: Path) -> None:
    pytest.importorskip("optuna")
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "sweep.md").read_text(), re.M | re.S)
    (desk / "recipe.yaml").write_text(RECIPE.replace("steps: 120", "steps: 4"))
    (desk / "search.py").write_text(snippet.replace("n_trials=20", "n_trials=1"))
    for count in (1, 2):  # the second call adds to the first
        done = subprocess.run(
            [sys.executable, "search.py"], cwd=desk, env=os.environ, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stderr
        assert "'learning_rate'" in done.stdout
        assert len(finished(desk)) == count


@pytest.mark.long
@pytest.mark.timeout(4200)
def test_a_sweep_that_is_killed_and_interrupted_continues(desk: Path) -> None:
    rates = "stages.0.optim.learning_rate=[1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2]"
    options = ["--over", rates, "--over", "run.seed=[0, 1, 2]", "--jobs", "2"]

    def in_work() -> list[str]:
        return [n for n, document in states(desk).items() if document["state"] == "running" and checkpoints(desk, n)]

    print(f"$ ups sweep recipe.yaml {' '.join(options)}   (killed with SIGKILL to its process group)")
    with start(desk, *options) as process:
        wait_until(lambda: len(finished(desk)) >= 4 and in_work(), process, "four runs and one in work")
        most = len([n for n, document in states(desk).items() if document["state"] == "running"])
        os.killpg(process.pid, signal.SIGKILL)
        print(process.communicate(timeout=60)[1])
    assert most <= 2
    assert left_of(desk) == [], "no process is left behind"
    killed, done = in_state(desk, "died"), finished(desk)
    print(f"finished: {len(done)}, killed: {killed}, processes left: 0")
    assert killed

    print("$ the same command   (interrupted with SIGINT)")
    with start(desk, *options) as process:
        wait_until(lambda: len(finished(desk)) >= 10 and in_work(), process, "ten runs and one in work")
        os.killpg(process.pid, signal.SIGINT)
        shown, notes = process.communicate(timeout=200)
        print(notes + shown)
    assert process.returncode == 130, notes
    assert "to save and leave" in notes
    assert "to continue: ups sweep recipe.yaml" in notes
    assert left_of(desk) == []
    # A run that was asked before its first step has nothing to save.
    saved = [name for name in in_state(desk, "preempted") if checkpoints(desk, name)]
    assert saved, "a run in work was asked to save"
    assert done.items() <= finished(desk).items(), "a finished run is not trained again"
    done = finished(desk)
    print(f"finished: {len(done)}, saved: {saved}, processes left: 0")

    print("$ the same command")
    with start(desk, *options) as process:
        shown, notes = process.communicate(timeout=1500)
        print(notes + shown)
    assert process.returncode == 0, notes
    assert done.items() <= finished(desk).items(), "a finished run is not trained again"
    assert len(finished(desk)) == len(shown.splitlines()) - 1 == 18
    attempts = {name: len(document["attempts"]) for name, document in states(desk).items()}
    assert not [name for name in done if attempts[name] > 1 and name not in killed]
    assert all(attempts[name] > 1 for name in [*killed, *saved]), "what was interrupted continued"
    print(f"attempts of each run: {attempts}")
    compared = subprocess.run(
        [sys.executable, "-m", "ups", "compare", *sorted(f"runs/{name}" for name in attempts)],
        cwd=desk, env=os.environ | {"NO_COLOR": "1"}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    print("$ ups compare runs/wave-*\n" + compared.stdout)
    assert compared.returncode == 0, compared.stderr
    assert compared.stdout.count("  3  ") == 24, "six recipes of three seeds, four scores"


def checkpoints(desk: Path, name: str) -> list[Path]:
    return list((desk / "runs" / name / "checkpoints").glob("step_*"))


def in_state(desk: Path, state: str) -> list[str]:
    return sorted(name for name, document in states(desk).items() if document["state"] == state)
