"""How far the stored frames are from those of a solver with twice the points per axis and half the time step.

Run with `OMP_NUM_THREADS=1 python benchmarks/data/solver_error.py`. For each task a few trajectories are solved twice
at the stored size of the benchmark, and the root mean square of the difference is taken relative to that of the
trajectory, per channel; shown is the mean over trajectories and channels, over all frames and for the last frame.
Chaotic tasks start without their spin-up here, so that the figure is the error of the solver and not its growth.
advection1d is exact. The last line is one JSON object; the exit code is 1 above the bars: 0.2 % where solutions are
smooth or fronts are resolved, 10 % for shocks, which are as wide as a few cells of the solver, 2 % for the jumps of the
Darcy medium.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np

from ups.solvers import darcy, diffreact, finite_volume, spectral
from ups.solvers.problem import Draws
from ups.solvers.tasks import TASKS

# task -> (module, constant that sets the grid, constants that set the time step where the grid does not, bar)
GRIDS = {
    "burgers1d": (spectral, "BURGERS_MIN_POINTS", (), 0.002),
    "ks1d": (spectral, "KS_MIN_POINTS", ("KS_STEP",), 0.002),
    "reacdiff1d": (spectral, "REACDIFF_MIN_POINTS", ("REACDIFF_STEP",), 0.002),
    "euler1d": (finite_volume, "EULER_MIN_CELLS", (), 0.1),
    "ns2d": (spectral, "NS_MIN_POINTS", (), 0.002),
    "swe2d": (finite_volume, "SWE_MIN_CELLS", (), 0.1),
    "diffreact2d": (diffreact, "MIN_POINTS", ("SPIN_UP_STEP", "STEP"), 0.002),
    "darcy2d": (darcy, "MIN_CELLS", (), 0.02),
}


def solve(name: str, count: int) -> np.ndarray:
    """(n, T, C, *S) stored frames; a steady task has one."""
    task = TASKS[name]
    solution = task.solve(Draws(0, name, "test", tuple(range(count))), task.resolution, task.num_frames)
    return (solution.target[:, None] if task.spec.steady else solution.state).astype(np.float64)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=4)
    parser.add_argument("--tasks", nargs="+", default=list(GRIDS), choices=list(GRIDS))
    arguments = parser.parse_args()
    spectral.KS_SKIPPED_FRAMES = spectral.NS_SPIN_UP_FRAMES = 0
    print("| task | all frames | last frame | bar |\n|---|---|---|---|")
    scores: dict[str, dict[str, float]] = {}
    passed = True
    for name in arguments.tasks:
        module, grid, steps, bar = GRIDS[name]
        start = time.process_time()
        coarse = solve(name, arguments.trajectories)
        usual = {constant: getattr(module, constant) for constant in (grid, *steps)}
        for constant, value in usual.items():
            setattr(module, constant, 2 * value if constant == grid else value / 2)
        fine = solve(name, arguments.trajectories)
        for constant, value in usual.items():
            setattr(module, constant, value)
        space = tuple(range(3, coarse.ndim))
        size = np.sqrt((fine**2).mean(axis=(1, *space)))  # (n, C)
        whole = np.sqrt(((coarse - fine) ** 2).mean(axis=(1, *space))) / size
        last = np.sqrt(((coarse - fine) ** 2)[:, -1].mean(axis=tuple(a - 1 for a in space))) / size
        scores[name] = {
            "all": float(whole.mean()),
            "last": float(last.mean()),
            "cpu_seconds": round(time.process_time() - start, 1),
        }
        passed = passed and bool(whole.mean() <= bar)
        print(f"| {name} | {whole.mean():.2g} | {last.mean():.2g} | {bar} |", flush=True)
    print(json.dumps({"benchmark": "solver_error", "passed": passed, "scores": scores}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
