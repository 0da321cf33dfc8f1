"""Messages of ups: shown by our own processes, silent in a library, left to a program that configures logging."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from ups.record import log

SOURCE = Path(log.__file__).parents[1]
# Programs that say how they are called, what cannot wait for a logger, and the display of a library.
WRITERS = {
    "doctor/probes/libraries.py",
    "library/train.py",
    "record/failure.py",
    "record/log.py",
    "record/rank_wrapper.py",
    "serve/app.py",  # the log of requests
    "supervise/tracker_feed.py",  # its standard error is the log of a tracker
}

PROBE = """
import logging, sys
import ups
{before}
logging.getLogger("ups.training.checkpoint").warning("save of step %d failed", 7)
"""


def stderr_of(before: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(before=before)], capture_output=True, text=True, timeout=60, check=True
    )
    assert not done.stdout
    return done.stderr


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook: pytest's own handlers do not count."""
    monkeypatch.setattr(log, "_is_configured", lambda logger: False)


@pytest.mark.processes
def test_a_library_says_nothing_until_the_program_configures_logging() -> None:
    assert stderr_of() == ""
    assert stderr_of("logging.basicConfig()") == "WARNING:ups.training.checkpoint:save of step 7 failed\n"


@pytest.mark.processes
def test_the_command_line_shows_a_short_line_and_a_rank_shows_time_and_logger() -> None:
    command = "from ups.cli.output import note_message\nfrom ups.record.log import show_log\nshow_log(note_message)"
    assert stderr_of(command) == "warning: save of step 7 failed\n"
    rank = "from ups.record.log import show_log, write_to_stderr\nshow_log(write_to_stderr, logging.INFO)"
    shown = stderr_of(rank + "\nlogging.getLogger('ups.data').info('statistics')")
    lines = [line.split(" ", 2)[2] for line in shown.splitlines()]
    assert lines == ["ups.data info: statistics", "ups.training.checkpoint warning: save of step 7 failed"]


@pytest.mark.usefixtures("unconfigured")
def test_the_innermost_writer_shows_a_message_once() -> None:
    outer: list[str] = []
    inner: list[str] = []
    logger = logging.getLogger("ups.test")
    with log.log_shown_by(lambda record: outer.append(log.short_line(record))):
        with log.log_shown_by(lambda record: inner.append(log.short_line(record))):
            logger.warning("one")
        logger.warning("two")
    logger.warning("three")
    assert (inner, outer) == (["warning: one"], ["warning: two"])


def test_a_program_that_configures_logging_shows_messages_itself() -> None:
    # pytest is such a program
    shown: list[logging.LogRecord] = []
    with log.log_shown_by(shown.append):
        logging.getLogger("ups.test").warning("one")
    assert shown == []


@pytest.mark.usefixtures("unconfigured")
def test_a_message_cannot_write_to_the_terminal_and_a_writer_that_fails_stops_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with log.log_shown_by(log.write_to_stderr):
        logging.getLogger("ups.test").warning("name \x1b[2J")
    assert "\x1b" not in capsys.readouterr().err

    def broken(record: logging.LogRecord) -> None:
        raise OSError("no space left")

    with log.log_shown_by(broken):
        logging.getLogger("ups.test").warning("lost")


def test_logging_is_configured_in_one_place_and_diagnostics_go_there() -> None:
    sources = {
        str(path.relative_to(SOURCE)): path.read_text()
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] != "testing"
    }
    handlers = {name for name, text in sources.items() if "addHandler(" in text or "basicConfig(" in text}
    assert handlers == {"__init__.py", "record/log.py"}
    assert {name for name, text in sources.items() if "sys.stderr.write(" in text} == WRITERS
