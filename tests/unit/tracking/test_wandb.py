"""The tracker `wandb`: offline its log, read by its own protocol buffers, and online a server, have our rows and the
verdict.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tracked_run import DATA_HASH, RECIPE_HASH, RUN_ID, fail_gate, lead, make_run, row
from tests.unit.tracking import wandb_log
from tests.unit.tracking.wandb_server import Server
from ups.supervise.trackers import TrackerNote, read_note, sync

pytest.importorskip("wandb", reason="needs the client of Weights & Biases (extra: wandb)")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]

# Its service takes long to start and end on a machine without free cores.
PATIENT = 200.0


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))


def log_of(run_dir: Path) -> Path:
    (log,) = run_dir.glob(f"tracking/wandb/offline-run-*-{RUN_ID}/run-{RUN_ID}.wandb")
    return log


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    tracker = {"type": "wandb", "mode": "offline", "project": "flow", "tags": ["first"], "group": "pilot"}
    return make_run(tmp_path / "small", [tracker])


@pytest.mark.parametrize(("ending", "code"), [("completed", 0), ("failed", 6), ("preempted", 143)])
def test_the_log_has_every_number_and_the_verdict(run_dir: Path, ending: str, code: int) -> None:
    done = lead(run_dir, range(1, 11), ending, PATIENT)
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
    deadline = time.monotonic() + 300
    while read_note(run_dir, "wandb").state != "died":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert wandb_log.exits(log_of(run_dir)) == [6]
    (run_dir / "report").mkdir()
    (run_dir / "report/index.html").write_text("<html>")
    lead(run_dir, range(6, 13), "completed", PATIENT)
    path = log_of(run_dir)  # one log with all of it
    assert [r["step"] for r in wandb_log.history(path)] == [*range(1, 9), *range(6, 13)]
    assert wandb_log.exits(path) == [0]
    assert "files" in wandb_log.kinds(path)
    assert (path.parent / "files/report/index.html").read_text() == "<html>"


def test_a_gate_that_was_not_passed_fails_the_run(run_dir: Path) -> None:
    lead(run_dir, range(1, 4), "completed", PATIENT)
    fail_gate(run_dir)
    assert sync(run_dir, ["wandb"], 100) == {"wandb": ""}
    assert wandb_log.exits(log_of(run_dir))[-1] == 9


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def online(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEY_FOR_TESTS", "0123456789" * 4)
    tracker = {"type": "wandb", "base_url": server.uri, "project": "flow", "entity": "team", "tags": ["first"]}
    return make_run(tmp_path / "small", [{**tracker, "api_key": "${env:KEY_FOR_TESTS}", "group": "pilot"}])


@pytest.mark.parametrize(("ending", "code"), [("completed", 0), ("preempted", 143)])
def test_the_server_has_every_number_and_the_verdict(online: Path, server: Server, ending: str, code: int) -> None:
    done = lead(online, range(1, 11), ending, PATIENT)
    assert "not complete" not in done.stderr, (online / "tracking/wandb.log").read_text()
    assert [(r["step"], r["loss"], r["_step"]) for r in server.rows] == [
        (step, row(step)["loss"], step - 1) for step in range(1, 11)
    ]
    assert server.exit_codes == [code]
    assert server.summary["ups/state"] == ending
    assert (server.uploads["name"], server.uploads["tags"], server.uploads["groupName"]) == (RUN_ID, ["first"], "pilot")
    assert read_note(online, "wandb").url == f"{server.uri}/team/flow/runs/{RUN_ID}"


def test_a_gate_that_was_not_passed_fails_the_run_on_the_server(online: Path, server: Server) -> None:
    lead(online, range(1, 4), "completed", PATIENT)
    fail_gate(online)
    assert sync(online, ["wandb"], 100) == {"wandb": ""}
    assert server.exit_codes[-1] == 9
    assert server.summary["ups/state"] == "gate_failed"


def test_a_server_that_was_down_is_completed_and_a_run_that_goes_on_is_the_same(online: Path, server: Server) -> None:
    server.close()
    said = lead(online, range(1, 5), "completed").stderr
    assert "tracker 'wandb' is not complete" in said
    server.open()
    assert sync(online, ["wandb"], 100) == {"wandb": ""}
    assert [r["step"] for r in server.rows] == [1, 2, 3, 4]
    assert server.exit_codes == [0]
    TrackerNote(run_id=RUN_ID).save(online, "wandb")  # what was sent is forgotten here, but not there
    assert "not complete" not in lead(online, range(5, 8), "failed", PATIENT).stderr
    assert [r["step"] for r in server.rows] == list(range(1, 8))
    assert server.exit_codes == [0, 6]
