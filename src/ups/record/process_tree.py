"""Processes of this host as Linux shows them, and how to make a child die with its parent.

Used by the per-rank wrapper and by the supervisor; knows nothing of ranks. Linux only, by /proc and prctl.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# States of a process that a signal, or a debugger, has stopped.
STOPPED = ("T", "t")
# Loaded at import: between fork and exec nothing may be loaded.
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Process:
    """One line of /proc: `state` is R, S, D, T (stopped by a signal), t (traced), Z (dead, not yet reaped)."""

    pid: int
    parent: int
    state: str
    cpu_seconds: float


def module_command(module: str, *words: str, python: str = "") -> list[str]:
    """The command that runs a module of an installed package. Every start of Python is built here.

    -P: without it Python imports from the current directory first, and `h5py.py` next to a data file would run.
    """
    return [python or sys.executable, "-P", "-m", module, *words]


def die_with_parent(death_signal: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `death_signal` to this process when the one that started it is gone."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)


def bound_to(parent: int, death_signal: int = signal.SIGKILL) -> Callable[[], None]:
    """What a child of `parent` runs between fork and exec so that it cannot outlive it."""

    def prepare() -> None:
        die_with_parent(death_signal)
        if os.getppid() != parent:  # the parent died before the line above
            os._exit(1)

    return prepare


def adopt_orphans(adopt: bool = True) -> None:
    """Make descendants of this process its children when their own parent dies, instead of children of init."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def read_process(pid: int) -> Process | None:
    """A process by its number; None if it is gone."""
    try:
        # The kernel cuts a name at 15 bytes, also in the middle of a character.
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name in parentheses may itself hold spaces and parentheses.
    fields = text[text.rindex(")") + 2 :].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return Process(pid, int(fields[1]), fields[0], (int(fields[11]) + int(fields[12])) / ticks)


def exit_code_of_zombie(pid: int) -> int | None:
    """How a dead process that nobody reaped has ended, as `subprocess` gives it; None where that cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = text[text.rindex(")") + 2 :].split()
        return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == "Z" else None
    except (OSError, ValueError, IndexError):
        return None


def all_processes() -> list[Process]:
    """Every process that can be seen."""
    return [p for name in os.listdir("/proc") if name.isdigit() and (p := read_process(int(name))) is not None]


def descendants(pid: int) -> list[Process]:
    """Children of `pid`, their children and so on; dead ones that nobody reaped are left out."""
    by_parent: dict[int, list[Process]] = {}
    for process in all_processes():
        by_parent.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    pending = [pid]
    while pending:
        for child in by_parent.get(pending.pop(), []):
            pending.append(child.pid)
            if child.state != "Z":
                found.append(child)
    return found


def carriers(variable: str, value: str) -> list[Process]:
    """Living processes whose environment at their start held `variable=value`: finds what left the family tree."""
    needle = f"{variable}={value}".encode()
    found = []
    for process in all_processes():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            if process.state != "Z" and needle in environment.split(b"\0"):
                found.append(process)
    return found


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    process = read_process(pid)
    return process is not None and process.state != "Z"


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes; those that are gone already are skipped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_until_gone(
    find: Callable[[], list[Process]], timeout_seconds: float, *, not_reaped: frozenset[int] = frozenset()
) -> list[Process]:
    """SIGKILL what `find` returns, again and again until it returns nothing; gives back what is left at the end."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        left = find()
        if not left or time.monotonic() > deadline:
            return left
        send((process.pid for process in left), signal.SIGKILL)
        reap_adopted(not_reaped)
        time.sleep(0.02)


def reap_adopted(others: frozenset[int] = frozenset()) -> None:
    """Collect dead children that nobody waits for; `others` are those that somebody does (a `Popen`)."""
    for process in all_processes():
        if process.parent == os.getpid() and process.state == "Z" and process.pid not in others:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def children_in_session() -> frozenset[int]:
    """Children of this process in its own session, dead ones too: started by itself, for reasons of its own.

    Ranks have sessions of their own, so that what is adopted from them is never among these.
    """
    own, session, found = os.getpid(), os.getsid(0), set()
    for process in all_processes():
        if process.parent == own:
            with contextlib.suppress(OSError):
                if os.getsid(process.pid) == session:
                    found.add(process.pid)
    return frozenset(found)


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal; without one SIGUSR1 would end it."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except (OSError, ValueError):
        pass
    return False
