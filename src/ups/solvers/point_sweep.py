"""Writes tasks on points: a directory with `task.yaml`, and train, valid and test with an `.npz` for each trajectory.

A sweep that was killed continues where it was: a file is there whole or not at all.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ups.errors import ConfigError
from ups.formats.mesh_files import write_mesh_file
from ups.record.files import machine_errors, read_object, write_file_atomically
from ups.record.processes import run_in_processes
from ups.solvers.points import POINT_TASKS
from ups.solvers.problem import GENERATOR_VERSION, SPLITS, Draws, Split, require_solvers
from ups.solvers.request import WORKER_ENVIRONMENT

PER_JOB = 8
_MARKER = "generated.json"


@dataclass(frozen=True, slots=True)
class _Job:
    task: str
    seed: int
    split: Split
    numbers: tuple[int, ...]
    folder: Path


def generate_points(
    task: str,
    out: Path,
    *,
    trajectories: Sequence[int],
    seed: int = 0,
    num_processes: int = 1,
    overwrite: bool = False,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, Any]:
    """Make `out/task`; files that were made before by the same request are kept. Returns facts of it.

    Raises ConfigError if another data set is there.
    """
    require_solvers("`ups data generate`")
    folder, started = out / task, time.monotonic()
    request = {"task": task, "trajectories": list(trajectories), "seed": seed, "version": GENERATOR_VERSION}
    if folder.exists() and read_object(folder / _MARKER) != request:
        if not overwrite:
            raise ConfigError(
                f"{folder} is another data set than the one asked for",
                hint="choose another --out, or replace it with --overwrite",
            )
        shutil.rmtree(folder)
    with machine_errors(f"cannot write {folder}"):
        for split in SPLITS:
            (folder / split).mkdir(parents=True, exist_ok=True)
        write_file_atomically(folder / _MARKER, json.dumps(request).encode())
        axes = [{"name": name, "extent": 1.0} for name in "xy"]
        described = yaml.safe_dump({"name": task, **POINT_TASKS[task][1], "axes": axes}, sort_keys=False)
        write_file_atomically(folder / "task.yaml", described.encode())
    jobs = []
    for split, count in zip(SPLITS, trajectories, strict=True):
        missing = [n for n in range(count) if not _path(folder, split, n).exists()]
        parts = (tuple(missing[first : first + PER_JOB]) for first in range(0, count, PER_JOB))
        jobs += [_Job(task, seed, split, part, folder) for part in parts if part]
    done: list[int] = []

    def on_done(job: _Job, _: None) -> None:
        done.extend(job.numbers)
        if on_progress is not None:
            on_progress(len(done), sum(len(job.numbers) for job in jobs), task)

    run_in_processes(_solve, jobs, num_processes, on_done, environment=WORKER_ENVIRONMENT, who="a solver process")
    size = sum(file.stat().st_size for split in SPLITS for file in (folder / split).iterdir())
    seconds = round(time.monotonic() - started, 2)
    return {"task": task, "path": str(folder), "kept": not jobs, "bytes": size, "seconds": seconds, "request": request}


def _solve(job: _Job) -> None:
    for number in job.numbers:
        mesh = POINT_TASKS[job.task][0](Draws(job.seed, job.task, job.split, (number,)))
        write_mesh_file(_path(job.folder, job.split, number), mesh)


def _path(folder: Path, split: str, number: int) -> Path:
    return folder / split / f"{number:06d}.npz"
