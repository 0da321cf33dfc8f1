"""Writes generated trajectories in PDEBench's HDF5 layouts: trajectories of train, valid and test one after another.

A PDEBench file has one value of each parameter, in its attributes and its name, so parameters are given and not drawn
here. Kuramoto-Sivashinsky and the vorticity form of Navier-Stokes have no PDEBench layout.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np

from ups.errors import ConfigError, MachineError
from ups.record.atomic import machine_error, sync_parents, temporary_name
from ups.solvers.problem import Solution, cell_centers
from ups.solvers.request import Request, make_request

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
    return make_request(
        request.task,
        trajectories=request.trajectories,
        resolution=request.resolution,
        num_frames=request.num_frames,
        seed=request.seed,
        fixed=fixed,
    )


def pdebench_name(request: Request) -> str:
    """File name as PDEBench would call it; every parameter must be given."""
    return _NAMES[request.task][0].format(**request.fixed)


class PdebenchFile:
    """One HDF5 file, which appears under its name when it is complete."""

    def __init__(self, path: Path, request: Request, provenance: dict[str, Any]) -> None:
        self._path, self._request = path, request
        self._temporary = temporary_name(path)
        self._row = 0
        self._file = h5py.File(self._temporary, "w")
        self._file.attrs[_PROVENANCE] = json.dumps({k: provenance[k] for k in ("generator", "version", "identity")})
        for name, attribute in _NAMES[request.task][1].items():
            self._file.attrs[attribute] = float(request.fixed[name])
        if request.task == "euler1d":
            self._file.attrs["eta"], self._file.attrs["zeta"] = 0.0, 0.0
        self._make_datasets()

    @staticmethod
    def provenance(path: Path) -> dict[str, Any]:
        """What this module wrote about the origin of a file; empty for other files."""
        try:
            with h5py.File(path, "r") as file:
                found = json.loads(str(file.attrs.get(_PROVENANCE, "{}"))[:10_000])
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def append(self, solution: Solution) -> None:
        """Add the trajectories of a chunk."""
        try:
            self._append(solution)
        except OSError as error:
            raise machine_error(f"cannot write {self._path}", error) from error

    def _append(self, solution: Solution) -> None:
        rows = slice(self._row, self._row + len(solution.parameters))
        task, file, state = self._request.task, self._file, solution.state
        if task == "darcy2d":
            file["nu"][rows] = solution.static[:, 0]
            file["tensor"][rows] = solution.target
        elif task == "euler1d":
            for channel, name in enumerate(("density", "pressure", "Vx")):
                file[name][rows] = state[:, :, channel]
        elif task in _SETTINGS:
            channels = 1 if task == "swe2d" else state.shape[2]
            for number, trajectory in enumerate(state, start=self._row):
                self._add_group(number, np.moveaxis(trajectory[:, :channels], 1, -1))
        else:
            file["tensor"][rows] = state[:, :, 0]
        self._row = rows.stop

    def _make_datasets(self) -> None:
        request, file = self._request, self._file
        spec = request.bench_task.spec
        count, frames, points = sum(request.trajectories), request.num_frames, request.resolution
        if request.task in _SETTINGS:
            file.attrs["config"] = _SETTINGS[request.task]
            return
        for axis in spec.axes:
            file[f"{axis.name}-coordinate"] = cell_centers(points, axis.extent).astype(np.float32)
        if request.task == "darcy2d":
            file.create_dataset("nu", (count, points, points), np.float32)
            file.create_dataset("tensor", (count, 1, points, points), np.float32)
            return
        # As in PDEBench's 1D files, with one entry more than there are frames.
        file["t-coordinate"] = (spec.dt * np.arange(frames + 1)).astype(np.float32)
        for name in ("density", "pressure", "Vx") if request.task == "euler1d" else ("tensor",):
            file.create_dataset(name, (count, frames, points), np.float32)

    def _add_group(self, number: int, data: np.ndarray[Any, Any]) -> None:
        task = self._request.bench_task
        group = self._file.create_group(f"{number:04d}")
        group.attrs["config"] = _SETTINGS[self._request.task]
        group["data"] = data
        for axis in task.spec.axes:
            group[f"grid/{axis.name}"] = cell_centers(self._request.resolution, axis.extent).astype(np.float32)
        group["grid/t"] = (task.start + task.spec.dt * np.arange(self._request.num_frames)).astype(np.float32)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
            if kind is None:
                self._temporary.replace(self._path)
                sync_parents(self._path)
        except OSError as failure:
            raise machine_error(f"cannot write {self._path}", failure) from failure
        except RuntimeError as failure:  # what h5py raises if the disk is full when it flushes
            raise MachineError(f"cannot write {self._path}: {failure}", hint="is there space on the disk?") from failure
        finally:
            self._temporary.unlink(missing_ok=True)
