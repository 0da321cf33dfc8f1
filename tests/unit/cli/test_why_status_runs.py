"""`ups why`, `ups status` and `ups runs` on run directories as a supervisor leaves them."""

import json
import math
import time
from pathlib import Path

import pytest

from ups.cli.main import run
from ups.record.blackbox import BlackBox, Phase, ring_path
from ups.record.manifest import commit_directory, make_temporary
from ups.supervise.fault import KEYS, Fault
from ups.supervise.run_file import RunFile
from ups.supervise.status import rows_of_rings


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    for name, state in (("good", "completed"), ("bad", "failed"), ("live", "running")):
        run_dir = tmp_path / "runs" / name
        run_dir.mkdir(parents=True)
        file = RunFile(run_dir)
        file.begin(ranks=2, max_restarts=1, box_root=run_dir / "blackbox")
        faults = []
        if state == "failed":
            one = Fault(0, 1, 2, "h", 7, "data", "exception(KeyError)", "a.py:3", 5, 2, "stop(restarts_off)", "x.err")
            faults = [one.document()]
        file.document["attempts"].append({"number": 0, "faults": faults})
        file.document.update(state=state, cause="exception(KeyError)" if faults else "", checkpoint=5)
        file.save()
        for rank in (0, 1):
            path = ring_path(run_dir / "blackbox", rank)
            box = BlackBox.create(path, rank=rank, world_size=2, attempt=0, capacity=16)
            box.loss, box.total_steps = 0.25, 20
            for step in range(1, 8):
                box.record(Phase.FORWARD, step)
    return tmp_path / "runs"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(list(arguments)) == 0
    return capsys.readouterr().out


def test_why_begins_with_the_one_line_and_says_what_to_do(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "why", "bad").splitlines()
    assert lines[0].startswith(
        "FAILED rank=1/2 step=7 phase=data host=h cause=exception(KeyError) at=a.py:3 ckpt=5 lost=2"
    )
    assert any(line.startswith("What to do: ") for line in lines)


def test_why_as_json_has_the_documented_keys_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (record,) = json.loads(printed(capsys, "why", str(runs / "bad"), "--json"))
    assert tuple(record)[: len(KEYS)] == KEYS
    assert json.loads(printed(capsys, "why", "good", "--json")) == []


def test_why_without_a_run_is_about_the_living_or_newest_one_and_says_which(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(capsys, "why").startswith(f"About {Path('runs') / 'live'}:\n")


def test_status_shows_the_living_run_by_default(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "status")
    assert text.startswith("live: running, step 7/20, loss 0.25, ")
    assert ", 1 attempt, 0 faults, " in text
    assert "forward" in text
    status = json.loads(printed(capsys, "status", "live", "--json"))
    assert (status["attempt"], status["attempts"]) == (0, 1)
    assert (status["step"], status["total_steps"], len(status["ranks"])) == (7, 20, 2)
    assert status["steps_per_second"] > 0
    assert status["seconds_left"] >= 0


def test_runs_lists_every_verdict(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "runs")
    assert all(name in text for name in ("good", "bad", "live", "completed", "failed", "exception(KeyError)"))
    assert {row["state"] for row in json.loads(printed(capsys, "runs", "--json"))} == {"completed", "failed", "running"}


@pytest.mark.parametrize("name", ["good", "bad", "live", "killed"])
def test_status_and_runs_tell_the_checkpoint_that_is_on_the_disk(
    runs: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    if name == "killed":  # its supervisor was: no verdict ever told run.json of a checkpoint
        (runs / "live").rename(runs / name)
        document = json.loads((runs / name / "run.json").read_text())
        document.update(checkpoint=None, supervisor_started=1)
        (runs / name / "run.json").write_text(json.dumps(document))
    for step in (5, 10, 15):
        final = runs / name / "checkpoints" / f"step_{step:08d}"
        temporary = make_temporary(final)
        (temporary / "data").write_bytes(bytes(10))
        commit_directory(temporary, final)
    assert "checkpoint 15" in printed(capsys, "status", name)
    status = json.loads(printed(capsys, "status", name, "--json"))
    (row,) = (row for row in json.loads(printed(capsys, "runs", "--json")) if Path(row["path"]).name == name)
    assert (status["checkpoint"], row["checkpoint"]) == (15, 15)
    assert status["state"] == row["state"]
    (line,) = (line for line in printed(capsys, "runs").splitlines() if line.split()[0] == name)
    assert "15" in line.split()


def test_an_unknown_run_is_wrong_use_with_a_hint(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["why", "nothing"]) == 3
    assert "known runs: " in capsys.readouterr().err


def test_the_first_step_of_a_process_is_not_part_of_its_rate(tmp_path: Path) -> None:
    """It waits for the loader and fills caches: the first time that is left would be far too long."""
    box = BlackBox.create(ring_path(tmp_path, 0), rank=0, world_size=1, attempt=0, capacity=64)
    box.record(Phase.DATA, 1)
    assert math.isnan(rows_of_rings(tmp_path, range(1), live=False)[0].steps_per_second)
    time.sleep(0.5)
    for step in range(2, 8):
        box.record(Phase.DATA, step)
    assert rows_of_rings(tmp_path, range(1), live=False)[0].steps_per_second > 2 * 6 / 0.5
