"""What a solver process does with a chunk: solve it and commit it."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ups.record.atomic import write_file_atomically
from ups.record.job_processes import ONE_THREAD, run_in_processes
from ups.solvers.problem import Solution
from ups.solvers.request import Chunk, Request

WORKER_ENVIRONMENT = {
    **ONE_THREAD,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}

Job = tuple[Request, Chunk, Path]


def run_jobs(jobs: Sequence[Job], num_processes: int, on_done: Callable[[Job], None]) -> None:
    """Solve and commit chunks in `num_processes` processes; `on_done` is called here as each one is on disk.

    The first error ends the sweep after the chunks that are being solved; what is committed stays.
    """
    run_in_processes(
        _solve_and_commit,
        jobs,
        num_processes,
        lambda job, _: on_done(job),
        environment=WORKER_ENVIRONMENT,
        who="a solver process",
    )


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
