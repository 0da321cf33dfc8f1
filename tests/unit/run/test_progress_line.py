"""One display of progress: rewritten on a terminal and in a notebook, whole lines in a log, messages above it."""

from __future__ import annotations

import io
import logging
import re
import threading
import time

import pytest

from ups.record import log
from ups.run import progress_line
from ups.run.progress_line import ProgressLine, bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Notebook(io.StringIO):
    pass


Notebook.__module__ = "ipykernel.iostream"
# A line of a log, and what it says.
STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  (.*)")


def test_a_log_gets_a_line_for_each_part_that_is_done() -> None:
    stream = io.StringIO()
    with ProgressLine(stream) as line:
        for done in range(4):
            line.count("ks1d", done, 3, "chunks")
        for done in range(3):
            line.count("scoring ks1d", done, 2)
    lines = [STAMP.fullmatch(line) for line in stream.getvalue().splitlines()]
    assert [match and match[1] for match in lines] == ["ks1d 3/3 chunks", "scoring ks1d 100 %"]


def test_a_log_shows_that_a_long_part_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: now)
    stream = io.StringIO()
    with ProgressLine(stream) as line:
        line.count("packing", 400, 900, "trajectories")  # done before: says nothing about the time that is left
        for done in range(401, 491):
            now += 1.0
            line.count("packing", done, 900, "trajectories")
    assert [STAMP.sub(r"\1", line) for line in stream.getvalue().splitlines()] == [
        "packing 430/900 trajectories  left 8 min",
        "packing 460/900 trajectories  left 7 min",
        "packing 490/900 trajectories  left 7 min",
    ]


def test_work_that_cannot_count_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_line, "LOG_SECONDS", 0.05)
    monkeypatch.setattr(progress_line, "PULSE_SECONDS", 0.02)
    stream, terminal = io.StringIO(), Terminal()
    for output in (stream, terminal):
        with ProgressLine(output) as line:
            line.working("plan: estimating")
            end = time.monotonic() + 20
            while "so far" not in output.getvalue() and time.monotonic() < end:
                time.sleep(0.01)
    said = [STAMP.sub(r"\1", line) for line in stream.getvalue().splitlines()]
    assert said[:2] == ["plan: estimating", "plan: estimating, 0 s so far"]
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert not [thread for thread in threading.enumerate() if thread.name == "ups-pulse"]


def test_a_count_is_not_written_over_by_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_line, "PULSE_SECONDS", 0.02)
    stream = Terminal()
    with ProgressLine(stream) as line:
        line.working("evaluate: scoring")
        time.sleep(0.15)  # longer than a line is left alone; signs of life do not count
        line.count("scoring ks1d", 1, 2)
        before = stream.getvalue()
        time.sleep(0.1)
        assert stream.getvalue() == before
        assert "scoring ks1d 50 %" in before


def test_a_terminal_rewrites_the_line_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_line, "LIVE_SECONDS", 0.0)
    stream = Terminal()
    with ProgressLine(stream) as line:
        line.count("a", 1, 2, "chunks")
        line.count("b", 0, 2, "chunks")
    assert stream.getvalue().split("\r\x1b[K") == [
        "[##########..........] a 1/2 chunks",
        "[#####...............] b 0/2 chunks  all 1/4",
        "",
    ]


def test_a_line_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProgressLine, "_width", lambda self: 30)
    stream = Terminal()
    with ProgressLine(stream) as line:
        line.show("x" * 25, bar(1, 2))
        line.show("y" * 90, bar(1, 2))
    assert stream.getvalue().split("\r\x1b[K") == ["x" * 25, "y" * 30, ""]


def test_a_notebook_rewrites_the_line_without_escape_sequences() -> None:
    stream = Notebook()
    with ProgressLine(stream) as line:
        line.show("one")
        line.show("two")
    assert stream.getvalue() == "one\r   \rtwo\r   \r"


def test_whole_lines_and_messages_stand_above_the_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log._SHOWN, "writers", [lambda record: None])
    stream = Terminal()
    with ProgressLine(stream) as line:
        line.show("step 1")
        logging.getLogger("ups.test").warning("save of step 1 failed")
        line.note("valid 0.5")
        line.say("VERDICT")
    assert capsys.readouterr().out == "VERDICT\n"
    warned, noted = "warning: save of step 1 failed\nstep 1", "valid 0.5\nstep 1"
    assert stream.getvalue().split("\r\x1b[K") == ["step 1", warned, noted, ""]


def test_quiet_shows_nothing_and_leaves_messages_to_who_shows_them_already(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, outside = io.StringIO(), list[str]()
    monkeypatch.setattr(log, "_is_configured", lambda logger: False)
    with (
        log.log_shown_by(lambda record: outside.append(log.short_line(record))),
        ProgressLine(stream, quiet=True) as line,
    ):
        line.count("packing", 3, 3, "trajectories")
        logging.getLogger("ups.test").warning("look")
    assert (stream.getvalue(), outside) == ("", ["warning: look"])


def test_a_reader_that_went_away_does_not_stop_the_work() -> None:
    stream = io.StringIO()
    with ProgressLine(stream) as line:
        stream.close()
        line.count("packing", 3, 3, "trajectories")
        line.note("look")


def test_the_start_of_the_work_is_not_part_of_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(progress_line.time, "monotonic", lambda: now)
    stream = Terminal()
    with ProgressLine(stream) as line:
        line.count("scoring", 0, 100)
        for done, seconds in ((1, 300.0), (2, 2.0), (3, 2.0)):
            now += seconds
            line.count("scoring", done, 100)
    assert re.findall(r"left (.*?)\r", stream.getvalue() + "\r") == ["3 min"]
