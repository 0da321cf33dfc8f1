"""Each tracker is fed by a process of its own: it gets every row once, and the supervisor's verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.tracked_run import DATA_HASH, RECIPE_HASH, RUN_ID, fail_gate, lead, make_run
from ups.supervise.run_file import read_run
from ups.supervise.trackers import TrackerNote, catch_up, read_note, sync

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/ups/tracked"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run(tmp_path / "small", [{"type": "tensorboard"}])


def events(run_dir: Path) -> Any:
    pytest.importorskip("tensorboard", reason="needs TensorBoard, to read its files back")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def curve(run_dir: Path, name: str) -> dict[int, float]:
    return {event.step: event.value for event in events(run_dir).Scalars(name)}


def text(run_dir: Path, name: str) -> str:
    return str(events(run_dir).Tensors(f"{name}")[-1].tensor_proto.string_val[0].decode())


def wait_until(true: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("ending", ["completed", "failed", "preempted", "stopped"])
def test_a_tracker_gets_every_row_and_the_verdict(run_dir: Path, home: Path, ending: str) -> None:
    done = lead(run_dir, range(1, 11), ending)
    assert done.returncode == 0, done.stderr
    note = read_note(run_dir, "tensorboard", RUN_ID)
    assert (note.rows, note.state, note.problem) == (10, ending, "")
    assert curve(run_dir, "loss") == {step: 1 / 2**step for step in range(1, 11)}
    assert curve(run_dir, "valid/wave/one_step") == {step: step / 4 for step in range(1, 11)}
    assert f"| state | {ending} |" in text(run_dir, "run/ending")
    facts = text(run_dir, "run/facts")
    for value in ("operator", "c0ffee", RECIPE_HASH, DATA_HASH):
        assert value in facts
    assert read_run(run_dir)["trackers"] == [{"name": "tensorboard", "id": RUN_ID, "url": str(run_dir / "tensorboard")}]
    assert list(home.iterdir()) == []  # nothing is left to tell


def test_a_killed_supervisor_is_told_by_the_tracker_that_outlives_it(run_dir: Path) -> None:
    lead(run_dir, range(1, 6), "killed")
    wait_until(lambda: read_note(run_dir, "tensorboard").state == "died")
    assert "supervisor_died" in text(run_dir, "run/ending")
    assert set(curve(run_dir, "loss")) == set(range(1, 6))


def test_a_run_that_goes_on_replaces_the_steps_that_it_repeats(run_dir: Path) -> None:
    lead(run_dir, range(1, 9), "preempted")
    lead(run_dir, range(6, 13), "completed")
    assert read_note(run_dir, "tensorboard").rows == 15
    assert "| state | completed |" in text(run_dir, "run/ending")
    steps = [event.step for event in events(run_dir).Scalars("loss")]
    assert steps == list(range(1, 13))


def test_sync_gives_a_tracker_what_it_has_missed(run_dir: Path) -> None:
    lead(run_dir, range(1, 5), "completed")
    note = read_note(run_dir, "tensorboard")
    TrackerNote(run_id=note.run_id).save(run_dir, "tensorboard")
    for path in (run_dir / "tensorboard").iterdir():
        path.unlink()
    assert sync(run_dir, ["tensorboard"]) == {"tensorboard": ""}
    assert set(curve(run_dir, "loss")) == set(range(1, 5))
    assert read_note(run_dir, "tensorboard").state == "completed"


def test_a_report_that_is_written_later_is_attached(run_dir: Path) -> None:
    lead(run_dir, range(1, 3), "completed")
    (run_dir / "report").mkdir()
    (run_dir / "report/index.html").write_text("<html>")
    sync(run_dir, ["tensorboard"])
    assert list(read_note(run_dir, "tensorboard").attached) == ["report/index.html"]
    assert text(run_dir, "files/report/index.html").endswith("report/index.html")


def test_the_next_look_at_a_run_tells_an_ending_that_nobody_has_told(run_dir: Path, home: Path) -> None:
    lead(run_dir, range(1, 3), "killed")
    wait_until(lambda: read_note(run_dir, "tensorboard").state == "died")
    note = read_note(run_dir, "tensorboard")
    note.state, note.updated = "", 0.0  # as if the tracker had been killed together with the supervisor
    note.save(run_dir, "tensorboard")
    catch_up([(run_dir, read_run(run_dir))])
    wait_until(lambda: read_note(run_dir, "tensorboard").state == "died")
    catch_up([(run_dir, read_run(run_dir))])
    assert list(home.iterdir()) == []


def test_looking_at_the_run_of_somebody_else_starts_nothing(run_dir: Path, home: Path) -> None:
    """Its recipe could name any server, and any secret of whoever looks."""
    lead(run_dir, range(1, 3), "killed")
    wait_until(lambda: read_note(run_dir, "tensorboard").state == "died")
    TrackerNote(run_id=RUN_ID).save(run_dir, "tensorboard")
    for mark in home.iterdir():
        mark.unlink()
    catch_up([(run_dir, read_run(run_dir))])
    time.sleep(2)
    assert read_note(run_dir, "tensorboard").state == ""


def test_a_gate_that_was_not_passed_is_told_after_the_training_was(run_dir: Path) -> None:
    assert lead(run_dir, range(1, 4), "completed").returncode == 0
    assert read_note(run_dir, "tensorboard", RUN_ID).state == "completed"
    fail_gate(run_dir)
    assert sync(run_dir, ["tensorboard"], 60) == {"tensorboard": ""}
    note = read_note(run_dir, "tensorboard", RUN_ID)
    assert (note.rows, note.state, note.problem) == (3, "gate_failed", "")
    assert "| state | gate_failed |" in text(run_dir, "run/ending")
