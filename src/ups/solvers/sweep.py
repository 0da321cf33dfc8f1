"""Generates data sets: chunks solved in parallel and committed one by one, then written as a store or a PDEBench file.

A sweep that was killed continues where it was: a chunk is on disk whole or not at all, and the final file appears in
one instant. The bytes do not depend on the number of processes, on the order of chunks or on interruptions.

Solver bits differ between processors and library versions. So two copies of a data set are the same if generator,
version and request agree and their summary statistics agree within a tolerance; byte hashes are kept as information.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import h5py
import numpy as np

from ups import registry
from ups.errors import ConfigError, DataError, MachineError
from ups.formats.store_writer import StoreWriter
from ups.formats.zarr_store import read_store_attributes
from ups.record.files import (
    hold_partial,
    machine_error,
    machine_errors,
    read_object,
    sync_parents,
    temporary_name,
    write_file_atomically,
)
from ups.record.processes import run_in_processes
from ups.solvers.problem import GENERATOR, GENERATOR_VERSION, SPLITS, Solution, Split, cell_centers, require_solvers
from ups.solvers.request import WORKER_ENVIRONMENT, Job, Request, chunk_file, read_chunk, solve_and_commit
from ups.spec.descriptors import Moments, by_channel
from ups.spec.task import Role, TaskSpec

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
        require_solvers("`ups data generate`")
    if num_processes < 1:
        raise ConfigError(f"{num_processes} processes cannot do anything", hint="give --processes 1 or more")
    with machine_errors(f"cannot make the directory {out}"):
        out.mkdir(parents=True, exist_ok=True)
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
    """One task on its way to disk: `out/.NAME.partial` holds its chunks until the final file is committed."""

    def __init__(self, request: Request, out: Path, format: Format, overwrite: bool) -> None:
        self.request, self.format = request, format
        name = f"{request.task}.zarr" if format == "store" else pdebench_name(request)
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
        if self.format == "store":
            origin = read_store_attributes(self.path).get("generator")
        else:
            origin = pdebench_origin(self.path)
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
        """Write the final file once every chunk is committed."""
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
        if self.format == "store":
            self._write_store(provenance)
        else:
            write_pdebench(self.path, self.request, provenance, (solution for _, solution in self._solutions()))
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
    # Chunks and the final file exist together until the commit; tasks are finished one after the other.
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


# PDEBench's HDF5 layouts: trajectories of train, valid and test one after another. A file has one value of each
# parameter, in its attributes and its name: parameters are given and not drawn. Kuramoto-Sivashinsky and the vorticity
# form of Navier-Stokes have no such layout.
# task -> (file name, attribute of each parameter)
_NAMES = {
    "advection1d": ("1D_Advection_Sols_beta{beta}.hdf5", {"beta": "beta"}),
    "burgers1d": ("1D_Burgers_Sols_Nu{nu}.hdf5", {"nu": "Nu"}),
    "reacdiff1d": ("ReacDiff_Nu{nu}_Rho{rho}.hdf5", {"nu": "Nu", "rho": "rho"}),
    "euler1d": ("1D_CFD_Shock_Eta0.0_Zeta0.0_trans_Train.hdf5", {}),
    "swe2d": ("2D_rdb_NA_NA.h5", {}),
    "diffreact2d": ("2D_diff-react_NA_NA.h5", {}),
    "darcy2d": ("2D_DarcyFlow_beta{beta}_Train.hdf5", {"beta": "beta"}),
}
_SETTINGS = {
    "swe2d": "sim:\n  gravity: 1.0\n",
    "diffreact2d": "sim:\n  Du: 0.001\n  Dv: 0.005\n  k: 0.005\n",
}
_PROVENANCE = "ups_generator"


def with_given_parameters(request: Request) -> Request:
    """The same request with every parameter given: the middle of its range (of its logarithm) where it is not."""
    spec = request.bench_task.spec
    if request.task not in _NAMES:
        raise ConfigError(
            f"PDEBench has no file layout for task '{request.task}'",
            hint=f"use --format store for it; PDEBench holds {', '.join(_NAMES)}",
        )
    fixed = dict(request.fixed)
    for parameter in spec.parameters:
        low, high = parameter.minimum, parameter.maximum
        middle = math.sqrt(low * high) if parameter.scale == "log" else 0.5 * (low + high)
        fixed.setdefault(parameter.name, float(f"{middle:.3g}"))
    return replace(request, fixed=fixed, ranges={})


def pdebench_name(request: Request) -> str:
    """File name as PDEBench would call it; every parameter must be given."""
    return _NAMES[request.task][0].format(**request.fixed)


def pdebench_origin(path: Path) -> dict[str, Any]:
    """What `write_pdebench` wrote about the origin of a file; empty for other files."""
    try:
        with h5py.File(path, "r") as file:
            origin = json.loads(str(file.attrs.get(_PROVENANCE, "{}"))[:10_000])
    except (OSError, ValueError):
        return {}
    return origin if isinstance(origin, dict) else {}


def write_pdebench(path: Path, request: Request, provenance: dict[str, Any], solutions: Iterable[Solution]) -> None:
    """Write one HDF5 file, which appears under its name when it is complete."""
    temporary = temporary_name(path)
    try:
        with h5py.File(temporary, "w") as file:
            _describe(file, request, provenance)
            first = 0
            for solution in solutions:
                _append(file, request, solution, first)
                first += len(solution.parameters)
        temporary.replace(path)
        sync_parents(path)
    except OSError as error:
        raise machine_error(f"cannot write {path}", error) from error
    except RuntimeError as error:  # what h5py raises if the disk is full when it flushes
        raise MachineError(f"cannot write {path}: {error}", hint="is there space on the disk?") from error
    finally:
        temporary.unlink(missing_ok=True)


def _describe(file: h5py.File, request: Request, provenance: dict[str, Any]) -> None:
    """Write everything but the trajectories."""
    spec = request.bench_task.spec
    file.attrs[_PROVENANCE] = json.dumps({k: provenance[k] for k in ("generator", "version", "identity")})
    for name, attribute in _NAMES[request.task][1].items():
        file.attrs[attribute] = float(request.fixed[name])
    if request.task in _SETTINGS:
        file.attrs["config"] = _SETTINGS[request.task]
        return
    if request.task == "euler1d":
        file.attrs["eta"], file.attrs["zeta"] = 0.0, 0.0
    for axis in spec.axes:
        file[f"{axis.name}-coordinate"] = cell_centers(request.resolution, axis.extent).astype(np.float32)
    if not spec.steady:
        # As in PDEBench's 1D files, with one entry more than there are frames.
        file["t-coordinate"] = (spec.dt * np.arange(request.num_frames + 1)).astype(np.float32)


def _append(file: h5py.File, request: Request, solution: Solution, first: int) -> None:
    """Write the trajectories of a chunk as number `first` and following."""
    state = solution.state
    if request.task in _SETTINGS:
        channels = 1 if request.task == "swe2d" else state.shape[2]
        for number, trajectory in enumerate(state, start=first):
            _add_group(file, request, number, np.moveaxis(trajectory[:, :channels], 1, -1))
        return
    arrays = {"tensor": state[:, :, 0]} if state.size else {"nu": solution.static[:, 0], "tensor": solution.target}
    if request.task == "euler1d":
        arrays = {name: state[:, :, channel] for channel, name in enumerate(("density", "pressure", "Vx"))}
    for name, values in arrays.items():
        if name not in file:
            file.create_dataset(name, (sum(request.trajectories), *values.shape[1:]), np.float32)
        file[name][first : first + len(values)] = values


def _add_group(file: h5py.File, request: Request, number: int, data: np.ndarray[Any, Any]) -> None:
    task = request.bench_task
    group = file.create_group(f"{number:04d}")
    group.attrs["config"] = _SETTINGS[request.task]
    group["data"] = data
    for axis in task.spec.axes:
        group[f"grid/{axis.name}"] = cell_centers(request.resolution, axis.extent).astype(np.float32)
    group["grid/t"] = (task.start + task.spec.dt * np.arange(request.num_frames)).astype(np.float32)
