"""The tracker `wandb`, offline: its log, read by its own protocol buffers, holds our rows and the verdict."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.unit.tracking import wandb_log
from ups.supervise.tracker_note import read_note
from ups.testing.tracked_run import DATA_HASH, RECIPE_HASH, RUN_ID, lead, make_run, row

pytest.importorskip("wandb", reason="needs the client of Weights & Biases (extra: wandb)")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))


def log_of(run_dir: Path) -> Path:
    (found,) = run_dir.glob(f"tracking/wandb/offline-run-*-{RUN_ID}/run-{RUN_ID}.wandb")
    return found


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    tracker = {"type": "wandb", "mode": "offline", "project": "flow", "tags": ["first"], "group": "pilot"}
    return make_run(tmp_path / "small", [tracker])


@pytest.mark.parametrize(("ending", "code"), [("completed", 0), ("failed", 6), ("preempted", 143)])
def test_the_log_has_every_number_and_the_verdict(run_dir: Path, ending: str, code: int) -> None:
    done = lead(run_dir, range(1, 11), ending)
    assert done.returncode == 0, done.stderr
    assert "not complete" not in done.stderr, (run_dir / "tracking/wandb.log").read_text()
    path = log_of(run_dir)
    rows = wandb_log.history(path)
    assert [(r["step"], r["loss"], r["valid/wave/one_step"]) for r in rows] == [
        (step, row(step)["loss"], step / 4) for step in range(1, 11)
    ]
    assert [r["_step"] for r in rows] == list(range(10))
    assert wandb_log.exits(path) == [code]
    assert ("preempting" in wandb_log.kinds(path)) == (ending == "preempted")
    config = wandb_log.config(path)
    assert (config["ups/stages"], config["ups/git_commit"]) == ("operator", "c0ffee")
    assert (config["ups/recipe"], config["ups/data.wave"]) == (RECIPE_HASH, DATA_HASH)


def test_a_killed_supervisor_and_a_run_that_goes_on(run_dir: Path) -> None:
    lead(run_dir, range(1, 9), "killed")
    deadline = time.monotonic() + 60
    while read_note(run_dir, "wandb").state != "died":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert wandb_log.exits(log_of(run_dir)) == [6]
    lead(run_dir, range(6, 13), "completed")
    path = log_of(run_dir)  # one log with all of it
    assert [r["step"] for r in wandb_log.history(path)] == [*range(1, 9), *range(6, 13)]
    assert wandb_log.exits(path) == [0]
