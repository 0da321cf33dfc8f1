"""What supports the one line: stacks, where all ranks were, their memory, the ends of their logs.

Stacks are taken before any signal that ends the ranks. SIGUSR1 makes a rank print the Python stacks of its threads
itself, even while the interpreter lock is held. py-spy, where it is installed and allowed to look, adds native frames,
and sees processes that are stopped and cannot answer. The rest is gathered while the ranks still live, and kept next to
the failure records as `failures/attempt_N/evidence.json`.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ups.errors import UpsError
from ups.record import processes
from ups.record.failure import Frame, frames_of_dump, innermost, location_of_dump
from ups.record.files import read_from, write_file_atomically
from ups.supervise.fault import Fault
from ups.supervise.rank_view import RankView, tail
from ups.tracking.metrics_file import size_of

_ANSWER_SECONDS = 2.0
_SPY_SECONDS = 3.0
_SPY_NATIVE_SECONDS = 10.0
_MAX_SPIED = 8
_SPY_FRAME = re.compile(r"^\s+(?P<function>.+?) \((?P<path>[^()]+\.py):(?P<line>\d+)\)\s*$", re.MULTILINE)


def capture(views: Sequence[RankView], *, native: bool) -> dict[int, Frame]:
    """Take the stacks of all living ranks into their own failure files; returns where each stands, where that is known.

    Bounded in time, never raises. `native` adds frames of C and C++, which takes seconds: for ranks that are about to
    be ended, not for slow ones.
    """
    living = [view for view in views if view.alive and view.pid and processes.is_alive(view.pid)]
    before = {view.rank: size_of(view.file(".stacks.txt")) for view in living}
    asked = [view for view in living if processes.catches(view.pid, signal.SIGUSR1)]
    processes.send((view.pid for view in asked), signal.SIGUSR1)
    waiting = [view for view in asked if _state(view) != "T"]
    deadline = time.monotonic() + _ANSWER_SECONDS
    while waiting and time.monotonic() < deadline:
        time.sleep(0.02)
        waiting = [view for view in waiting if not _complete(_since(view.file(".stacks.txt"), before[view.rank]))]
    spied = _spy(living, native)
    locations = {}
    for view in living:
        stacks = _since(view.file(".stacks.txt"), before[view.rank])
        frame = location_of_dump(stacks) or _location_of_spy(spied.get(view.rank, ""))
        if frame is not None:
            locations[view.rank] = frame
    return locations


def _location_of_spy(text: str) -> Frame | None:
    """Where the main thread was when py-spy looked; for a rank that could not print its own stack."""
    main = text[text.index("MainThread") :].split("\nThread ")[0] if "MainThread" in text else text
    frames = [Frame(m["path"], int(m["line"]), m["function"]) for m in _SPY_FRAME.finditer(main)]
    return innermost(reversed(frames))


def _spy(views: Sequence[RankView], native: bool) -> dict[int, str]:
    # Next to the interpreter first: a virtual environment need not be on the PATH.
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if program is None:
        return {}
    running = []
    for view in views[:_MAX_SPIED]:
        with contextlib.suppress(OSError):
            before = size_of(view.file(".py-spy.txt"))
            # Native frames need the process to be paused, which a stopped one does not answer to.
            how = "--native" if native and _state(view) != "T" else "--nonblocking"
            command = [program, "dump", "--pid", str(view.pid), "--full-filenames", how]
            with view.file(".py-spy.txt").open("ab") as file:
                process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
            running.append((view, before, process))
    deadline = time.monotonic() + (_SPY_NATIVE_SECONDS if native else _SPY_SECONDS)
    for _, _, process in running:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return {view.rank: _since(view.file(".py-spy.txt"), before) for view, before, _ in running}


def _since(path: Path, offset: int) -> str:
    """What was added to a file after `offset`."""
    return read_from(path, offset).decode(errors="replace")


def _complete(dump: str) -> bool:
    """Whether a dump has at least the thread that answered, with its frames."""
    return "Current thread" in dump and dump.endswith("\n") and "  File " in dump


def _state(view: RankView) -> str:
    process = processes.read_process(view.pid)
    return process.state if process else "Z"


_RECORDS = 12
_LOG_BYTES = 4000
# With many ranks on a host, those that say the most: the first cause and a sample of the others.
_MAX_LOGS = 16


def write(run_dir: Path, fault: Fault, views: Sequence[RankView], memory: dict[int, dict[str, Any]]) -> None:
    """Store the evidence of one fault; losing it must not lose the run."""
    document = {
        "fault": fault.document(),
        "ranks": [_of_rank(view, memory.get(view.rank, {}), view.rank == fault.rank) for view in views],
    }
    with contextlib.suppress(UpsError, OSError):
        path = run_dir / fault.evidence
        if run_dir.is_dir():  # one that was moved away is not made again for this
            path.parent.mkdir(parents=True, exist_ok=True)
        write_file_atomically(path, (json.dumps(document, indent=1) + "\n").encode())


def waits_for_peers(view: RankView) -> bool:
    """Whether the rank's last printed stack is inside a collective: it waits for others and delays none."""
    innermost = frames_of_dump(tail(view.file(".stacks.txt")))[:3]
    if any(frame.function == "_engine_run_backward" for frame in innermost):
        return True
    # A checkpoint is written by torch/distributed/checkpoint, which is work and no waiting.
    called = next((frame.path for frame in innermost if "torch/distributed" in frame.path), "")
    return bool(called) and "torch/distributed/checkpoint" not in called


def _of_rank(view: RankView, memory: dict[str, Any], first: bool) -> dict[str, Any]:
    reader = view.reader
    timeline = [
        {
            "time_monotonic_ns": r.time_ns,
            "step": r.step,
            "phase": r.phase.label,
            "stage": r.stage,
            "collective": r.collective,
            "operation": reader.operation(r.operation) if reader else "",
            "batch": r.batch,
            "mark": r.mark.name.lower(),
        }
        for r in (reader.tail(_RECORDS) if reader else [])
    ]
    document: dict[str, Any] = {"rank": view.rank, "pid": view.pid, "exit": view.exit, "memory": memory}
    document["timeline"] = timeline
    if first or view.rank < _MAX_LOGS:
        document["log_tail"] = tail(view.run_dir / view.log, _LOG_BYTES)
    return document
