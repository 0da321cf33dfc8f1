"""Starts and ends the process that feeds a tracker (`tracker_feed.py`), and finds trackers that lag behind.

Reads no recipe, so that `ups status` and `ups runs` stay fast.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ups.record import process_tree
from ups.record.identity import file_sha256
from ups.record.run_dir import RunDir, home_directory
from ups.supervise.tracker_note import BUSY, LATE, TrackerNote, note_path, notes_of, read_note
from ups.tracking.metrics_file import size_of

ALONE_SECONDS = 60.0  # what a tracker gets to tell that its supervisor was killed
SYNC_SECONDS = 600.0
_MAX_CAUGHT_UP = 4


def is_complete(run_dir: Path, document: Mapping[str, Any], note: TrackerNote) -> bool:
    """Whether a tracker has every row of a run that has ended, and knows how."""
    told = note.state == document["state"] and note.ended == document["ended"]
    return told and note.offset >= size_of(RunDir(run_dir).metrics)


def sync(run_dir: Path, names: Sequence[str], seconds: float = SYNC_SECONDS) -> dict[str, str]:
    """Bring trackers to where the run stands, all at once; returns what went wrong by name, '' where nothing did."""
    processes = {name: start_tracker(run_dir, name, seconds, subprocess.DEVNULL) for name in names}
    try:
        for process in processes.values():
            process.wait()  # it ends itself after `seconds`
    except BaseException:
        for process in processes.values():
            end_tracker(process)
        raise
    problems = {}
    for name, process in processes.items():
        problem = read_note(run_dir, name).problem or f"its process ended with exit code {process.returncode}"
        if process.returncode == BUSY:
            problem = "another process is at it"
        elif process.returncode == LATE:
            problem = f"it did not answer within {seconds:.0f} s"
        problems[name] = problem if process.returncode else ""
    return problems


def catch_up(runs: Sequence[tuple[Path, Mapping[str, Any]]]) -> None:
    """Tell trackers in the background how runs have ended whose supervisor could not: for `ups status` and `ups runs`.

    Only for runs that this person has started with these trackers, by the memory in the home directory: a run directory
    of somebody else could name any server and any secret.
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
    return subprocess.Popen(
        process_tree.module_command("ups.supervise.tracker_feed", str(run_dir), name, str(seconds)),
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONSAFEPATH": "1"},  # for what the client of a tracker starts
        # Of this session, so that it is not taken for an orphan of a rank, but not of the group that Ctrl-C reaches.
        process_group=None if detached else 0,
        start_new_session=detached,
    )


def end_tracker(process: subprocess.Popen[bytes]) -> None:
    """End a process with what it has started."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _memory() -> Path | None:
    """Where this person's runs with trackers are remembered until their ending was told."""
    base, home = os.environ.get("XDG_STATE_HOME", ""), home_directory()
    root = Path(base) if os.path.isabs(base) else home and home / ".local/state"
    return root / "ups/tracked" if root else None


def _mark(run_dir: Path) -> Path | None:
    """A file whose name stands for this directory and the recipe in it."""
    folder, config = _memory(), file_sha256(RunDir(run_dir).config)
    return folder / hashlib.sha256(f"{run_dir.resolve()}\0{config}".encode()).hexdigest() if folder and config else None


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


def _is_remembered(run_dir: Path, document: Mapping[str, Any]) -> bool:
    if not document.get("trackers") and not note_path(run_dir, "").parent.is_dir():
        return False  # most runs: nothing is hashed for them
    mark = _mark(run_dir)
    return mark is not None and mark.is_file()
