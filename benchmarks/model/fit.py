"""How well `Simulator.fit` finds parameters and initial states from few noisy sensors, on trajectories of the solver.

    python benchmarks/model/fit.py --bundle RUN --data data-seed2 --out fit.jsonl [--cases 64] [--problem NAME ...]

--data: stores of fresh test trajectories (`ups data generate all --seed 2 --trajectories 1,0,256 --out data-seed2`).
The bundle is calibrated (`ups calibrate`). Each case is the next trajectory of the test split: sensors at 5 % of the
grid points, drawn once for each case, are read at every frame of the window. Their noise is 1 % of the deviation of the
field.

    parameters      the first frame is known; all parameters of the task are unknown
    initial state   of the first frame the sensors are all that is known; parameters are known

An initial state is compared with interpolating the sensors of the first frame: linear and thin plate, whichever is
better for the case. Coverage is the share of true values inside the interval of 90 %: of parameters, or of the points
of an initial state. The answer of every case counts, also where it was declined. What is finished is not repeated.
Prints a table; the last line is one JSON object. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import ups
from ups.config.schema import TaskConfig
from ups.data.open import open_task
from ups.inference.fit import INITIAL_STATE
from ups.inference.simulator import BundleWarning
from ups.spec.task import TaskSpec

Float64 = npt.NDArray[np.float64]
SHARE, NOISE, LEVEL, SEED = 0.05, 0.01, 0.9, 38
MOST_PARAMETER_ERROR, MOST_OF_INTERPOLATION, LEAST_COVERED = 0.05, 0.5, 0.8


@dataclass(frozen=True)
class Problem:
    task: str
    unknown_state: bool
    steps: int  # of the window


PROBLEMS = {
    "parameters of advection1d": Problem("advection1d", False, 10),
    "parameters of burgers1d": Problem("burgers1d", False, 10),
    "parameters of reacdiff1d": Problem("reacdiff1d", False, 10),
    "initial state of burgers1d": Problem("burgers1d", True, 10),
    "initial state of ks1d": Problem("ks1d", True, 20),
    "initial state of ns2d": Problem("ns2d", True, 10),
}


def interpolated(points: Float64, values: Float64, grid: list[Float64], task: TaskSpec) -> dict[str, Float64]:
    """Sensors (N, axes) and (N,) -> fields (*S); periodic axes go around."""
    from scipy.interpolate import LinearNDInterpolator, RBFInterpolator

    copies = [points]
    for axis, spec in enumerate(task.axes):
        if spec.periodic:
            away = np.eye(len(task.axes))[axis] * spec.extent
            copies = [part + sign * away for part in copies for sign in (-1, 0, 1)]
    around, many = np.concatenate(copies), np.tile(values, len(copies))
    places = np.stack(np.meshgrid(*grid, indexing="ij"), axis=-1)
    flat = places.reshape(-1, len(grid))
    found = {"thin plate": RBFInterpolator(around, many, neighbors=min(64, len(around)))(flat)}
    if len(grid) == 1:
        order = np.argsort(around[:, 0])
        found["linear"] = np.interp(flat[:, 0], around[order, 0], many[order])
    else:
        found["linear"] = LinearNDInterpolator(around, many)(flat)
    return {name: part.reshape(places.shape[:-1]) for name, part in found.items()}


def solve(simulator: ups.Simulator, reader: Any, problem: Problem, case: int) -> dict[str, Any]:
    """One case, and what came of it."""
    task = simulator.tasks[problem.task]
    block = reader.read_block("test", [case], [0], problem.steps + 1)
    frames, parameters = block.state[0, :, 0].astype(np.float64), block.parameters[0].astype(np.float64)
    grid = [np.asarray(part, np.float64) for part in reader.coordinates]
    draw = np.random.default_rng([SEED, case])
    size = math.prod(frames.shape[1:])
    chosen = np.sort(draw.choice(size, round(SHARE * size), replace=False))
    places = np.stack(np.meshgrid(*grid, indexing="ij"), axis=-1).reshape(-1, len(grid))[chosen]
    noise = NOISE * float(frames.std())
    read = frames.reshape(len(frames), -1)[:, chosen]
    read = read + noise * draw.normal(size=read.shape)
    first = 0 if problem.unknown_state else 1
    times = np.repeat(task.dt * np.arange(first, len(frames)), len(chosen))
    name = task.channel_names("state")[0]
    seen = {"points": np.tile(places, (len(frames) - first, 1)), "times": times, name: read[first:].ravel()}
    truth = {p.name: float(value) for p, value in zip(task.parameters, parameters, strict=True)}
    known: dict[str, Any] = {"task": task.name, "static": block.static if block.static.shape[1] else None}
    if problem.unknown_state:
        unknown = [INITIAL_STATE]
        known["parameters"] = truth
    else:
        unknown = list(truth)
        known["state"] = block.state[:, 0]
    start = time.process_time()
    fit = simulator.fit(seen, unknown, noise=noise, level=LEVEL, **known)
    found: dict[str, Any] = {"seconds": time.process_time() - start, "declined": fit.declined, "misfit": fit.misfit}
    found |= {"solver_misfit": fit.solver_misfit, "p_value": fit.p_value}
    if problem.unknown_state:
        off = np.abs(fit.initial_state[0] - frames[0])
        bases = interpolated(places, read[0], grid, task)
        found["error"] = float(np.sqrt(np.square(off).mean()))
        found["interpolation"] = {n: float(np.sqrt(np.square(b - frames[0]).mean())) for n, b in bases.items()}
        found["covered"] = float((off <= fit.state_intervals[0]).mean())
        return found
    found["errors"] = {n: abs(fit.parameters[n] / truth[n] - 1) for n in truth}
    found["covered"] = float(np.mean([low <= truth[n] <= high for n, (low, high) in fit.intervals.items()]))
    return found


def summary(name: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of a problem."""
    row: dict[str, Any] = {"problem": name, "cases": len(cases)}
    if PROBLEMS[name].unknown_state:
        ratios = [case["error"] / min(case["interpolation"].values()) for case in cases]
        row |= {"error": median(ratios), "bar": MOST_OF_INTERPOLATION}
    else:
        row |= {"error": median(max(case["errors"].values()) for case in cases), "bar": MOST_PARAMETER_ERROR}
    row["covered"] = float(np.mean([case["covered"] for case in cases]))
    row["declined"] = sum(bool(case["declined"]) for case in cases)
    row["seconds"] = median(case["seconds"] for case in cases)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("bundle", "data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=64)
    parser.add_argument("--problem", action="append", choices=PROBLEMS, help="default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", BundleWarning)
    simulator = ups.Simulator.load(str(options.bundle), "cpu")
    done: dict[str, dict[int, dict[str, Any]]] = {}
    if options.out.exists():
        for line in options.out.read_text().splitlines():
            row = json.loads(line)
            done.setdefault(row["problem"], {})[row["case"]] = row
    found = []
    for name in options.problem or PROBLEMS:
        problem, cases = PROBLEMS[name], done.setdefault(name, {})
        reader = open_task(TaskConfig(name=problem.task, path=str(options.data / f"{problem.task}.zarr")))
        for case in range(options.cases):
            if case not in cases:
                cases[case] = {"problem": name, "case": case} | solve(simulator, reader, problem, case)
                with options.out.open("a") as file:
                    file.write(json.dumps(cases[case]) + "\n")
        reader.close()
        found.append(summary(name, [cases[case] for case in range(options.cases)]))
    print("| unknown | cases | median error | bar | covered | declined | CPU-seconds, median |")
    print("|---|---|---|---|---|---|---|")
    for row in found:
        print(
            f"| {row['problem']} | {row['cases']} | {row['error']:.3g} | {row['bar']:g} | {row['covered']:.2f} | "
            f"{row['declined']} | {row['seconds']:.1f} |"
        )
    missed = [row["problem"] for row in found if row["error"] > row["bar"] or row["covered"] < LEAST_COVERED]
    print(json.dumps({"found": found, "missed": missed, "passed": not missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
