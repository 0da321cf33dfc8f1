"""The small parent of one rank: `python -m ups.record.rank_wrapper RUN_DIR COMMAND...`.

Stands between the supervisor and the rank. It starts the rank, gives it its log files, and writes down exit code,
signal and time at the moment of death, also while the supervisor is busy with something else. It uses the standard
library only, so it costs a few megabytes, not an import of torch.

Who dies with whom: the rank dies with the wrapper (SIGKILL by the kernel); the wrapper is told by the kernel when the
supervisor is gone and then ends the rank and everything the rank started.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from ups.errors import exit_code_of_signal
from ups.record import processes
from ups.record.run_dir import RunDir, rank_name

# The kernel's word for "your parent is gone". SIGCONT, because it is the only signal that also wakes a stopped
# wrapper; one that comes from elsewhere is distinguished by the parent, which is then still there.
_PARENT_GONE = signal.SIGCONT
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
_STRAGGLER_SECONDS = 0.5


def main(arguments: list[str]) -> int:
    """Run COMMAND as the rank named by RANK; returns only if it could not be started."""
    run_dir, command = Path(arguments[0]).resolve(), arguments[1:]
    rank, attempt = int(os.environ["RANK"]), int(os.environ.get("UPS_ATTEMPT", "0"))
    run, name = RunDir(run_dir), rank_name(rank)
    failures, logs = run.failures_of(attempt), [run.log(attempt, rank, stream) for stream in ("out", "err")]
    box_dir = Path(os.environ.get("UPS_BLACKBOX_DIR") or run.blackbox)

    state = _State(os.getppid())
    signal.signal(_PARENT_GONE, state.parent_gone)
    for number in _FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup: the rank ignores it, too
            signal.signal(number, state.forward)
    processes.die_with_parent(_PARENT_GONE)
    processes.adopt_orphans()
    if os.getppid() != state.parent:
        return 1

    known: dict[str, Any] = {"format": 1, "rank": rank, "attempt": attempt, "host": os.uname().nodename}
    try:
        for directory in (failures, logs[0].parent, box_dir):
            directory.mkdir(parents=True, exist_ok=True)
        child = _start(command, *logs)
        started_ns = time.monotonic_ns()
        write_json(box_dir / f"{name}.pid", {"rank_pid": child.pid, "wrapper_pid": os.getpid(), "time_ns": started_ns})
    except OSError as error:
        # A limit on processes, a full disk.
        nothing = {"pid": 0, "code": 1, "signal": 0, "peak_resident_bytes": 0, "cpu_seconds": 0.0}
        text = f"rank {rank} could not be started: {error}"
        times = {"time_monotonic_ns": time.monotonic_ns(), "time_wall": time.time()}
        _tell(name, (box_dir, failures), {**known, **nothing, **times, "not_started": text})
        sys.stderr.write(text + "\n")
        return 1
    state.attach(child.pid)
    _, status, usage = os.wait4(child.pid, 0)
    state.child = 0  # its number may soon be that of another process
    died_ns = time.monotonic_ns()
    child.returncode = code = os.waitstatus_to_exitcode(status)
    document = {
        **known,
        "pid": child.pid,
        "code": code,
        "signal": -code if code < 0 else 0,
        "time_monotonic_ns": died_ns,
        "time_wall": time.time(),
        "supervisor_gone": state.orphaned,
        "peak_resident_bytes": usage.ru_maxrss * 1024,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
    }
    _tell(name, (box_dir, failures), document)
    _end_stragglers()
    return _leave_like(code)


def _start(command: list[str], out_path: Path, err_path: Path) -> subprocess.Popen[bytes]:
    # SAFEPATH: for what libraries start, such as the compiler of torch.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "PYTHONSAFEPATH": "1"}
    with out_path.open("ab") as out, err_path.open("ab") as err:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            # Its own group, so that a signal for the group of the wrapper reaches the rank once: forwarded.
            process_group=0,
            preexec_fn=processes.bound_to(os.getpid()),
        )


def _tell(name: str, folders: tuple[Path, ...], document: dict[str, Any]) -> None:
    for folder in folders:  # shared memory first: it answers at once, also when the disk does not
        with contextlib.suppress(OSError):
            write_json(folder / f"{name}.exit.json", document)


class _State:
    """What the signal handlers share with the main line."""

    def __init__(self, parent: int) -> None:
        self.parent = parent
        self.child = 0
        self.orphaned = False
        self.pending: list[int] = []

    def attach(self, pid: int) -> None:
        self.child = pid
        processes.send([pid] * len(self.pending), signal.SIGTERM)
        if self.orphaned:
            processes.send([pid], signal.SIGKILL)

    def forward(self, number: int, _frame: FrameType | None) -> None:
        if self.child:
            processes.send([self.child], number)
        elif number == signal.SIGTERM:
            self.pending.append(number)

    def parent_gone(self, _number: int, _frame: FrameType | None) -> None:
        if os.getppid() == self.parent:
            return
        self.orphaned = True
        if self.child:
            processes.send([self.child], signal.SIGKILL)


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a small file that a reader sees whole or not at all; it need not survive a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document) + "\n")
    os.replace(temporary, path)


def _end_stragglers() -> None:
    """End what the rank left behind (loader workers), after a moment in which helpers may tidy up shared memory."""
    deadline = time.monotonic() + _STRAGGLER_SECONDS

    def find() -> list[processes.Process]:
        processes.reap_adopted()
        return processes.descendants(os.getpid())

    while find() and time.monotonic() < deadline:
        time.sleep(0.02)
    processes.kill_until_gone(find, 5.0)


def _leave_like(code: int) -> int:
    """Leave with the code of the rank; if a signal ended it, by the same signal, but without a second core file."""
    if code >= 0:
        return code
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return exit_code_of_signal(-code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
