"""Jobs in processes that are started fresh, have one thread, and go when their parent goes (standard library only).

Fresh, because what jobs use (JAX, torch with threads) does not survive a fork. What a job has written is its own
business: who is interrupted starts again and leaves out what is done.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from ups.errors import MachineError

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
    if not jobs:
        return
    # A spawned process starts as `python -c ...`, which imports from the current directory first.
    with _environment({**environment, "PYTHONSAFEPATH": "1"}):
        pool = ProcessPoolExecutor(
            max_workers=min(num_processes, len(jobs)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=start or (_nothing, ()),
        )
        running: dict[Future[_Result], _Job] = {}
        try:
            for job in jobs:
                running[pool.submit(work, job)] = job
                # Few are queued at a time, so that an interruption does not have to cancel thousands.
                if len(running) >= 2 * num_processes:
                    _collect(running, on_done)
            while running:
                _collect(running, on_done)
        except BrokenProcessPool as error:
            raise MachineError(
                f"{who} died without an error of its own (killed, or out of memory)",
                hint="what is finished is kept: run the same command again, with fewer --processes if memory ran out",
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _collect(running: dict[Future[_Result], _Job], on_done: Callable[[_Job, _Result], None]) -> None:
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        job = running.pop(future)
        on_done(job, future.result())


def _start(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    # An interrupt from the keyboard reaches the whole group; the parent decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    function(*arguments)


def _nothing() -> None:
    """What a process without preparations does first."""


def _leave_with_parent() -> None:
    # A pool's worker waits forever for its next job if the parent was killed.
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
