"""Processes of this host: starting, watching and ending them, and jobs in a pool of fresh ones.

Knows nothing of ranks. Mostly Linux only, by /proc and prctl. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ups.errors import MachineError

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# States of a process that a signal, or a debugger, has stopped.
STOPPED = ("T", "t")
# Loaded at import: between fork and exec nothing may be loaded.
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Process:
    """One line of /proc: `state` is R, S, D, T (stopped by a signal), t (traced), Z (dead, not yet reaped).

    start_ticks: when it was started, which distinguishes it from a later process of the same number. status: of a dead
    one, as `os.wait` gives it.
    """

    pid: int
    parent: int
    state: str
    cpu_seconds: float
    start_ticks: int
    status: int

    def exit_code(self) -> int | None:
        """How a dead process that was not reaped has ended, as `subprocess` gives it; None while it lives."""
        return os.waitstatus_to_exitcode(self.status) if self.state == "Z" else None


def module_command(module: str, *words: str, python: str = "") -> list[str]:
    """The command that runs a module of an installed package. Every start of Python is built here.

    -P: without it Python imports from the current directory first, and `h5py.py` next to a data file would run.
    """
    return [python or sys.executable, "-P", "-m", module, *words]


def usable_cores() -> int:
    """Cores that this process may use; all of the machine where the system does not say (macOS)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def die_with_parent(death_signal: int = signal.SIGKILL) -> None:
    """Ask the kernel (of Linux) to send `death_signal` to this process when the one that started it is gone."""
    if hasattr(_LIBC, "prctl"):
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)


def bound_to(parent: int) -> Callable[[], None]:
    """What a child of `parent` runs between fork and exec so that it cannot outlive it."""

    def prepare() -> None:
        die_with_parent()
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
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Process(pid, int(fields[1]), fields[0], seconds, int(fields[19]), int(fields[49]))


def all_processes() -> list[Process]:
    """Every process that can be seen."""
    return [p for name in os.listdir("/proc") if name.isdigit() and (p := read_process(int(name))) is not None]


def descendants(pid: int) -> list[Process]:
    """Children of `pid`, their children and so on; dead ones that were not reaped are left out."""
    by_parent: dict[int, list[Process]] = {}
    for process in all_processes():
        by_parent.setdefault(process.parent, []).append(process)
    family: list[Process] = []
    pending = [pid]
    while pending:
        for child in by_parent.get(pending.pop(), []):
            pending.append(child.pid)
            if child.state != "Z":
                family.append(child)
    return family


def carriers(variable: str, value: str) -> list[Process]:
    """Living processes whose environment at their start held `variable=value`: finds what left the family tree."""
    needle = f"{variable}={value}".encode()
    matches = []
    for process in all_processes():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            if process.state != "Z" and needle in environment.split(b"\0"):
                matches.append(process)
    return matches


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    process = read_process(pid)
    return process is not None and process.state != "Z"


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes; those that are gone already are skipped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


@contextlib.contextmanager
def handling(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Inside the block signals go to these handlers, after it to those from before. For the main thread."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    """Collect dead children; `others` are those that have their own waiter (a `Popen`)."""
    for process in all_processes():
        if process.parent == os.getpid() and process.state == "Z" and process.pid not in others:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def children_in_session() -> frozenset[int]:
    """Children of this process in its own session, dead ones too: started by itself, for reasons of its own.

    Ranks have sessions of their own, so that what is adopted from them is never among these.
    """
    own, session, children = os.getpid(), os.getsid(0), set()
    for process in all_processes():
        if process.parent == own:
            with contextlib.suppress(OSError):
                if os.getsid(process.pid) == session:
                    children.add(process.pid)
    return frozenset(children)


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal; without one SIGUSR1 would end it."""
    return bool(int(status_fields(pid).get("SigCgt", "0"), 16) >> (number - 1) & 1)


def status_fields(pid: int | str) -> dict[str, str]:
    """What the kernel says about a process, by name; nothing if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def kernel_number(path: Path, name: str) -> int | None:
    """The number in the row `name` of a file below /proc or /sys; None if the file or the row is not there."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] == [name]:
                return int(words[1])
    return None


# One thread per process: jobs are the parallelism, and sums are taken in one order whatever the machine.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


def run_in_processes(
    work: Callable[[_Job], _Result],
    jobs: Sequence[_Job],
    num_processes: int,
    on_done: Callable[[_Job, _Result], None],
    *,
    environment: Mapping[str, str] = ONE_THREAD,
    start: tuple[Callable[..., None], tuple[Any, ...]] | None = None,
    who: str = "a process",
) -> None:
    """Do `work` on each job in `num_processes` processes; `on_done` is called here as each one is done.

    start: a function and its arguments, called once in each process. The first error ends it all after the jobs that
    are being done. who: how a process that died is called.
    """
    # Imported here: the wrapper of each rank imports this module, and stays small.
    import multiprocessing
    from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
    from concurrent.futures.process import BrokenProcessPool

    running: dict[Future[_Result], _Job] = {}

    def collect() -> None:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            job = running.pop(future)
            on_done(job, future.result())

    if not jobs:
        return
    # A spawned process starts as `python -c ...`, which imports from the current directory first.
    with _environment({**environment, "PYTHONSAFEPATH": "1"}):
        pool = ProcessPoolExecutor(
            max_workers=min(num_processes, len(jobs)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=start or (bool, ()),
        )
        try:
            for job in jobs:
                running[pool.submit(work, job)] = job
                # Few are queued at a time, so that an interruption does not have to cancel thousands.
                if len(running) >= 2 * num_processes:
                    collect()
            while running:
                collect()
        except BrokenProcessPool as error:
            raise MachineError(
                f"{who} died without an error of its own (killed, or out of memory)",
                hint="what is finished is kept: run the same command again, with fewer --processes if memory ran out",
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _start(function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    # An interrupt from the keyboard reaches the whole group; the parent decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    function(*arguments)


def _leave_with_parent() -> None:
    # A pool's worker waits forever for its next job if the parent was killed.
    import multiprocessing.connection

    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_UNLIMITED = 2**62
# Far above what a run needs. Some hosts have a hard limit of a thousand million, and programs that walk through all
# numbers up to the limit (to close what they inherited) would then take minutes to start.
MAX_OPEN_FILES = 2**20


def raise_open_files(needed: int = MAX_OPEN_FILES) -> tuple[int, int]:
    """Raise the soft limit of this process, which its children inherit, to `needed` where the hard limit allows it.

    Returns the new (soft, hard). A soft limit of 1024 is the usual default, kept for the sake of old programs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        soft if soft != resource.RLIM_INFINITY else _UNLIMITED,
        hard if hard != resource.RLIM_INFINITY else _UNLIMITED,
    )
