"""What a tracker is: a place outside the run that gets its rows, its facts and how it ended.

A tracker lives in a process of its own (`ups.supervise.tracker_feed`), which reads metrics.jsonl: it may be slow, hang,
raise or be killed, and no step waits for it. Whoever feeds it remembers how far it came, so nothing is lost either.
No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ups.tracking.metrics_file import Row


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told about its run.

    id: the same after every restart. facts: what the run was made from (stages, git commit, hash of the recipe,
    identity of the data). recipe: the resolved recipe as plain values; secrets are references in it. known: the id that
    the service gave the run in an earlier process, '' if there was none.
    """

    dir: Path
    id: str
    name: str
    facts: Mapping[str, str]
    recipe: Mapping[str, Any]
    known: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """The supervisor's verdict. state: completed, gate_failed, failed, preempted, stopped or died; anything but
    completed is not a success, whatever its exit code."""

    state: str
    cause: str
    exit_code: int
    verdict: str

    @property
    def texts(self) -> dict[str, str]:
        """The ending by name, for a service that keeps texts."""
        values = {"state": self.state, "cause": self.cause, "exit_code": str(self.exit_code), "verdict": self.verdict}
        return {name: value for name, value in values.items() if value}


class Tracker:
    """Base of trackers. What raises is tried again later, in a new process, from the last row that was kept.

    id and url: of the run in the service, for `ups status`. first_row: the number of the row with which the service
    continues, where it knows better than we do.
    """

    id: str = ""
    url: str = ""
    first_row: int | None = None

    def log(self, row: Row, number: int) -> None:
        """Take one row; `number` is its line in metrics.jsonl, from 0."""
        raise NotImplementedError

    def flush(self) -> None:
        """Return when the rows so far are kept: they are not sent again."""

    def attach(self, path: Path, name: str) -> None:
        """Take a file of the run under a name: a report, a picture."""

    def end(self, ending: Ending) -> None:
        """Tell how the run ended."""

    def close(self) -> None:
        """Let go; after `end`, or while the run continues elsewhere."""
