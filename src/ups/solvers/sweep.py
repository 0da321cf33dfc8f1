"""Generates data sets: chunks solved in parallel and committed one by one, then written as a store.

A sweep that was killed continues where it was: a chunk is on disk whole or not at all, and the store appears in
one instant. The bytes do not depend on the number of processes, on the order of chunks or on interruptions.

Solver bits differ between processors and library versions. So two copies of a data set are the same if generator,
version and request agree and their summary statistics agree within a tolerance; byte hashes are kept as information.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ups import registry
from ups.errors import ConfigError, DataError, MachineError
from ups.formats.store_writer import StoreWriter
from ups.formats.zarr_store import read_store_attributes
from ups.record.files import (
    hold_partial,
    machine_errors,
    read_object,
    write_file_atomically,
)
from ups.record.processes import run_in_processes
from ups.solvers.problem import GENERATOR, GENERATOR_VERSION, SPLITS, Solution, Split, cell_centers, require_solvers
from ups.solvers.request import WORKER_ENVIRONMENT, Job, Request, chunk_file, read_chunk, solve_and_commit
from ups.spec.descriptors import Moments, by_channel
from ups.spec.task import Role, TaskSpec

# committed chunks of a task, all chunks of it, name of the task
Progress = Callable[[int, int, str], None]
LIBRARIES = ("numpy", "scipy", "jax", "jaxlib", "exponax", "scikit-fem")


@dataclass(frozen=True, slots=True)
class Generated:
    """One finished data set. kept: it was there already; seconds: time from the first chunk to the commit."""

    request: Request
    path: Path
    kept: bool
    num_bytes: int
    seconds: float
    summary: dict[str, Any]


def generate(
    requests: Sequence[Request],
    out: Path,
    *,
    num_processes: int = 1,
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> list[Generated]:
    """Make every data set that is asked for below `out`; those that are there already are kept.

    Raises ConfigError if another data set has that name, MachineError if the disk is full or a process dies (what is
    committed stays), MissingExtraError without the packages that the solvers need.
    """
    if any(registry.TASKS.origin(request.task).is_ours for request in requests):
        require_solvers("`ups data generate`")
    if num_processes < 1:
        raise ConfigError(f"{num_processes} processes cannot do anything", hint="give --processes 1 or more")
    with machine_errors(f"cannot make the directory {out}"):
        out.mkdir(parents=True, exist_ok=True)
    if len({request.task for request in requests}) < len(requests):
        raise ConfigError("one task is asked for twice", hint="generate the two data sets into two directories")
    with contextlib.ExitStack() as stack:
        sweeps = [_Sweep(request, out, overwrite) for request in requests]
        for sweep in sweeps:
            stack.enter_context(sweep.lock())
        _check_space(out, [s for s in sweeps if not s.kept])
        return _run(sweeps, num_processes, on_progress)


def _run(sweeps: list[_Sweep], num_processes: int, on_progress: Progress | None) -> list[Generated]:
    report = on_progress or (lambda done, total, task: None)
    by_task = {s.request.task: s for s in sweeps}
    jobs: list[Job] = []
    for sweep in sweeps:
        jobs += sweep.open_jobs()
        report(sweep.done, sweep.total, sweep.request.task)
    for sweep in sweeps:
        sweep.finish_if_complete()

    def on_done(job: Job, _: None) -> None:
        sweep = by_task[job[0].task]
        sweep.done += 1
        report(sweep.done, sweep.total, sweep.request.task)
        sweep.finish_if_complete()

    # The first error ends the sweep after the chunks that are being solved; what is committed stays.
    run_in_processes(
        solve_and_commit, jobs, num_processes, on_done, environment=WORKER_ENVIRONMENT, who="a solver process"
    )
    return [s.generated for s in sweeps if s.generated is not None]


class _Sweep:
    """One task on its way to disk: `out/.NAME.partial` holds its chunks until the store is committed."""

    def __init__(self, request: Request, out: Path, overwrite: bool) -> None:
        self.request = request
        name = f"{request.task}.zarr"
        self.path = out / name
        self.partial = out / f".{name}.partial"
        self.total = sum(1 for _ in request.chunks())
        self.done = 0
        self._overwrite = overwrite
        self._started = time.monotonic()
        self.generated = self._what_is_there()
        self.kept = self.generated is not None

    def _what_is_there(self) -> Generated | None:
        """The data set, if it was made before."""
        if not self.path.exists():
            return None
        origin = read_store_attributes(self.path).get("generator")
        if isinstance(origin, dict) and origin.get("identity") == self.request.identity():
            self.done = self.total
            return self._result(origin.get("summary", {}), kept=True)
        if not self._overwrite:
            raise ConfigError(
                f"{self.path} is another data set than the one asked for",
                hint="choose another --out, or replace it with --overwrite",
            )
        return None

    def _result(self, summary: dict[str, Any], *, kept: bool) -> Generated:
        seconds = 0.0 if kept else time.monotonic() - self._started
        return Generated(self.request, self.path, kept, self.request.num_bytes(), seconds, summary)

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Hold the partial directory, if there is anything to make."""
        return contextlib.nullcontext() if self.kept else hold_partial(self.partial, f"generating {self.path}")

    def open_jobs(self) -> list[Job]:
        """The chunks that are not committed yet."""
        if self.kept:
            return []
        marker = self.partial / "request.json"
        wanted = {"identity": self.request.identity(), **self.request.to_json()}
        if read_object(marker) != wanted:
            for old in self.partial.glob("*.npz"):
                old.unlink()
            write_file_atomically(marker, json.dumps(wanted, indent=1).encode())
        jobs: list[Job] = []
        for chunk in self.request.chunks():
            if read_chunk(chunk_file(self.partial, chunk), chunk.count) is None:
                jobs.append((self.request, chunk, self.partial))
            else:
                self.done += 1
        return jobs

    def finish_if_complete(self) -> None:
        """Write the store once every chunk is committed."""
        if self.done < self.total or self.generated is not None:
            return
        summary = self._summarize()
        provenance = {
            "generator": GENERATOR,
            "version": GENERATOR_VERSION,
            "identity": self.request.identity(),
            "request": self.request.to_json(),
            "solver": self.request.bench_task.solver_name,
            "reduction": self.request.bench_task.reduction,
            "choices": self.request.bench_task.choices,
            "libraries": _library_versions(),
            "summary": summary,
        }
        self._write_store(provenance)
        self.generated = self._result(summary, kept=False)
        shutil.rmtree(self.partial, ignore_errors=True)

    def _solutions(self) -> Iterator[tuple[Split, Solution]]:
        for chunk in self.request.chunks():
            solution = read_chunk(chunk_file(self.partial, chunk), chunk.count)
            if solution is None:
                raise DataError(
                    f"chunk {chunk.number} of {chunk.split} of {self.path} was damaged after it was committed",
                    hint="run the same command again: it will be solved again",
                )
            yield chunk.split, solution

    def _summarize(self) -> dict[str, Any]:
        summaries: dict[str, Summary] = {}
        for split, solution in self._solutions():
            summaries.setdefault(split, Summary(self.request.bench_task.spec)).add(solution)
        return {split: summaries[split].to_json() for split in SPLITS if split in summaries}

    def _write_store(self, provenance: dict[str, Any]) -> None:
        task = self.request.bench_task
        coordinates = [cell_centers(self.request.resolution, axis.extent) for axis in task.spec.axes]
        times = task.start + task.spec.dt * np.arange(self.request.num_frames)
        options: dict[str, Any] = {"times": times, "generator": provenance, "overwrite": self._overwrite}
        with StoreWriter(self.path, task.spec, coordinates, self.request.num_frames, **options) as writer:
            for split, solution in self._solutions():
                for row in range(len(solution.parameters)):
                    writer.append(split, **{role: values[row] for role, values in solution.arrays().items()})


def _library_versions() -> dict[str, str]:
    """Of those that are installed: a solver of another package may need none of them."""
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _check_space(out: Path, sweeps: list[_Sweep]) -> None:
    # Chunks and the store exist together until the commit; tasks are finished one after the other.
    needed = sum(s.request.num_bytes() for s in sweeps) + max((s.request.num_bytes() for s in sweeps), default=0)
    free = shutil.disk_usage(out).free
    if needed > free:
        raise MachineError(
            f"{out} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are needed",
            hint="choose another --out, fewer --trajectories or a smaller --resolution",
        )


class Summary:
    """Mean, standard deviation, range and root mean square change per frame of each channel of one split."""

    def __init__(self, spec: TaskSpec) -> None:
        self._spec = spec
        self._moments: dict[str, Moments] = {}
        self._hashes = {role: hashlib.sha256() for role in ("state", "static", "target", "parameters")}

    def add(self, solution: Solution) -> None:
        """Take in the trajectories of a chunk, in the order of the store."""
        for role, array in solution.arrays().items():
            if not array.size:
                continue
            self._hashes[role].update(np.ascontiguousarray(array).data)
            self._take(role, by_channel(array, 2 if role == "state" else 1))
            if role == "state":
                self._take("change", by_channel(np.diff(array.astype(np.float64), axis=1), 2))

    def _take(self, role: str, values: np.ndarray[Any, Any]) -> None:
        self._moments.setdefault(role, Moments(len(values), allow_nonfinite=True)).add(values)

    def to_json(self) -> dict[str, Any]:
        """{role: {channel: {mean, std, minimum, maximum[, change_rms]}}, sha256: {role: hash}}."""
        out: dict[str, Any] = {}
        names = {role: self._spec.channel_names(role) for role in get_args(Role)}
        names["parameters"] = tuple(p.name for p in self._spec.parameters)
        for role, channels in names.items():
            if role not in self._moments:
                continue
            moments = self._moments[role]
            rows = zip(channels, moments.mean, moments.std(), moments.minimum, moments.maximum, strict=True)
            out[role] = {
                name: {"mean": mean, "std": std, "minimum": low, "maximum": high} for name, mean, std, low, high in rows
            }
        if "change" in self._moments:
            for name, rms in zip(names["state"], self._moments["change"].rms, strict=True):
                out["state"][name]["change_rms"] = rms
        out["sha256"] = {role: digest.hexdigest() for role, digest in self._hashes.items() if role in out}
        return out
