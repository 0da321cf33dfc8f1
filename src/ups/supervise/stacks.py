"""Stacks of all ranks of this host, taken before any signal that ends them.

SIGUSR1 makes a rank print the Python stacks of its threads itself, even while the interpreter lock is held. py-spy,
where it is installed and allowed to look, adds native frames, and sees processes that are stopped and cannot answer.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ups.record import process_tree
from ups.record.location import Frame, innermost
from ups.supervise.rank_view import RankView

_ANSWER_SECONDS = 2.0
_SPY_SECONDS = 3.0
_SPY_NATIVE_SECONDS = 10.0
_MAX_SPIED = 8
_SPY_FRAME = re.compile(r"^\s+(?P<function>.+?) \((?P<path>[^()]+\.py):(?P<line>\d+)\)\s*$", re.MULTILINE)


def capture(views: Sequence[RankView], *, native: bool) -> None:
    """Take the stacks of all living ranks into their own failure files; bounded in time, never raises.

    `native` adds frames of C and C++, which takes seconds: for ranks that are about to be ended, not for slow ones.
    """
    living = [view for view in views if view.alive and view.pid and process_tree.is_alive(view.pid)]
    sizes = {}
    for view in living:
        if process_tree.catches(view.pid, signal.SIGUSR1):
            sizes[view.rank] = _size(_stacks_file(view))
            process_tree.send([view.pid], signal.SIGUSR1)
    deadline = time.monotonic() + _ANSWER_SECONDS
    waiting = [view for view in living if view.rank in sizes and _state(view) != "T"]
    while waiting and time.monotonic() < deadline:
        waiting = [view for view in waiting if _size(_stacks_file(view)) == sizes[view.rank]]
        time.sleep(0.02)
    _spy(living, native)


def spied_location(view: RankView) -> Frame | None:
    """Where the main thread was when py-spy looked; for a rank that could not print its own stack."""
    try:
        text = _spy_file(view).read_text(errors="replace")
    except OSError:
        return None
    main = text[text.index("MainThread") :].split("\nThread ")[0] if "MainThread" in text else text
    frames = [Frame(m["path"], int(m["line"]), m["function"]) for m in _SPY_FRAME.finditer(main)]
    return innermost(reversed(frames))


def _spy(views: Sequence[RankView], native: bool) -> None:
    # Beside the interpreter first: a virtual environment need not be on the PATH.
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if program is None:
        return
    running = []
    for view in views[:_MAX_SPIED]:
        with contextlib.suppress(OSError):
            file = _spy_file(view).open("ab")
            # Native frames need the process to be paused, which a stopped one does not answer to.
            how = "--native" if native and _state(view) != "T" else "--nonblocking"
            command = [program, "dump", "--pid", str(view.pid), "--full-filenames", how]
            running.append((subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL), file))
    deadline = time.monotonic() + (_SPY_NATIVE_SECONDS if native else _SPY_SECONDS)
    for process, file in running:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        file.close()


def _stacks_file(view: RankView) -> Path:
    return view.stem.with_name(f"{view.name}.stacks.txt")


def _spy_file(view: RankView) -> Path:
    return view.stem.with_name(f"{view.name}.py-spy.txt")


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def _state(view: RankView) -> str:
    process = process_tree.read_process(view.pid)
    return process.state if process else "Z"
