"""The tracker `mlflow` against a real server: the same numbers, the verdict, and nothing lost when the server is."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults.small_disk import small_disk
from tests.support.tracked_run import DATA_HASH, RECIPE_HASH, RUN_ID, fail_gate, lead, lead_command, make_run, row
from tests.unit.tracking.mlflow_server import PROGRAM, Server, running
from ups.supervise.trackers import TrackerNote, read_note, sync

pytest.importorskip("mlflow", reason="needs the client of MLflow (extra: mlflow)")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not PROGRAM, reason="needs an MLflow server in an environment of its own; UPS_MLFLOW_SERVER says where"
    ),
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("mlflow")) as server:
        yield server


def tracked(folder: Path, server: Server, experiment: str) -> Path:
    tags = ["team=flow", "first"]
    return make_run(
        folder, [{"type": "mlflow", "uri": server.uri, "experiment": experiment, "group": "pilot", "tags": tags}]
    )


@pytest.mark.parametrize(
    ("ending", "status"), [("completed", "FINISHED"), ("failed", "FAILED"), ("preempted", "KILLED")]
)
def test_the_server_has_every_number_and_the_verdict(tmp_path: Path, shared: Server, ending: str, status: str) -> None:
    run_dir = tracked(tmp_path / "small", shared, ending)
    done = lead(run_dir, range(1, 11), ending)
    assert done.returncode == 0, done.stderr
    assert "not complete" not in done.stderr
    record = shared.run(ending)
    assert record["info"]["status"] == status
    assert shared.curve("loss", ending) == [(step, row(step)["loss"]) for step in range(1, 11)]
    assert shared.curve("valid/wave/one_step", ending) == [(step, step / 4) for step in range(1, 11)]
    tags = shared.tags(ending)
    assert tags["ups.state"] == ending
    assert tags["ups.verdict"].startswith(f"VERDICT state={ending}")
    assert tags["ups.recipe"] == RECIPE_HASH
    assert tags["ups.data.wave"] == DATA_HASH
    assert tags["ups.stages"] == "operator"
    assert tags["mlflow.source.git.commit"] == "c0ffee"
    assert (tags["group"], tags["team"], tags["first"]) == ("pilot", "flow", "true")
    assert {"key": "stages.0.steps", "value": "10"} in record["data"]["params"]
    assert (
        read_note(run_dir, "mlflow").url
        == f"{shared.uri}/#/experiments/{record['info']['experiment_id']}/runs/" + (record["info"]["run_id"])
    )


def test_a_gate_that_was_not_passed_fails_the_run(tmp_path: Path, shared: Server) -> None:
    run_dir = tracked(tmp_path / "small", shared, "gate")
    lead(run_dir, range(1, 4), "completed")
    assert shared.run("gate")["info"]["status"] == "FINISHED"
    fail_gate(run_dir)
    assert sync(run_dir, ["mlflow"]) == {"mlflow": ""}
    assert shared.run("gate")["info"]["status"] == "FAILED"
    assert shared.tags("gate")["ups.state"] == "gate_failed"


def test_a_killed_supervisor_and_a_run_that_goes_on_are_one_run(tmp_path: Path, shared: Server) -> None:
    run_dir = tracked(tmp_path / "small", shared, "resumed")
    lead(run_dir, range(1, 9), "killed")
    deadline = time.monotonic() + 60
    while read_note(run_dir, "mlflow").state != "died":
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert shared.run("resumed")["info"]["status"] == "FAILED"
    assert shared.tags("resumed")["ups.cause"] == "supervisor_died"
    note = read_note(run_dir, "mlflow")
    note.id = ""  # as if the answer of the server had been lost
    note.save(run_dir, "mlflow")
    lead(run_dir, range(6, 13), "completed")
    assert shared.run("resumed")["info"]["status"] == "FINISHED"
    assert sorted(set(dict(shared.curve("loss", "resumed")))) == list(range(1, 13))


def test_rows_that_are_sent_again_appear_once(tmp_path: Path, shared: Server) -> None:
    run_dir = tracked(tmp_path / "small", shared, "twice")
    lead(run_dir, range(1, 6), "completed")
    TrackerNote(run_id=RUN_ID).save(run_dir, "mlflow")
    assert sync(run_dir, ["mlflow"]) == {"mlflow": ""}
    assert [step for step, _ in shared.curve("loss", "twice")] == [1, 2, 3, 4, 5]


def test_a_report_is_attached(tmp_path: Path, shared: Server) -> None:
    run_dir = tracked(tmp_path / "small", shared, "report")
    lead(run_dir, range(1, 3), "completed")
    (run_dir / "report").mkdir()
    (run_dir / "report/index.html").write_text("<html>")
    assert sync(run_dir, ["mlflow"]) == {"mlflow": ""}
    run_id = shared.run("report")["info"]["run_id"]
    (file,) = shared.ask(f"artifacts/list?run_id={run_id}&path=report")["files"]
    assert file["path"] == "report/index.html"


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_server_that_is_gone_in_mid_run_delays_nothing_and_is_completed_later(
    tmp_path: Path, way: signal.Signals
) -> None:
    with running(tmp_path / "server") as server:
        run_dir = tracked(tmp_path / "small", server, "ups")
        command = lead_command(run_dir, range(1, 41), "completed", 0.1)
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            _wait_for_rows(run_dir)
            server.signal(way)
            _, said = process.communicate(timeout=120)
        assert process.returncode == 0
        assert "tracker 'mlflow' is not complete" in said
        assert f"ups track sync {run_dir}" in said
        server.stop()
        server.start()
        assert server.run()["info"]["status"] == "RUNNING"
        assert sync(run_dir, ["mlflow"]) == {"mlflow": ""}
        assert server.run()["info"]["status"] == "FINISHED"
        assert server.curve("loss") == [(step, row(step)["loss"]) for step in range(1, 41)]


def test_a_server_whose_disk_is_full_delays_nothing_and_is_completed_later(tmp_path: Path) -> None:
    disk, filler = tmp_path / "disk", tmp_path / "disk" / "filler"
    with small_disk(disk, 64 << 20), running(disk / "server") as server:
        run_dir = tracked(tmp_path / "small", server, "ups")
        command = lead_command(run_dir, range(1, 41), "completed", 0.1)
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            _wait_for_rows(run_dir)
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
            _, said = process.communicate(timeout=120)
        assert process.returncode == 0
        assert "tracker 'mlflow' is not complete" in said
        filler.unlink()
        assert sync(run_dir, ["mlflow"]) == {"mlflow": ""}
        assert server.run()["info"]["status"] == "FINISHED"
        assert server.curve("loss") == [(step, row(step)["loss"]) for step in range(1, 41)]


def _wait_for_rows(run_dir: Path) -> None:
    deadline = time.monotonic() + 60
    while read_note(run_dir, "mlflow").rows == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
