"""The trackers of a run, seen from its supervisor and from commands: a process each, started, looked at and ended.

The run never waits for a tracker. At the end it gets a short time for its last rows and the verdict;
what it did not get then, `ups track sync` sends later, and the state alone the next `ups status` or `ups runs`.

`RUN/tracking/NAME.json`, the note, says how far one tracker has come. Only the process that feeds it
(`tracker_feed.py`) writes it, so live tracking, a restart and `ups track sync` are the same: each continues from the
note. Reads no recipe, so that `ups status` and `ups runs` stay fast.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, TypeAdapter, ValidationError

from ups.config.tracker import TrackerConfig, by_name
from ups.errors import UpsError
from ups.record import processes
from ups.record.files import read_object, write_file_atomically
from ups.record.identity import file_sha256
from ups.record.run_dir import RunDir, home_directory
from ups.record.text import path_text
from ups.supervise.fault import Number
from ups.supervise.run_file import RunDocument, update_run
from ups.tracking.metrics_file import size_of

# Exit codes of the process that feeds a tracker.
BUSY = 11
LATE = 12
Count = Annotated[int, Field(strict=True, ge=0)]


@dataclass(slots=True)
class TrackerNote:
    """run_id: of the run that this is about. id, url: of the run in the service. rows, offset: the lines and bytes of
    metrics.jsonl that the service has. state, ended: the last ending that it was told ('' and None: none since the run
    was started). attached: file -> SHA-256 of what it has of it. problem: why the last try failed, '' if it did not.
    """

    run_id: str = ""
    id: str = ""
    url: str = ""
    rows: Count = 0
    offset: Count = 0
    state: str = ""
    ended: Number | None = None
    attached: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    failures: Count = 0
    updated: Number = 0.0

    def save(self, run_dir: Path, name: str) -> None:
        """Write the note; raises OSError or a MachineError where that is not possible."""
        self.updated = time.time()
        path = RunDir(run_dir).tracker_note(name)
        path.parent.mkdir(exist_ok=True)
        write_file_atomically(path, (json.dumps(asdict(self), indent=1) + "\n").encode())


_NOTES = TypeAdapter(TrackerNote)


def read_note(run_dir: Path, name: str, run_id: str = "") -> TrackerNote:
    """The note of a tracker; a new one if there is none, or one of another run (`run_id`)."""
    try:
        note = _NOTES.validate_python(read_object(RunDir(run_dir).tracker_note(name)) or {})
    except ValidationError:
        return TrackerNote(run_id)
    return TrackerNote(run_id) if run_id and note.run_id != run_id else note


def notes_of(run_dir: Path) -> dict[str, TrackerNote]:
    """The notes of all trackers that a run has had, by name."""
    return {path.stem: read_note(run_dir, path.stem) for path in sorted(RunDir(run_dir).tracking.glob("*.json"))}


ALONE_SECONDS = 60.0  # what a tracker gets to tell that its supervisor was killed
SYNC_SECONDS = 600.0
_MAX_CAUGHT_UP = 4


def is_complete(run_dir: Path, document: RunDocument, note: TrackerNote) -> bool:
    """Whether a tracker has every row of a run that has ended, and knows how."""
    ending_known = note.state == document["state"] and note.ended == document["ended"]
    return ending_known and note.offset >= size_of(RunDir(run_dir).metrics)


def sync(run_dir: Path, names: Sequence[str], seconds: float = SYNC_SECONDS) -> dict[str, str]:
    """Bring trackers to where the run stands, all at once; returns what went wrong by name, '' where nothing did."""
    started = {name: start_tracker(run_dir, name, seconds, subprocess.DEVNULL) for name in names}
    try:
        for process in started.values():
            process.wait()  # it ends itself after `seconds`
    except BaseException:
        for process in started.values():
            end_companion(process)
        raise
    known = {0: "", BUSY: "another process is at it", LATE: f"it did not answer within {seconds:.0f} s"}
    problems = {}
    for name, process in started.items():
        problem = read_note(run_dir, name).problem or f"its process ended with exit code {process.returncode}"
        problems[name] = known.get(process.returncode, problem)
    return problems


def catch_up(runs: Sequence[tuple[Path, RunDocument]]) -> None:
    """Tell trackers in the background how runs have ended whose supervisor could not: for `ups status` and `ups runs`.

    Only for runs that this user has started with these trackers, by the memory in the home directory: a run directory
    of another user could name any server and any secret.
    """
    started = 0
    for run_dir, document in runs:
        if document["state"] == "running" or not _is_remembered(run_dir, document):
            continue
        missing = [name for name, note in notes_of(run_dir).items() if not is_complete(run_dir, document, note)]
        if not missing:
            forget(run_dir)
        for name in missing:
            note = read_note(run_dir, name)
            if started < _MAX_CAUGHT_UP and time.time() - note.updated > min(note.failures * 10, 600):
                started += 1
                with contextlib.suppress(OSError, subprocess.SubprocessError):
                    start_tracker(run_dir, name, ALONE_SECONDS, subprocess.DEVNULL, detached=True)


def start_tracker(
    run_dir: Path, name: str, seconds: float, stdin: int, *, detached: bool = False
) -> subprocess.Popen[bytes]:
    """Start to feed a tracker: until `stdin` ends, and at most `seconds` longer."""
    words = ("ups.supervise.tracker_feed", str(run_dir), name, str(seconds))
    return start_companion(*words, stdin=stdin, detached=detached)


def start_companion(module: str, *words: str, stdin: int, detached: bool = False) -> subprocess.Popen[bytes]:
    """Start a process of ours that follows a run, and prints nothing."""
    return subprocess.Popen(
        processes.module_command(module, *words),
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONSAFEPATH": "1"},  # for what a client starts
        # Of this session, so that it is not taken for an orphan of a rank, but not of the group that Ctrl-C reaches.
        process_group=None if detached else 0,
        start_new_session=detached,
    )


def end_companion(process: subprocess.Popen[bytes]) -> None:
    """End a process with what it has started."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _mark(run_dir: Path) -> Path | None:
    """A file whose name stands for this directory and the recipe in it, where this user's runs with trackers are
    remembered until their ending was told."""
    base, home = os.environ.get("XDG_STATE_HOME", ""), home_directory()
    root = Path(base) if os.path.isabs(base) else home and home / ".local/state"
    config = file_sha256(RunDir(run_dir).config)
    name = hashlib.sha256(f"{run_dir.resolve()}\0{config}".encode()).hexdigest()
    return root / "ups/tracked" / name if root and config else None


def remember(run_dir: Path) -> None:
    """Let `catch_up` care for the trackers of this run."""
    mark = _mark(run_dir)
    with contextlib.suppress(OSError):
        if mark is not None:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch(mode=0o600)


def forget(run_dir: Path) -> None:
    """There is nothing left to tell."""
    mark = _mark(run_dir)
    with contextlib.suppress(OSError):
        if mark is not None:
            mark.unlink(missing_ok=True)


def _is_remembered(run_dir: Path, document: RunDocument) -> bool:
    if not document.get("trackers") and not RunDir(run_dir).tracking.is_dir():
        return False  # most runs: nothing is hashed for them
    mark = _mark(run_dir)
    return mark is not None and mark.is_file()


logger = logging.getLogger(__name__)

CLOSE_SECONDS = 20.0
ROWS_SECONDS = 600.0  # without a row for this long, a notice says so
_STUCK_SECONDS = 120.0
_LOOK_SECONDS = 1.0
_MAX_STARTS = 4


class Trackers:
    """The tracker processes of a run that is about to start; entered around the run, and what follows its verdict."""

    def __init__(self, run_dir: Path, trackers: Sequence[TrackerConfig]) -> None:
        self._run_dir = run_dir
        self._names = list(by_name(trackers))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._starts = dict.fromkeys(self._names, 0)
        self._said: set[str] = set()
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

    def __exit__(self, *error: object) -> None:
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
                end_companion(process)
            if process.returncode != 0:
                problem = read_note(self._run_dir, name).problem or "it did not answer in time"
                logger.warning(
                    "tracker '%s' is not complete: %s; complete it with: ups track sync %s",
                    *(name, problem, path_text(self._run_dir)),
                )
        update_run(self._run_dir, trackers=self.known())  # one that was slow to open has its address only now
        if all(process.returncode == 0 for process in self._processes.values()):
            forget(self._run_dir)

    def look(self) -> tuple[list[dict[str, str]], list[str]] | None:
        """Once a second: start again what has died; returns name, id and address of each tracker for run.json, and the
        notices, each once. None between the seconds.
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
        notes = [(name, read_note(self._run_dir, name)) for name in self._names]
        return [{"name": name, "id": note.id, "url": note.url} for name, note in notes]

    def _once(self, about: str, text: str) -> list[str]:
        if about in self._said:
            return []
        self._said.add(about)
        logger.warning("%s", text)
        return [text]

    def _start(self, name: str) -> None:
        self._starts[name] += 1
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self._processes[name] = start_tracker(self._run_dir, name, ALONE_SECONDS, subprocess.PIPE)
