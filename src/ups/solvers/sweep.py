"""Generates data sets: chunks solved in parallel and committed one by one, then written as a store or a PDEBench file.

A sweep that was killed continues where it was: a chunk is on disk whole or not at all, and the final file appears in
one instant. The bytes do not depend on the number of processes, on the order of chunks or on interruptions.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ups import registry
from ups.errors import ConfigError, DataError, MachineError, MissingExtraError
from ups.formats.store_writer import StoreWriter
from ups.formats.zarr_store import read_store_attributes
from ups.record.atomic import write_file_atomically
from ups.record.partial_directory import hold_partial
from ups.solvers.pdebench_files import PdebenchFile, pdebench_name
from ups.solvers.problem import GENERATOR, GENERATOR_VERSION, SPLITS, Solution, Split, cell_centers
from ups.solvers.request import Request
from ups.solvers.summary import Summary
from ups.solvers.workers import Job, chunk_file, read_chunk, run_jobs

Format = Literal["store", "pdebench"]
# committed chunks of a task, all chunks of it, name of the task
Progress = Callable[[int, int, str], None]
LIBRARIES = ("numpy", "scipy", "jax", "jaxlib", "exponax")


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
    format: Format = "store",
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> list[Generated]:
    """Make every data set that is asked for below `out`; those that are there already are kept.

    Raises ConfigError if another data set has that name, MachineError if the disk is full or a process dies (what is
    committed stays), MissingExtraError without the packages that the solvers need.
    """
    if any(registry.TASKS.origin(request.task).is_ours for request in requests):
        _check_packages()
    if num_processes < 1:
        raise ConfigError(f"{num_processes} processes cannot do anything", hint="give --processes 1 or more")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(f"cannot make the directory {out}: {error.strerror}") from error
    if len({request.task for request in requests}) < len(requests):
        raise ConfigError("one task is asked for twice", hint="generate the two data sets into two directories")
    with contextlib.ExitStack() as stack:
        sweeps = [_Sweep(request, out, format, overwrite) for request in requests]
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

    def on_done(job: Job) -> None:
        sweep = by_task[job[0].task]
        sweep.done += 1
        report(sweep.done, sweep.total, sweep.request.task)
        sweep.finish_if_complete()

    run_jobs(jobs, num_processes, on_done)
    return [s.result() for s in sweeps]


class _Sweep:
    """One task on its way to disk: `out/.NAME.partial` holds its chunks until the final file is committed."""

    def __init__(self, request: Request, out: Path, format: Format, overwrite: bool) -> None:
        self.request, self.format = request, format
        name = f"{request.task}.zarr" if format == "store" else pdebench_name(request)
        self.path = out / name
        self.partial = out / f".{name}.partial"
        self.total = sum(1 for _ in request.chunks())
        self.done = 0
        self.kept = False
        self._overwrite = overwrite
        self._generated: Generated | None = None
        self._started = time.monotonic()
        self._look_at_what_is_there()

    def _look_at_what_is_there(self) -> None:
        if not self.path.exists():
            return
        if self.format == "store":
            found = read_store_attributes(self.path).get("generator")
        else:
            found = PdebenchFile.provenance(self.path)
        found = found if isinstance(found, dict) else {}
        if found.get("identity") == self.request.identity():
            self.kept = True
            self.done = self.total
            summary = found.get("summary")
            self._generated = Generated(
                self.request,
                self.path,
                True,
                self.request.num_bytes(),
                0.0,
                summary if isinstance(summary, dict) else {},
            )
        elif not self._overwrite:
            raise ConfigError(
                f"{self.path} is another data set than the one asked for",
                hint="choose another --out, or replace it with --overwrite",
            )

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Hold the partial directory, if there is anything to make."""
        return contextlib.nullcontext() if self.kept else hold_partial(self.partial, f"generating {self.path}")

    def open_jobs(self) -> list[Job]:
        """The chunks that are not committed yet."""
        if self.kept:
            return []
        marker = self.partial / "request.json"
        wanted = {"identity": self.request.identity(), **self.request.to_json()}
        if _read_json(marker) != wanted:
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
        """Write the final file once every chunk is committed."""
        if self.done < self.total or self._generated is not None:
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
        if self.format == "store":
            self._write_store(provenance)
        else:
            with PdebenchFile(self.path, self.request, provenance) as file:
                for _, solution in self._solutions():
                    file.append(solution)
        self._generated = Generated(
            self.request, self.path, False, self.request.num_bytes(), time.monotonic() - self._started, summary
        )
        shutil.rmtree(self.partial, ignore_errors=True)

    def result(self) -> Generated:
        if self._generated is None:
            raise DataError(f"{self.path} was not finished")
        return self._generated

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
        with StoreWriter(
            self.path,
            task.spec,
            coordinates,
            self.request.num_frames,
            times=times,
            generator=provenance,
            overwrite=self._overwrite,
        ) as writer:
            for split, solution in self._solutions():
                for row in range(len(solution.parameters)):
                    writer.append(
                        split,
                        state=solution.state[row],
                        static=solution.static[row],
                        target=solution.target[row],
                        parameters=solution.parameters[row],
                    )


def _library_versions() -> dict[str, str]:
    """Of those that are installed: a solver of another package may need none of them."""
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _check_packages() -> None:
    for package in ("exponax", "scipy"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError.of("generate", package, "`ups data generate`")


def _check_space(out: Path, sweeps: list[_Sweep]) -> None:
    # Chunks and the final file exist together until the commit; tasks are finished one after the other.
    needed = sum(s.request.num_bytes() for s in sweeps) + max((s.request.num_bytes() for s in sweeps), default=0)
    free = shutil.disk_usage(out).free
    if needed > free:
        raise MachineError(
            f"{out} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are needed",
            hint="choose another --out, fewer --trajectories or a smaller --resolution",
        )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
