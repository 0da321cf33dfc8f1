"""Finds the viscosity of a Burgers trajectory from a few noisy sensors, with `Simulator.fit`.

    python examples/inverse_problem.py [--bundle DIRECTORY --data STORE] [--trajectory 0] [--guess 0.02]

Given are the first frame of one test trajectory and, of the later frames, noisy values at random points; its viscosity
is hidden until the end. The guess is only compared with the result: the fit has several starts. Without `--bundle` and
`--data` it first makes both in the current directory: about two minutes on one CPU core. Exit code 1 if the result is
more than 5 % away from the truth.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

import ups

RECIPE = Path(__file__).resolve().parents[1] / "recipes" / "burgers1d.yaml"
BAR = 0.05


def prepare() -> tuple[Path, Path]:
    """Little data and a small simulator: (bundle, data)."""
    ups.generate_data("burgers1d", trajectories=(96, 8, 8), resolution=64, frames=11)
    run = ups.train(
        RECIPE,
        progress=True,
        run__name="inverse_problem",
        model__widths=[16, 32, 64],
        stages__1__steps=400,
        evaluate__max_trajectories=8,
    )
    if run.bundle is None:
        raise SystemExit(run.why())
    return run.bundle, Path("data/burgers1d.zarr")


def measure(trajectory: Any, noise: float, share: float = 0.2, seed: int = 0) -> dict[str, Any]:
    """Values at random points of the later frames, a share of those of the grid, with noise of this deviation."""
    draw = np.random.default_rng(seed)
    times, x, u = (trajectory[name].values for name in ("time", "x", "u"))
    count = max(1, round(share * len(x)))
    frames = np.repeat(np.arange(1, len(times)), count)
    points = draw.uniform(0, 1, len(frames))
    values = np.array([np.interp(at, x, u[n], period=1.0) for n, at in zip(frames, points, strict=True)])
    return {"points": points, "times": times[frames], "u": values + noise * draw.normal(size=len(frames))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="a trained simulator of burgers1d, for instance runs/NAME/bundle")
    parser.add_argument("--data", type=Path, help="the data set with the trajectory")
    parser.add_argument("--trajectory", type=int, default=0, help="which one of the test split")
    parser.add_argument("--guess", type=float, default=0.02, help="viscosity to compare the result with")
    parser.add_argument("--noise", type=float, default=0.01, help="of the sensors, in deviations of the trajectory")
    options = parser.parse_args()
    if (options.bundle is None) != (options.data is None):
        parser.error("--bundle and --data belong together")
    bundle, data = (options.bundle, options.data) if options.bundle else prepare()

    trajectory = ups.open_data(data).trajectory("test", options.trajectory).isel(time=slice(11))
    truth, noise = float(trajectory["nu"]), options.noise * float(trajectory["u"].std())
    seen = measure(trajectory, noise)
    first = trajectory.isel(time=0)
    fit = ups.Simulator.load(bundle).fit(seen, ["nu"], noise=noise, state=first)
    found, (low, high) = fit.parameters["nu"], fit.intervals["nu"]
    error = abs(found / truth - 1)
    print(
        f"{len(seen['times'])} values, noise of {100 * options.noise:g} %: {fit.declined or 'the answer can be used'}"
    )
    print(f"misfit {fit.misfit:.2f}, of the solver {fit.solver_misfit} (in units of the noise); {fit.notes}")
    print(f"interval of 90 %: {low:.4f} to {high:.4f}")
    print(f"guess {options.guess:.4f}, found nu = {found:.4f}, truth {truth:.4f}: {100 * error:.1f} % off")
    return 0 if error <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
