"""What the supervisor can see of one rank of this host: its ring, its exit, its failure record, its logs.

Reads only; a file that is not there yet, or is damaged, is simply not seen.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ups.errors import UpsError
from ups.record import processes
from ups.record.blackbox import BlackBoxReader, Mark, Record, ring_path
from ups.record.causes import signal_name
from ups.record.failure import Frame, location_of_dump, read_failure
from ups.record.files import read_end, read_object
from ups.record.run_dir import RunDir

_TAIL_BYTES = 16_384
# A wrapper writes within milliseconds of the death; on an overloaded host it may take longer. The first is for a rank
# whose exit code the kernel still shows, the second for one that the wrapper has reaped: only the wrapper knows then.
_WRAPPER_WRITES_SECONDS = 2.0
_WRAPPER_REAPED_SECONDS = 30.0


class RankView:
    """One rank in one attempt."""

    def __init__(self, run_dir: Path, box_dir: Path, attempt: int, rank: int) -> None:
        self.rank = rank
        self.attempt = attempt
        self.run_dir = run_dir
        self._box_dir = box_dir
        self.stem = RunDir(run_dir).failure_stem(attempt, rank)
        self.name = self.stem.name
        self.log = RunDir.log_name(attempt, rank)
        self.reader: BlackBoxReader | None = None
        self.last: Record | None = None
        self.step_began_at = 0  # number of the first record of the current step
        self.exit: dict[str, Any] | None = None
        self.failed = False
        self.pid = 0
        self.wrapper_pid = 0
        self._dead_since_ns = 0
        self._seen_from_outside = False  # the exit was not recorded by the wrapper, which may still do so

    def file(self, suffix: str) -> Path:
        """One of the failure files of the rank in the run directory."""
        return self.stem.with_name(self.name + suffix)

    def refresh(self) -> list[Record]:
        """Look again; returns the records that are new since the last look, oldest first."""
        self._read_pid()
        if self.exit is None or self._seen_from_outside:
            # The exit is read before the ring, so that the last record of a dead rank is certainly among the new ones.
            recorded = read_object(self._box_dir / f"{self.name}.exit.json")
            if recorded is not None:
                self.exit, self._seen_from_outside = recorded, False
        # A rank may need seconds to leave after its exception; it is known as soon as it is recorded.
        self.failed = self.failed or (self._box_dir / f"{self.name}.json").exists()
        if self.reader is None:
            with contextlib.suppress(OSError, UpsError):
                self.reader = BlackBoxReader(ring_path(self._box_dir, self.rank))
        if self.reader is None:
            return []
        fresh = self.reader.since(self.last.number if self.last else 0)
        for record in fresh:
            if self.last is None or record.step != self.last.step:
                self.step_began_at = record.number
            self.last = record
        return fresh

    def notice_unrecorded_death(self, wrapper_code: int | None, not_started: str = "") -> None:
        """Write down a death that the wrapper did not: it is gone itself, it is stopped, or it never was.

        `wrapper_code` is how the wrapper ended, None while it runs. Not for an attempt that is being ended: there it is
        our own doing.
        """
        if self.exit is not None:
            return
        if not_started:
            self.exit = _exit(1, not_started=not_started)
        elif wrapper_code is not None:
            self._read_pid()
            # It may have written in its last moment, and only into the run if shared memory was full.
            self.exit = (
                self._own_exit(self._box_dir)
                or self._own_exit(self.stem.parent)
                or self._lost_with_wrapper(wrapper_code)
            )
        elif self.pid:
            self._notice_zombie()

    def _lost_with_wrapper(self, wrapper_code: int) -> dict[str, Any]:
        signaled = wrapper_code < 0
        how = f"was killed by {signal_name(-wrapper_code)}" if signaled else f"failed with exit code {wrapper_code}"
        who = f"the wrapper of rank {self.rank} {how}"
        if not self.pid:
            return _exit(wrapper_code, not_started=f"{who} before it started the rank")
        who = f"{who}, and the rank died with it"
        return _exit(wrapper_code, message=who) if signaled else _exit(wrapper_code, wrapper_failed=who)

    def _notice_zombie(self) -> None:
        """A rank that is dead while its wrapper says nothing: at once if the wrapper is stopped, else after a while."""
        process = processes.read_process(self.pid)
        if process is not None and process.state != "Z":
            return
        now_ns = time.monotonic_ns()
        self._dead_since_ns = self._dead_since_ns or now_ns
        wrapper = processes.read_process(self.wrapper_pid)
        stopped = wrapper is not None and wrapper.state in processes.STOPPED
        if not stopped and now_ns - self._dead_since_ns < _WRAPPER_WRITES_SECONDS * 1e9:
            return
        code = None if process is None else process.exit_code()
        if code is None and not stopped and now_ns - self._dead_since_ns < _WRAPPER_REAPED_SECONDS * 1e9:
            return
        message = "its wrapper is stopped and did not record this" if stopped else ""
        if code is None:
            message = "its wrapper did not record how it ended; a kill is assumed"
        seen = _exit(-signal.SIGKILL if code is None else code, message=message)
        # In the run if shared memory was full.
        self.exit = self._own_exit(self.stem.parent) or {**seen, "time_monotonic_ns": self._dead_since_ns}
        self._seen_from_outside = True

    def _read_pid(self) -> None:
        if not self.pid:
            pids = read_object(self._box_dir / f"{self.name}.pid")
            if pids is not None:
                self.pid, self.wrapper_pid = int(pids["rank_pid"]), int(pids["wrapper_pid"])

    def _own_exit(self, directory: Path) -> dict[str, Any] | None:
        recorded = read_object(directory / f"{self.name}.exit.json")
        return recorded if recorded is not None and recorded.get("pid") == self.pid else None

    def moved_since(self, record: Record) -> bool:
        """Whether the rank has written a newer record; consumes nothing."""
        latest = self.reader.latest() if self.reader is not None else None
        return latest is not None and latest.number != record.number

    @property
    def alive(self) -> bool:
        """Whether its death has not been written down."""
        return self.exit is None

    @property
    def finished(self) -> bool:
        """Whether it marked its last step as done."""
        return self.last is not None and self.last.mark is Mark.FINISHED

    @property
    def left(self) -> bool:
        """Whether it saved and left because it was asked to."""
        return self.last is not None and self.last.mark is Mark.LEFT

    @property
    def done(self) -> bool:
        """Whether it has no duty left: what it was to save is committed, and only its exit is missing."""
        return self.finished or self.left

    @property
    def progress(self) -> tuple[int, int]:
        """Step, and how far within it; larger is further. Ranks run the same loop, so this compares between them."""
        return (0, 0) if self.last is None else (self.last.step, self.last.number - self.step_began_at)

    def failure(self) -> dict[str, Any] | None:
        """The record that the rank wrote about its own death."""
        return read_failure(self.stem, self._box_dir)

    def crash_location(self) -> Frame | None:
        """Where native code crashed, from the dump in the rank's own file, else from its log."""
        for text in (tail(self.file(".crash.txt")), self.log_tail()):
            if "Fatal Python error" in text:
                frame = location_of_dump(text[text.rindex("Fatal Python error") :])
                if frame is not None:
                    return frame
        return None

    def log_tail(self) -> str:
        """The end of what the rank wrote to standard error."""
        return tail(self.run_dir / self.log)

    def close(self) -> None:
        """Let go of the ring."""
        if self.reader is not None:
            self.reader.close()
            self.reader = None


def _exit(code: int, **more: str) -> dict[str, Any]:
    """An exit as a wrapper would have written it, without what only a wrapper knows."""
    return {"code": code, "time_monotonic_ns": time.monotonic_ns(), **more}


def least_advanced(views: Iterable[RankView]) -> list[RankView]:
    """The ranks that are furthest behind (several when they are level)."""
    known = list(views)
    if not known:
        return []
    behind = min(view.progress for view in known)
    return [view for view in known if view.progress == behind]


def tail(path: Path, limit: int = _TAIL_BYTES) -> str:
    """The last bytes of a text file, '' if it cannot be read."""
    return (read_end(path, limit) or b"").decode(errors="replace")
