"""Solver processes: started fresh (JAX does not survive a fork), one thread each, gone when their parent is gone."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from ups.errors import MachineError
from ups.record.atomic import write_file_atomically
from ups.solvers.problem import Solution
from ups.solvers.request import Chunk, Request

# One thread per process: chunks are the parallelism, and sums are taken in one order whatever the machine.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}

Job = tuple[Request, Chunk, Path]


def run_jobs(jobs: Sequence[Job], num_processes: int, on_done: Callable[[Job], None]) -> None:
    """Solve and commit chunks in `num_processes` processes; `on_done` is called here as each one is on disk.

    The first error ends the sweep after the chunks that are being solved; what is committed stays.
    """
    if not jobs:
        return
    with _environment(WORKER_ENVIRONMENT):
        pool = ProcessPoolExecutor(
            max_workers=min(num_processes, len(jobs)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
        )
        waiting = iter(jobs)
        running: dict[Future[None], Job] = {}
        try:
            for job in waiting:
                running[pool.submit(_solve_and_commit, job)] = job
                # Few are queued at a time, so that an interruption does not have to cancel thousands.
                if len(running) < 2 * num_processes:
                    continue
                _collect(running, on_done)
            while running:
                _collect(running, on_done)
        except BrokenProcessPool as error:
            raise MachineError(
                "a solver process died without an error of its own (killed, or out of memory)",
                hint="finished chunks are kept: run the same command again, with fewer --processes if memory ran out",
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _collect(running: dict[Future[None], Job], on_done: Callable[[Job], None]) -> None:
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        job = running.pop(future)
        future.result()
        on_done(job)


def chunk_file(directory: Path, chunk: Chunk) -> Path:
    """Where a committed chunk lies."""
    return directory / f"{chunk.split}-{chunk.number:07d}.npz"


def read_chunk(path: Path, count: int) -> Solution | None:
    """A committed chunk; None if it is not there, damaged, or not of `count` trajectories."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            solution = Solution(arrays["state"], arrays["static"], arrays["target"], arrays["parameters"])
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    return solution if all(a.shape[:1] == (count,) for a in solution.arrays().values()) else None


def _solve_and_commit(job: Job) -> None:
    request, chunk, directory = job
    buffer = io.BytesIO()
    arrays = request.solve(chunk).arrays()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    write_file_atomically(chunk_file(directory, chunk), buffer.getvalue())


def _start_worker() -> None:
    # An interrupt from the keyboard reaches the whole group; the parent decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    # A pool's worker waits forever for its next job if the parent was killed.
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
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
