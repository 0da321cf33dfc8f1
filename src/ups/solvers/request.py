"""What is asked of a sweep: one task, its size and its seed, checked, with its identity; and how processes solve it."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ups import registry
from ups.errors import ConfigError, DataError
from ups.record.files import write_file_atomically
from ups.record.processes import ONE_THREAD
from ups.solvers.problem import GENERATOR, GENERATOR_VERSION, SPLITS, Draws, Solution, Split
from ups.solvers.tasks import SolverTask, check_size, find_task

BENCH_TRAJECTORIES = (512, 64, 64)
SMALL_TRAJECTORIES = (32, 8, 8)
MAX_TRAJECTORIES = 10_000_000


@dataclass(frozen=True, slots=True)
class Chunk:
    """Trajectories that are solved together: number of the chunk in its split, and how many of it are stored."""

    split: Split
    number: int
    count: int


@dataclass(frozen=True, slots=True)
class Request:
    """One task to generate. Equal requests give equal data (up to solver bits between machines)."""

    task: str
    resolution: int
    num_frames: int
    trajectories: tuple[int, int, int]
    seed: int = 0
    fixed: Mapping[str, float] = field(default_factory=dict)
    # Parameters that are drawn from another range than that of the task: (smallest, largest).
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def bench_task(self) -> SolverTask:
        """The task, with the ranges that were asked for."""
        task = find_task(self.task)
        if not self.ranges:
            return task
        ranges = {p.name: (p.minimum, p.maximum) for p in task.spec.parameters} | dict(self.ranges)
        parameters = tuple(
            replace(p, minimum=ranges[p.name][0], maximum=ranges[p.name][1]) for p in task.spec.parameters
        )
        return replace(task, spec=replace(task.spec, parameters=parameters))

    def identity(self) -> str:
        """Hash of generator, version and everything that was asked for: the name of this data set."""
        content = {"generator": GENERATOR, "version": GENERATOR_VERSION, **self.to_json()}
        origin = registry.TASKS.origin(self.task)
        if not origin.is_ours:
            content["solver"] = str(origin)  # the solver of another package has versions of its own
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        # Without ranges as before there were any: data sets keep their names.
        content = {name: value for name, value in asdict(self).items() if name != "ranges" or value}
        return json.loads(json.dumps(content))  # type: ignore[no-any-return]

    def chunks(self) -> Iterator[Chunk]:
        """All chunks, in the order of the store."""
        size = self.bench_task.trajectories_per_chunk
        for split, count in zip(SPLITS, self.trajectories, strict=True):
            for number in range(-(-count // size)):
                yield Chunk(split, number, min(size, count - number * size))

    def solve(self, chunk: Chunk) -> Solution:
        """The stored trajectories of a chunk.

        A chunk is always solved whole, so that a trajectory has the same bytes however many are asked for.
        """
        task = self.bench_task
        size = task.trajectories_per_chunk
        numbers = tuple(range(chunk.number * size, (chunk.number + 1) * size))
        draws = Draws(self.seed, self.task, chunk.split, numbers, self.fixed)
        solution = task.solve(draws, self.resolution, self.num_frames).first(chunk.count)
        self._check_finite(chunk, solution)
        return solution

    def _check_finite(self, chunk: Chunk, solution: Solution) -> None:
        for role, array in solution.arrays().items():
            rows = np.isfinite(array).reshape(array.shape[0], -1).all(axis=1)
            if not rows.all():
                number = chunk.number * self.bench_task.trajectories_per_chunk + int(np.argmin(rows))
                raise DataError(
                    f"the solver of '{self.task}' diverged: {chunk.split} trajectory {number} has {role} values "
                    f"that are not finite (seed {self.seed}, resolution {self.resolution})",
                    hint="choose another resolution or seed",
                )

    def num_bytes(self) -> int:
        """Size of the stored arrays."""
        spec = self.bench_task.spec
        points = math.prod([self.resolution] * spec.num_spatial_dims)
        channels = self.num_frames * spec.num_channels("state") + spec.num_channels("static")
        per_trajectory = 4 * (points * (channels + spec.num_channels("target")) + len(spec.parameters))
        return sum(self.trajectories) * per_trajectory


def make_request(
    task: str,
    *,
    trajectories: tuple[int, int, int] = BENCH_TRAJECTORIES,
    resolution: int | None = None,
    num_frames: int | None = None,
    seed: int = 0,
    fixed: Mapping[str, float] | None = None,
    ranges: Mapping[str, tuple[float, float]] | None = None,
) -> Request:
    """A checked request; sizes that are not given are those of the benchmark. Raises ConfigError."""
    bench = find_task(task)
    resolution = bench.resolution if resolution is None else resolution
    num_frames = bench.num_frames if num_frames is None or bench.spec.steady else num_frames
    check_size(bench, resolution, num_frames)
    if min(trajectories) < 0 or trajectories[0] < 1 or max(trajectories) > MAX_TRAJECTORIES:
        raise ConfigError(
            f"cannot generate {','.join(map(str, trajectories))} trajectories",
            hint=f"give three counts for train, valid and test, with 1 to {MAX_TRAJECTORIES:,} for train",
        )
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed {seed} is not possible", hint="choose a number from 0 to 2^63 - 1")
    known = {p.name: (p.minimum, p.maximum) for p in bench.spec.parameters}
    for name, value in (fixed or {}).items():
        _check_parameter(task, known, name, value)
    for name, (low, high) in (ranges or {}).items():
        _check_parameter(task, known | dict(bench.solvable), name, low, high)
        if name in (fixed or {}):
            raise ConfigError(f"parameter '{name}' has a value and a range", hint="give one of them")
    return Request(task, resolution, num_frames, trajectories, seed, dict(fixed or {}), dict(ranges or {}))


def _check_parameter(task: str, known: Mapping[str, tuple[float, float]], name: str, *values: float) -> None:
    """Raises ConfigError for a parameter that the task does not have, or values that the solver is not made for."""
    if name not in known:
        has = f"it has {', '.join(known)}" if known else "it has no parameters"
        raise ConfigError(f"task '{task}' has no parameter '{name}'", hint=has)
    low, high = known[name]
    ascending = all(a < b for a, b in itertools.pairwise(values))
    if not ascending or not low <= values[0] or not values[-1] <= high:
        raise ConfigError(
            f"parameter '{name}' of task '{task}' cannot be {' to '.join(f'{value:g}' for value in values)}",
            hint=f"choose from {low:g} to {high:g}, of a range the smaller value first: the solver is made for that",
        )


WORKER_ENVIRONMENT = {
    **ONE_THREAD,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}

Job = tuple[Request, Chunk, Path]


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


def solve_and_commit(job: Job) -> None:
    """What a process of a sweep does with a chunk."""
    request, chunk, directory = job
    buffer = io.BytesIO()
    arrays = request.solve(chunk).arrays()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    write_file_atomically(chunk_file(directory, chunk), buffer.getvalue())
