"""The trackers of a run, seen from its supervisor: a process each (`tracker_feed.py`), started, looked at and ended.

A tracker is never waited for while the run goes on. At the end it gets a short time for its last rows and the verdict;
what it did not get then, `ups track sync` gives it later, and the state alone the next `ups status` or `ups runs`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ups.config.secret import reveal
from ups.config.setting import is_secret
from ups.config.tracker import TrackerConfig, by_name
from ups.errors import MissingExtraError, UpsError
from ups.record.run_dir import RunDir
from ups.record.text import path_text
from ups.registry import TRACKERS
from ups.supervise.run_file import note_trackers
from ups.supervise.tracker_note import read_note
from ups.supervise.tracker_process import ALONE_SECONDS, end_tracker, forget, remember, start_tracker
from ups.tracking.metrics_file import size_of

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 20.0
ROWS_SECONDS = 600.0  # without a row after so long a person should know
_STUCK_SECONDS = 120.0
_LOOK_SECONDS = 1.0
_MAX_STARTS = 4


def check_trackers(trackers: Sequence[TrackerConfig]) -> None:
    """Raise, before anything starts, if the code of a tracker, its package or one of its secrets is not there."""
    for config in trackers:
        TRACKERS.factory(config.type)
        if config.needs is not None and importlib.util.find_spec(config.needs[1]) is None:
            raise MissingExtraError.of(config.needs[0], config.needs[1], f"the tracker '{config.type}'")
        for name, field in type(config).model_fields.items():
            if is_secret(field) and getattr(config, name) is not None:
                reveal(getattr(config, name))


class Trackers:
    """The tracker processes of a run that is about to start; entered around the run, and what follows its verdict."""

    def __init__(self, run_dir: Path, trackers: Sequence[TrackerConfig]) -> None:
        self._run_dir = run_dir
        self._names = list(by_name(trackers))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._starts = dict.fromkeys(self._names, 0)
        self._said: dict[str, str] = {}
        self._began = self._looked = time.monotonic()
        self._size = self._grown_to = size_of(RunDir(run_dir).metrics)
        self._grown_at = self._began

    def __enter__(self) -> Self:
        for name in self._names:
            # From the disk, with the id of an earlier start; an empty one says that there is a tracker.
            note = read_note(self._run_dir, name)
            note.problem = ""
            with contextlib.suppress(OSError, UpsError):
                note.save(self._run_dir, name)
            self._start(name)
        if self._names:
            remember(self._run_dir)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give each tracker its last rows and the verdict, all of them together within CLOSE_SECONDS."""
        for process in self._processes.values():
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        deadline = time.monotonic() + CLOSE_SECONDS
        for name, process in self._processes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                end_tracker(process)
            if process.returncode != 0:
                problem = read_note(self._run_dir, name).problem or "it did not answer in time"
                logger.warning(
                    "tracker '%s' is not complete: %s; complete it with: ups track sync %s",
                    *(name, problem, path_text(self._run_dir)),
                )
        note_trackers(self._run_dir, self.known())  # one that was slow to open has its address only now
        if all(process.returncode == 0 for process in self._processes.values()):
            forget(self._run_dir)

    def look(self) -> tuple[list[dict[str, str]], list[str]] | None:
        """Once a second: start again what has died; returns name, id and address of each tracker for run.json, and what
        a person should be told, each thing once. None between the seconds.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return None
        self._looked = now
        size = size_of(RunDir(self._run_dir).metrics)
        if size != self._grown_to:
            self._grown_to, self._grown_at = size, now
        warnings = []
        if size == self._size and now - self._began > ROWS_SECONDS:
            warnings += self._once("rows", f"no row of metrics after {ROWS_SECONDS:.0f} s: is a step that slow?")
        for name, process in self._processes.items():
            if process.poll() is not None and self._starts[name] < _MAX_STARTS:
                self._start(name)
            note = read_note(self._run_dir, name)
            problem = note.problem
            if process.poll() is not None and not problem:
                problem = f"its process ended with exit code {process.returncode}"
            late = note.offset < size and now - self._grown_at > _STUCK_SECONDS
            if not problem and late and time.time() - note.updated > _STUCK_SECONDS:
                problem = f"it has not taken a row for {_STUCK_SECONDS:.0f} s"
            warnings += self._once(name, f"tracker '{name}': {problem}; metrics.jsonl has every row") if problem else []
        return self.known(), warnings

    def known(self) -> list[dict[str, str]]:
        """Name, id and address of each tracker, as far as they are known."""
        found = [(name, read_note(self._run_dir, name)) for name in self._names]
        return [{"name": name, "id": note.id, "url": note.url} for name, note in found]

    def _once(self, about: str, text: str) -> list[str]:
        if about in self._said:
            return []
        self._said[about] = text
        logger.warning("%s", text)
        return [text]

    def _start(self, name: str) -> None:
        self._starts[name] += 1
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self._processes[name] = start_tracker(self._run_dir, name, ALONE_SECONDS, subprocess.PIPE)
