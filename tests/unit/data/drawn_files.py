"""Files as strangers write them, drawn at random: names, order of axes, units, attributes, format; known physics."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import xarray

FIELD_NAMES = ("u", "temperature", "rho", "h", "conc", "psi", "Field A", "vorticity", "q1", "T2m", "φ", "press")
TRAJECTORY_NAMES = ("sample", "sim", "trajectory", "member", "realization", "case", "batch", "run_id")
TIME_NAMES = ("time", "t", "times", "frame", "snapshot")
SPACE_NAMES = (("x", "y"), ("X", "Y"), ("lon", "lat"), ("xc", "yc"), ("x_coord", "y_coord"))
PARAMETER_NAMES = ("nu", "Re", "kappa", "speed", "forcing amplitude", "D", "alpha", "beta_2")
UNITS = ("m/s", "K", "kg m-3", "Pa", "")
TIME_UNITS = ("s", "h", "seconds since 2000-01-01", "days", "")
LENGTH_UNITS = ("m", "km", "degrees_east", "")
BOUNDARIES = ("periodic", "dirichlet", "neumann", "wall")


@dataclass
class Drawn:
    """A file and what is true about it."""

    path: Path
    boundaries: tuple[str, ...]
    dt: float
    num_fields: int
    parameters: dict[str, Any]
    extents: tuple[float, ...]
    words: str = ""
    shape: dict[str, int] = field(default_factory=dict)


def draw_file(folder: Path, seed: int) -> Drawn:
    """One file. What it holds is a sum of modes that each boundary kind allows, moving and decaying in time."""
    rng = np.random.default_rng(seed)
    dims = int(rng.integers(1, 3))
    count, frames = int(rng.integers(10, 25)), int(rng.integers(12, 40))
    sizes = [
        int(n) for n in rng.choice([48, 64, 80, 96, 100, 128] if dims == 1 else [24, 32, 40, 48], dims, replace=False)
    ]
    kinds = [str(rng.choice(BOUNDARIES)) for _ in range(dims)]
    if dims == 2 and "wall" in kinds:
        kinds = ["wall", "wall"]
    extents = [float(rng.choice([1.0, 2 * np.pi, 10.0, 0.25])) for _ in range(dims)]
    dt = float(rng.choice([0.01, 0.05, 0.1, 0.5, 1.0, 3.0]))
    num_fields = 2 if "wall" in kinds else int(rng.integers(1, 3))
    placement = str(rng.choice(["nodes", "cells"]))
    grids = [_points(n, e, kind, placement) for n, e, kind in zip(sizes, extents, kinds, strict=True)]
    fields = _values(rng, count, frames, kinds, grids, extents, num_fields)
    names = [str(n) for n in rng.choice(FIELD_NAMES, num_fields, replace=False)]
    parameters: dict[str, Any] = {}
    for name in rng.choice(PARAMETER_NAMES, int(rng.integers(0, 3)), replace=False):
        constant = bool(rng.random() < 0.4)
        parameters[str(name)] = float(rng.uniform(0.1, 5)) if constant else rng.uniform(0.1, 5, count)
    space = list(SPACE_NAMES[rng.integers(len(SPACE_NAMES))][:dims])
    labels = [str(rng.choice(TRAJECTORY_NAMES)), str(rng.choice(TIME_NAMES)), *space]
    kind = str(rng.choice(["npz", "h5", "nc", "zarr", "groups"]))
    # Space after time and in any order, as arrays without named dimensions have it; named ones may have any order.
    order = [0, 1, *(2 + rng.permutation(dims)).tolist()]
    if kind in ("nc", "zarr"):
        order = rng.permutation(dims + 2).tolist()
    elif rng.random() < 0.25 and kind != "groups":
        order = [1, 0, *order[2:]]
    times = rng.choice([0.0, 2.0]) + np.arange(frames) * dt
    how = str(rng.choice(["coordinate", "coordinate", "attribute", "longer", "rows"]))
    if kind in ("nc", "zarr"):
        how = "coordinate"
    elif kind == "npz" and how == "attribute":
        how = "scalar"
    made = _File(rng, names, [f.transpose(order) for f in fields], [labels[i] for i in order], labels)
    path = folder / f"file_{seed}.{'h5' if kind == 'groups' else kind}"
    made.write(kind, path, grids, times, dt, how, parameters, count)
    shape = dict(zip(("trajectory", "time", *space), (count, frames, *sizes), strict=True))
    words = f"{kind} {kinds} {placement} time by {how} order {[labels[i] for i in order]} {sizes} {num_fields} fields"
    return Drawn(path, tuple(kinds), dt, num_fields, parameters, tuple(extents), words, shape)


def _points(size: int, extent: float, kind: str, placement: str) -> Any:
    if kind == "periodic":
        return np.arange(size) * extent / size
    if placement == "nodes":
        return np.linspace(0, extent, size)
    return (np.arange(size) + 0.5) * extent / size


def _values(
    rng: np.random.Generator,
    count: int,
    frames: int,
    kinds: list[str],
    grids: list[Any],
    extents: list[float],
    fields: int,
) -> list[Any]:
    """(N, T, *S) of each field."""
    arrays = []
    t = np.arange(frames) / frames
    for number in range(fields):
        total = np.zeros((count, frames, *map(len, grids)), np.float64)
        for _ in range(4):
            amplitude = rng.normal(size=(count, 1))
            rate, speed, phase = rng.uniform(0, 1), rng.uniform(0.3, 1), rng.uniform(0, 6, (count, 1))
            in_time = amplitude * np.exp(-rate * t) * np.cos(2 * np.pi * speed * t + phase)
            part = in_time.reshape(count, frames, *[1] * len(grids))
            for axis, (kind, x, extent) in enumerate(zip(kinds, grids, extents, strict=True)):
                k = rng.integers(1, 5, (count, 1, 1))
                position = (x / extent)[None, None]
                if kind == "periodic":
                    shift = rng.uniform(0, 1, (count, 1, 1)) + rng.uniform(-0.5, 0.5) * t[None, :, None]
                    mode = np.sin(2 * np.pi * k * (position + shift))
                else:
                    odd = kind == "dirichlet" or (kind == "wall" and number == 1)
                    mode = (np.sin if odd else np.cos)(np.pi * k * position)
                shape = [mode.shape[0], mode.shape[1], *[1] * len(grids)]
                shape[2 + axis] = len(x)
                part = part * mode.reshape(shape)
            total = total + part
        total += float(rng.choice([0.0, 1.0])) if kinds == ["periodic"] * len(kinds) else 0.0
        arrays.append(total.astype(rng.choice(["f4", "f8"])))
    return arrays


@dataclass
class _File:
    rng: np.random.Generator
    names: list[str]
    fields: list[Any]
    dims: list[str]
    labels: list[str]

    def write(
        self,
        kind: str,
        path: Path,
        grids: list[Any],
        times: Any,
        dt: float,
        how: str,
        parameters: dict[str, Any],
        count: int,
    ) -> None:
        rng = self.rng
        space = dict(zip(self.labels[2:], grids, strict=True))
        unit = str(rng.choice(LENGTH_UNITS))
        if kind in ("nc", "zarr"):
            variables = {
                n: (self.dims, f, _units(str(rng.choice(UNITS)))) for n, f in zip(self.names, self.fields, strict=True)
            }
            constant = {k: v for k, v in parameters.items() if isinstance(v, float)}
            rows = {k: ((self.labels[0],), v) for k, v in parameters.items() if not isinstance(v, float)}
            coordinates = {k: ((k,), v, _units(unit)) for k, v in space.items()}
            coordinates[self.labels[1]] = ((self.labels[1],), times, _units(str(rng.choice(TIME_UNITS))))
            dataset = xarray.Dataset(variables | rows, coordinates, constant | {"title": "of a stranger", "seed": 3})
            if kind == "nc":
                dataset.to_netcdf(path, engine="h5netcdf", invalid_netcdf=False)
            else:
                dataset.to_zarr(path, zarr_format=int(rng.choice([2, 3])), consolidated=False)
            return
        arrays: dict[str, Any] = dict(space)
        time_name = self.labels[1] if self.labels[1] not in ("frame", "snapshot") else "time"
        if how == "longer":
            arrays[time_name] = np.append(times, times[-1] + dt)
        elif how == "rows":
            arrays[time_name] = np.tile(times, (count, 1))
        elif how == "coordinate":
            arrays[time_name] = times
        if kind == "npz":
            arrays |= dict(zip(self.names, self.fields, strict=True)) | parameters
            arrays |= {"dt": np.float64(dt)} if how == "scalar" else {}
            np.savez(path, **arrays)
            return
        with h5py.File(path, "w") as file:
            file.attrs["description"] = "of a stranger"
            file.attrs["seed"] = 7
            if how in ("attribute", "scalar"):
                file.attrs["dt"] = dt
            if kind == "groups":
                for number in range(count):
                    group = file.create_group(f"run_{number}")
                    for name, values in zip(self.names, self.fields, strict=True):
                        group[name] = values[number]
                    for name, value in parameters.items():
                        group.attrs[name] = value if isinstance(value, float) else value[number]
                    for name, value in arrays.items():
                        group[name] = value[number] if name == time_name and how == "rows" else value
                return
            for name, values in (dict(zip(self.names, self.fields, strict=True)) | arrays).items():
                file[name] = values
            for name, value in parameters.items():
                if isinstance(value, float):
                    file.attrs[name] = value
                else:
                    file[name] = value


def _units(unit: str) -> dict[str, str]:
    return {"units": unit} if unit else {}
