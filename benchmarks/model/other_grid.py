"""Inputs on another grid than the training grid: the error of a rollout next to that on the training grid.

    python benchmarks/model/other_grid.py BUNDLE [--points 8,16,32,64,128,256,512,1024] [--samples 48] [--steps 40]
    python benchmarks/model/other_grid.py --interpolation DATA.zarr ...

With a bundle of burgers1d (128 points): samples are drawn like those of the task, the truth on each grid comes from the
solver (extra `generate`), in cell averages. `as it is`: the network gets the other grid, as bundles did before inputs
were resampled. `resampled`: what `Simulator.rollout` gives, or its refusal. Errors are relative to the RMS of the
trajectory, the median over samples. Bar: at half and at twice the points of the training grid the resampled error is at
most 1.5 times that on the training grid.

With data: whether an interpolant could do the same along axes that are not periodic. Each frame is averaged over cells
of two points, and interpolated back linearly and by cubic splines. Errors are relative to the RMS of a field: the mean
over the test split, of the worst field. Around periodic axes waves are evaluated instead, for comparison.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

SOLVER_POINTS = 1024
LIMIT = 1.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", nargs="?")
    parser.add_argument("--points", default="8,16,32,64,128,256,512,1024")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--interpolation", nargs="+", metavar="DATA", default=[])
    asked = parser.parse_args()
    for path in asked.interpolation:
        print(interpolation(path))
    return rollouts(asked) if asked.bundle else 0


def rollouts(asked: argparse.Namespace) -> int:
    import torch

    import ups
    from ups.errors import BundleError
    from ups.inference.bundle import load_bundle
    from ups.solvers.problem import average_periodic_1d

    torch.set_num_threads(1)
    simulator, bundle = ups.Simulator.load(asked.bundle, device="cpu"), load_bundle(asked.bundle)
    (trained,) = bundle.info.space("burgers1d")
    coefficients, nu = solutions(asked.samples, asked.steps)
    errors: dict[int, float] = {}
    for points in sorted({trained, *map(int, asked.points.split(","))}, key=lambda n: (n != trained, n)):
        truth = average_periodic_1d(coefficients, SOLVER_POINTS, points)
        x = (np.arange(points) + 0.5) / points
        raw = median_error(untouched(bundle, truth[:, 0], nu, asked.steps, x), truth)
        try:
            state = truth[:, 0, None].astype(np.float32)
            result = simulator.rollout(state, asked.steps, {"nu": nu}, coordinates={"x": x})
            errors[points] = median_error(result["u"].values, truth)
        except BundleError as error:
            print(f"{points:5d} points: as it is {raw / errors[trained]:6.1f} times, refused: {error.message}")
            continue
        ratio, raw_ratio = (error / errors[trained] for error in (errors[points], raw))
        print(
            f"{points:5d} points: as it is {raw_ratio:6.1f} times, resampled {ratio:5.2f} times ({errors[points]:.5f})"
        )
    near = [errors[n] / errors[trained] for n in (trained // 2, trained * 2) if n in errors]
    return 0 if max(near, default=0.0) <= LIMIT else 1


def solutions(samples: int, steps: int) -> tuple[Any, Any]:
    """rfft coefficients (samples, steps + 1, k) of burgers1d as the task draws it, and the viscosities."""
    from ups.solvers import spectral

    rng = np.random.default_rng(0)
    x = np.arange(SOLVER_POINTS) / SOLVER_POINTS
    waves = rng.integers(1, 9, (samples, 2, 1))
    amplitude, phase = rng.uniform(0, 1, (samples, 2, 1)), rng.uniform(0, 2 * np.pi, (samples, 2, 1))
    start = (amplitude * np.sin(2 * np.pi * waves * x + phase)).sum(1)
    nu = np.exp(rng.uniform(np.log(0.01), np.log(0.1), samples))
    return spectral.burgers(start, nu / np.pi, 0.05, steps + 1), nu


def untouched(bundle: Any, first: Any, nu: Any, steps: int, x: Any) -> Any:
    """(samples, steps, x): the network on the grid of the input."""
    import torch

    from ups.models.stepper import rollout
    from ups.spec.batch import Batch

    count = len(first)
    (task,) = bundle.info.tasks
    batch = Batch(
        task=task,
        state=torch.from_numpy(first).float()[:, None, None],
        static=torch.zeros(count, 0, len(x)),
        target=torch.zeros(count, 0, len(x)),
        parameters=torch.from_numpy(nu).float()[:, None],
        dt=torch.full((count,), task.dt),
        coordinates=(torch.from_numpy(x),),
        numbers=torch.arange(count),
    )
    with torch.no_grad():
        return np.stack([frame[:, 0].numpy() for frame in rollout(bundle.stepper, batch, steps)], axis=1)


def median_error(predicted: Any, truth: Any) -> float:
    error = np.sqrt(((predicted - truth[:, 1:]) ** 2).mean((1, 2)) / (truth**2).mean((1, 2)))
    return float(np.median(error))


def interpolation(path: str) -> str:
    """What halving the points of the test split and interpolating them back leaves of each field, in words."""
    import ups

    data = ups.open_data(path)
    errors: dict[str, list[dict[str, float]]] = {"linear": [], "cubic": []}
    for trajectory in data.trajectories("test"):
        fields = {f.name: trajectory[f.name].values.astype(np.float64) for f in data.task.fields if f.role != "target"}
        for kind, rows in errors.items():
            rows.append({name: _there_and_back(x, data.task.axes, kind) for name, x in fields.items()})
    words = []
    for kind, rows in errors.items():
        means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
        name = max(means, key=lambda n: means[n])
        words.append(f"{kind} {means[name]:.2%} ({name})")
    boundaries = ", ".join(axis.boundary_text for axis in data.task.axes)
    return f"{data.task.name} ({boundaries}): " + ", ".join(words)


def _there_and_back(x: Any, axes: Any, kind: str) -> float:
    """Relative error after averages over two points along each axis, and back."""
    import torch
    from scipy.interpolate import CubicSpline, interp1d

    from ups.models.grid_fit import resampling_matrix

    found = x
    for number, axis in enumerate(axes):
        dim = number - len(axes)
        points = found.shape[dim]
        lines = np.moveaxis(found, dim, -1)
        coarse = lines.reshape(*lines.shape[:-1], points // 2, 2).mean(-1)
        centers, fine = (np.arange(points // 2) + 0.5) * 2, np.arange(points) + 0.5
        if axis.periodic:
            matrix = resampling_matrix(points // 2, points, (fine[0] - centers[0]) / points)
            back = (torch.from_numpy(coarse) @ matrix).numpy()
        elif kind == "linear":
            back = interp1d(centers, coarse, axis=-1, fill_value="extrapolate")(fine)
        else:
            back = CubicSpline(centers, coarse, axis=-1)(fine)
        found = np.moveaxis(back, -1, dim)
    return float(np.sqrt(((found - x) ** 2).mean() / (x**2).mean()))


if __name__ == "__main__":
    sys.exit(main())
