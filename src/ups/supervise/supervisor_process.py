"""What a supervisor process sets up around its ranks: signals that ask it to leave, output that never blocks it, and
the directory of the rings, in shared memory where there is enough.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Self

from ups.record import processes
from ups.record.files import try_lock
from ups.record.run_dir import RunDir
from ups.supervise.attempt import StopRequest

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_SAME_REQUEST_SECONDS = 0.5


@contextlib.contextmanager
def supervising(
    run_dir: Path, ranks: int, write: Callable[[str], None], box_name: str = "live"
) -> Iterator[tuple[StopRequest, Callable[[str], None], Path]]:
    """All of it, for as long as `ranks` ranks of this host are supervised.

    Gives the request to leave, a function that prints a line, and the directory for the rings.
    """
    with listen() as stop_request, OutputThread(write) as output:
        processes.adopt_orphans()
        processes.raise_open_files()  # inherited by every rank and loader worker
        try:
            with box_root(run_dir, ranks, box_name) as root:
                yield stop_request, output.say, root
        finally:
            processes.adopt_orphans(False)


@contextlib.contextmanager
def listen() -> Iterator[StopRequest]:
    """Turn SIGTERM, SIGHUP and Ctrl-C into a request to save and leave; a second one means now.

    A signal that is ignored already stays so: that is what nohup asks for. Two at the same moment are one request:
    shells, `timeout` and a closing terminal signal the process and its group.
    """
    stop_request = StopRequest()
    first = [0.0]

    def hear(number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        first[0] = first[0] or now
        again = number != signal.SIGHUP and now - first[0] > _SAME_REQUEST_SECONDS
        stop_request.urgent = stop_request.urgent or again
        stop_request.number = number

    heard = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    on_main_thread = threading.current_thread() is threading.main_thread()
    with processes.handling(dict.fromkeys(heard, hear) if on_main_thread else {}):
        yield stop_request


_LINES = 1000
_LAST_LINES_SECONDS = 5.0


class OutputThread:
    """`say` hands a line to `write` in the background, in order; on leaving, what is left gets a few seconds."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._lines: queue.Queue[str | None] = queue.Queue(_LINES)
        self._thread = threading.Thread(target=self._write_lines, name="ups-output", daemon=True)

    def say(self, line: str) -> None:
        """Queue a line; run.json has it in any case."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(line)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_LAST_LINES_SECONDS)
            self._thread.join(_LAST_LINES_SECONDS)

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            # A closed pipe, a terminal that is gone, a full disk: the run continues without output.
            with contextlib.suppress(OSError, ValueError):
                self._write(line)


_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a private directory with a random name is made inside
_PREFIX = "ups-box"
_BOX_BYTES = 2**20  # a ring, what a rank says when it fails, and some space


@contextlib.contextmanager
def box_root(run_dir: Path, ranks: int, name: str = "live") -> Iterator[Path]:
    """A directory for the rings of `ranks`, removed at the end; without enough shared memory `name` inside the run.

    It is locked for as long: containers may share the memory of their host without seeing each other's processes, and
    a lock is seen by all. A number of a process is not.
    """
    sweep_box_roots()
    enough = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)
    descriptor = None
    if enough and shutil.disk_usage(_SHARED_MEMORY).free >= ranks * _BOX_BYTES:
        root, descriptor = _make_held()
    else:
        root = RunDir(run_dir).blackbox / name
        root.mkdir(parents=True, mode=0o700, exist_ok=True)
        root.chmod(0o700)
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def sweep_box_roots() -> None:
    """Remove rings whose supervisor was killed before it could."""
    for path in _SHARED_MEMORY.glob(f"{_PREFIX}-*-*"):
        owner = path.name.split("-")[2]
        with contextlib.suppress(OSError):
            if not owner.isdigit() or processes.is_alive(int(owner)) or path.stat().st_uid != os.getuid():
                continue
            descriptor = _open(path)
            try:
                if try_lock(descriptor):
                    shutil.rmtree(path)
            finally:
                os.close(descriptor)


def _make_held() -> tuple[Path, int]:
    """A new directory in shared memory, and the descriptor whose lock says that its owner lives."""
    while True:
        root = _SHARED_MEMORY / f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(8)}"
        root.mkdir(mode=0o700)  # fails if it exists already
        with contextlib.suppress(FileNotFoundError):  # swept before it was locked: another one
            descriptor = _open(root)
            if try_lock(descriptor) and root.exists():
                return root, descriptor
            os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
