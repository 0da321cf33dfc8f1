"""The local record is always whole; a tracker that hangs or fails never delays a step."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from ups.tracking.tracker import FanOut, JsonlTracker, Row


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{") and line.endswith("}")]


def test_rows_are_json_lines_and_nan_is_null(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log({"step": 1, "loss": float("nan"), "rate": 0.5})
    tracker.close()
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None, "rate": 0.5}]


def test_a_half_line_of_a_killed_writer_does_not_spoil_the_next_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    tracker = JsonlTracker(path)
    tracker.log({"step": 2})
    tracker.close()
    assert rows(path) == [{"step": 1}, {"step": 2}]


class Hanging:
    name = "hanging"

    def __init__(self) -> None:
        self.release = threading.Event()

    def log(self, row: Row) -> None:
        self.release.wait(30)

    def close(self) -> None:
        self.release.wait(30)


class Failing:
    name = "failing"

    def log(self, row: Row) -> None:
        raise ConnectionError("no network")

    def close(self) -> None:
        raise ConnectionError("no network")


class Keeping:
    name = "keeping"

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.closed = False

    def log(self, row: Row) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.closed = True


def test_a_hung_and_a_broken_tracker_cost_no_time_and_no_local_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hanging, keeping = Hanging(), Keeping()
    fan = FanOut(JsonlTracker(tmp_path / "m.jsonl"), [hanging, Failing(), keeping], queue_rows=10)
    started = time.monotonic()
    for step in range(100):
        fan.log({"step": step})
        time.sleep(0.0005)
    assert time.monotonic() - started < 2
    fan.close(timeout_seconds=0.2)
    hanging.release.set()
    assert [row["step"] for row in rows(tmp_path / "m.jsonl")] == list(range(100))
    assert fan.dropped["hanging"] >= 85
    assert fan.dropped["failing"] >= 1
    assert [row["step"] for row in keeping.rows] == list(range(100))
    assert keeping.closed
    reported = caplog.text
    assert "tracker 'failing' failed and is left out" in reported
    assert "tracker 'hanging' did not take its last rows" in reported
    assert f"tracker 'hanging' missed {fan.dropped['hanging']} rows" in reported


class Slow(Keeping):
    name = "slow"

    def log(self, row: Row) -> None:
        time.sleep(0.02)
        super().log(row)


def test_a_slow_tracker_is_flushed_and_closed_although_its_queue_is_full(tmp_path: Path) -> None:
    slow = Slow()
    fan = FanOut(JsonlTracker(tmp_path / "m.jsonl"), [slow], queue_rows=5)
    for step in range(30):
        fan.log({"step": step})
    fan.close()
    assert slow.closed
    assert len(slow.rows) + fan.dropped["slow"] == 30


class HangingAtClose(Keeping):
    name = "closing"

    def close(self) -> None:
        time.sleep(30)


def test_trackers_that_hang_in_their_close_cost_the_time_limit_once(tmp_path: Path) -> None:
    fan = FanOut(JsonlTracker(tmp_path / "m.jsonl"), [HangingAtClose(), HangingAtClose(), HangingAtClose()])
    fan.log({"step": 1})
    started = time.monotonic()
    fan.close(timeout_seconds=0.3)
    assert time.monotonic() - started < 1


def test_a_full_disk_does_not_stop_training(caplog: pytest.LogCaptureFixture) -> None:
    fan = FanOut(JsonlTracker(Path("/dev/full")))
    fan.log({"step": 1})
    assert "cannot be written" in caplog.text
    fan.close()
