"""How far values between grid points are from a finer solution: `Simulator.query`, cubic splines, and the grid itself.

Run with `OMP_NUM_THREADS=1 python benchmarks/model/query.py --data data` (the data of `ups data generate all`). The
solver of each task solves trajectories of `data` again and keeps its own grid, which is stored in `--finer` and used
again. Values are compared at random points; where averages over cells are stored, with the averages over a cell around
these points. Errors are relative to the RMS of the trajectory, of all channels of a field together.

Columns: the bundle's error on the grid, that of query at the points and the ratio of both; the ratio for what the grid
can hold: where waves are stored, the finer solution without shorter ones; the error of cubic splines; the error of
interpolating the truth, which `ups.solvers.tasks` holds as `interpolation_errors`. The last line is one JSON object.
The exit code is 1 if on advection1d, ks1d or ns2d query differs from trigonometric interpolation by more than 1e-6, or
is more than 1.02 times as far off as the grid from what that can hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import zarr

import ups
from ups.inference.query import Interpolant
from ups.solvers import darcy, diffreact, finite_volume, spectral
from ups.solvers.problem import Draws, cell_centers
from ups.solvers.tasks import TASKS

# Points of the solver for the stored grid: advection1d has none.
FINE = {
    "advection1d": 512,
    "burgers1d": 1024,
    "ks1d": 256,
    "reacdiff1d": 256,
    "euler1d": 512,
    "ns2d": 64,
    "swe2d": 64,
    "diffreact2d": 96,
    "darcy2d": 128,
}
EXACT = ("advection1d", "ks1d", "ns2d")
POINTS = {1: 512, 2: 256}


def solved(name: str, split: Any, count: int) -> np.ndarray:
    """(n, T, C, *F): trajectories on the solver's own grid."""
    task, draws, points = TASKS[name], Draws(0, name, split, tuple(range(count))), FINE[name]
    if name == "darcy2d":
        media = darcy.two_phase_medium(draws, task.resolution, 1.0).repeat(4, 1).repeat(4, 2)
        sources = draws.parameters(task.spec)[:, 0]
        return np.stack([b * darcy.solve(a, np.ones_like(a)) for a, b in zip(media, sources, strict=True)])[
            :, None, None
        ]
    module = next((m for m in (spectral, finite_volume, diffreact) if m.__name__ == task.solver.__module__), spectral)
    with patch.object(module, "solver_points", lambda *_: points):
        return task.solve(draws, points, task.num_frames).state.astype(np.float64)


def waves_at(fine: np.ndarray, places: np.ndarray, axis: Any, dim: int, filtered: int, held: int = 0) -> np.ndarray:
    """Matrix (N, F) from fine values to the waves at places. filtered: stored cells over which averages are taken.
    held: points of a grid, whose waves alone are taken."""
    points = fine.shape[dim]
    x = places / axis.extent
    if axis.periodic:
        modes = np.arange(points // 2)
        weight = np.where(modes == 0, 1, 2) / points
        weight = weight * (np.sinc(modes / filtered) / np.sinc(modes / points) if filtered else 1)
        weight = weight * (modes < held / 2 if held else 1)
        here, there = (np.exp(2j * np.pi * modes * u[:, None]) for u in (x, (np.arange(points) + 0.5) / points))
        return np.asarray(((here * weight) @ there.conj().T).real)
    modes, centers = np.arange(points), (np.arange(points) + 0.5) / points
    size = np.where(modes == 0, 1, 2) / points * (modes < held if held else 1)
    return np.asarray((np.cos(np.pi * modes * x[:, None]) * size) @ np.cos(np.pi * modes[:, None] * centers))


def halved(fine: np.ndarray) -> np.ndarray:
    """Cells of half the size along both axes, by the limited slopes of the solver."""
    for dim in (-1, -2):
        u = np.moveaxis(fine, dim, -1)
        jump, none = np.diff(u), np.zeros_like(u[..., :1])
        slope = finite_volume.limited_slope(np.concatenate([none, jump], -1), np.concatenate([jump, none], -1)) / 4
        fine = np.moveaxis(np.stack([u - slope, u + slope], -1).reshape(*u.shape[:-1], -1), -1, dim)
    return fine


def reference(name: str, fine: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Points (N, D), the finer solution there (n, T, C, N), and what the stored grid can hold of it: its waves, where
    these are stored."""
    task = TASKS[name]
    axes, stored, count = task.spec.axes, task.resolution, POINTS[task.spec.num_spatial_dims]
    if axes[0].periodic or axes[0].boundary == "neumann":
        # One in each part of the first axis, so that the grid's own error is met evenly.
        parts = np.linspace(0, axes[0].extent, count, endpoint=False)
        points = np.stack([random.uniform(0, axis.extent, count) for axis in axes], 1)
        points[:, 0] = parts + points[:, 0] / count
        averaged = stored if task.reduction == "cell averages" else 0
        both = []
        for held in (0, stored if task.reduction == "spectral truncation" else 0):
            values = fine[..., None]
            for dim in range(len(axes), 0, -1):
                matrix = waves_at(fine, points[:, dim - 1], axes[dim - 1], dim - len(axes) - 1, averaged, held)
                values = values[..., 0] @ matrix.T if values.shape[-1] == 1 else (values * matrix.T).sum(-2)
            both.append(values)
        return points, *both
    # Averages over whole cells of the solver, around points between the first and the last stored one.
    fine = halved(fine) if name == "swe2d" else fine
    if name == "euler1d":
        fine = np.moveaxis(finite_volume.conserved(np.moveaxis(fine[:, :, [0, 2, 1]], 2, 0)), 0, 2)
    cells = fine.shape[-1] // stored
    first = random.integers(0, (stored - 1) * cells + 1, (len(axes), count))
    sums = fine
    for dim in range(1, len(axes) + 1):
        sums = np.insert(sums.cumsum(-dim), 0, 0, -dim)
    if len(axes) == 1:
        values = (sums[..., first[0] + cells] - sums[..., first[0]]) / cells
    else:
        a, b = first
        values = sums[..., a + cells, b + cells] - sums[..., a, b + cells] - sums[..., a + cells, b] + sums[..., a, b]
        values = values / cells**2
    if name == "euler1d":
        values = np.moveaxis(finite_volume.primitive(np.moveaxis(values, 2, 0)), 0, 2)[:, :, [0, 2, 1]]
    return (first.T + cells / 2) / (stored * cells), values, values


def splines(task: Any, fields: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Cubic splines along each axis: (..., *S) -> (..., N)."""
    from scipy.interpolate import CubicSpline

    def along(u: np.ndarray, axis: Any, x: np.ndarray) -> np.ndarray:
        """(n, ...) -> (N, ...)."""
        nodes = cell_centers(len(u), axis.extent)
        if axis.periodic:
            nodes, u, x = (
                np.append(nodes, nodes[0] + axis.extent),
                np.append(u, u[:1], 0),
                nodes[0] + (x - nodes[0]) % axis.extent,
            )
        return np.asarray(CubicSpline(nodes, u, bc_type="periodic" if axis.periodic else "not-a-knot")(x))

    values = along(np.moveaxis(fields, -1, 0), task.axes[-1], points[:, -1])  # (N, ..., X) or (N, ...)
    if len(task.axes) == 2:
        values = np.stack(
            [along(np.moveaxis(v, -1, 0), task.axes[0], x[None])[0] for v, x in zip(values, points[:, 0], strict=True)]
        )
    return np.moveaxis(values, 0, -1)


def by_query(at: Interpolant, fields: np.ndarray, count: int) -> np.ndarray:
    """(..., *S) -> (..., N), a few points at a time."""
    parts = torch.split(torch.arange(count), 16)
    return np.concatenate([at(torch.from_numpy(fields), part).numpy() for part in parts], -1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bundle", default="ups-joint")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--finer", type=Path, default=Path("finer"))
    parser.add_argument("--trajectories", type=int, default=16)
    parser.add_argument("--split", default="test", choices=["valid", "test"])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    arguments = parser.parse_args()
    simulator, passed, rows = ups.Simulator.load(arguments.bundle, device="cpu"), True, {}
    arguments.finer.mkdir(exist_ok=True)
    print("| task | field | grid | query | ratio | of held | cubic | truth: query | truth: cubic |\n|" + 9 * "---|")
    for name in arguments.tasks:
        task, count, split = TASKS[name].spec, arguments.trajectories, arguments.split
        cache = arguments.finer / f"{name}-{split}-{count}.npy"
        if not cache.exists():
            np.save(cache, solved(name, split, count).astype(np.float32))
        points, truth, held = reference(name, np.load(cache).astype(np.float64), np.random.default_rng(0))
        group: Any = zarr.open_group(arguments.data / f"{name}.zarr" / split, mode="r")
        role = task.predicted
        grid = np.asarray(group[role][:count], np.float64)
        grid = grid[:, None] if task.steady else grid  # (n, T, C, *S)
        static = np.asarray(group["static"][:count]) if task.fields_of("static") else None
        parameters = {p.name: np.asarray(group["parameters"][:count, i]) for i, p in enumerate(task.parameters)}
        result = simulator.rollout(
            None if task.steady else grid[:, 0], max(1, grid.shape[1] - 1), parameters, task=name, static=static
        )
        # (n, T, C, *S)
        fields = [
            result[f.name].values.reshape(len(grid), -1, f.num_channels(len(task.axes)), *grid.shape[3:])
            for f in task.fields_of(role)
        ]
        model = np.concatenate(fields, 2).astype(np.float64)
        later = slice(None) if task.steady else slice(1, None)
        coordinates = [cell_centers(TASKS[name].resolution, axis.extent) for axis in task.axes]
        at = Interpolant(task, coordinates, coordinates, points)
        values = {"query": by_query(at, model, len(points)), "cubic": splines(task, model, points)}
        values |= {"truth: query": by_query(at, grid, len(points)), "truth: cubic": splines(task, grid, points)}
        if name in EXACT:
            exact = model[..., None]
            for dim in range(len(task.axes), 0, -1):
                matrix = waves_at(model, points[:, dim - 1], task.axes[dim - 1], dim - len(task.axes) - 1, 0)
                exact = exact[..., 0] @ matrix.T if exact.shape[-1] == 1 else (exact * matrix.T).sum(-2)
            apart = float(np.abs(values["query"] - exact).max() / model.std())
        first = 0
        for field in task.fields_of(role):
            part = slice(first, first := first + field.num_channels(len(task.axes)))
            size = np.sqrt(np.square(grid[:, :, part]).reshape(count, -1).mean(1))

            def error(a: np.ndarray, b: np.ndarray, part: slice = part, size: np.ndarray = size) -> float:
                return float(
                    (np.sqrt(np.square(a[:, :, part] - b[:, :, part]).reshape(len(a), -1).mean(1)) / size).mean()
                )

            row = {"grid": error(model, grid[:, later])}
            row |= {key: error(x, truth if key.startswith("truth") else truth[:, later]) for key, x in values.items()}
            row["held"] = error(values["query"], held[:, later])
            ratio, of_held = row["query"] / row["grid"], row["held"] / row["grid"]
            rows[f"{name} {field.name}"] = row | ({"apart": apart} if name in EXACT else {})
            passed = passed and not (name in EXACT and (of_held > 1.02 or apart > 1e-6))
            numbers = (
                row["grid"],
                row["query"],
                ratio,
                of_held,
                row["cubic"],
                row["truth: query"],
                row["truth: cubic"],
            )
            print(f"| {name} | {field.name} | " + " | ".join(f"{x:.3g}" for x in numbers) + " |", flush=True)
    print(json.dumps({"benchmark": "query", "passed": passed, "split": arguments.split, "scores": rows}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
