"""Rollouts five times as long as the data: whether they stay finite, and whether they still look like the equation.

    python benchmarks/model/long_rollouts.py MODEL --data DIR [--times 5] [--trajectories 64] [--task ks1d --task ns2d]

MODEL is a run or bundle that knows the tasks, DIR holds their stores. Model and solver both start from the first frame
of test trajectories, with the same parameters. Both tasks are chaotic, so single states part; what must agree is how
much energy is in the waves. Compared are the steps beyond the length of the data, as means over trajectories and
steps, in the bands of wave numbers [0, 4) and [4, 12) that scores have, too; `noise of the truth` is how far the
truth's own mean may be off (two standard errors over trajectories). The solver has twice the points of the data and its
usual step. Last line: one JSON object. Exit code 1 if a rollout is not finite, or the energy of one of the first two
bands is off by more than 20 %.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups.config.schema import TaskConfig
from ups.data.open import open_task
from ups.evaluation.metrics import BAND_EDGES, BAND_NAMES, shell_energy
from ups.evaluation.results import to_json
from ups.evaluation.rollout import RolloutPlan, read_inputs
from ups.formats.base import Reader
from ups.inference.bundle import load_bundle
from ups.models.stepper import Stepper, rollout
from ups.record.run_dir import find_bundle
from ups.solvers.coarse_solver import RESTARTS, Given, Setting, own_task
from ups.solvers.problem import require_solvers

BAR = 0.2
# The solver must repeat the first stored frame, or what it makes is not the truth of these data.
SAME = 0.01
BANDS = 2
CPU = torch.device("cpu")


def band_energy(frames: Tensor) -> Tensor:
    """(B, T, C, *S) -> (B, bands): energy of each band, mean over steps and channels."""
    energy = shell_energy(frames).mean(dim=(1, 2))  # (B, shells)
    edges = [*BAND_EDGES, energy.shape[1]]
    return torch.stack([energy[:, a:b].sum(dim=1) for a, b in itertools.pairwise(edges)], dim=1)


def solve(reader: Reader, first: Tensor, static: Tensor, parameters: Tensor, steps: int) -> Tensor:
    """(B, T, C, *S): the truth after the given frames, from the solver that made the data."""
    task, reason = own_task(reader)
    if task is None:
        sys.exit(f"no solver can start from frames of {reader.task.name}: {reason}")
    restart = RESTARTS[task.spec.name]
    points = 2 * reader.space[0]
    setting = Setting(points, restart.substeps(points, reader.task.dt) if restart.substeps else 0)
    given = Given(*(np.ascontiguousarray(x.double().numpy()) for x in (first, static, parameters)))
    return torch.from_numpy(restart.run(task.spec, given, reader.task.dt, steps, setting))


@torch.inference_mode()
def examine(stepper: Stepper, reader: Reader, times: int, trajectories: int, batch_size: int = 16) -> dict[str, Any]:
    """Energy in bands of prediction and truth beyond the data, and how many rollouts were not finite."""
    known = RolloutPlan.whole(reader, stepper.context_frames)
    steps = times * known.num_steps
    ours, theirs, short_errors, blown_up = [], [], [], 0
    count = min(trajectories, reader.splits["test"])
    for start in range(0, count, batch_size):
        part = range(start, min(start + batch_size, count))
        batch, stored = read_inputs(reader, "test", part, known, CPU, torch.float32)
        truth = solve(reader, batch.state[:, -1], batch.static, batch.parameters, steps)
        short = truth[:, 0] - stored[:, 0].double()
        short_errors.append(float(short.pow(2).mean().sqrt() / stored[:, 0].double().pow(2).mean().sqrt()))
        found = torch.stack(list(rollout(stepper, batch, steps)), dim=1)
        finite = torch.isfinite(found).flatten(1).all(dim=1)
        blown_up += int((~finite).sum())
        ours.append(band_energy(found[:, known.num_steps :]))
        theirs.append(band_energy(truth[:, known.num_steps :]))
        print(f"{reader.task.name}: {part[-1] + 1} of {count} trajectories", file=sys.stderr, flush=True)
    predicted, true = torch.cat(ours), torch.cat(theirs)
    mean = true.mean(dim=0)
    # Not a number where a rollout was not finite, which is counted and fails on its own.
    return {
        "task": reader.task.name,
        "steps": steps,
        "steps_of_data": known.num_steps,
        "trajectories": count,
        "not_finite": blown_up,
        "solver_first_step": max(short_errors),
        "energy": predicted.mean(dim=0).tolist(),
        "energy_of_truth": mean.tolist(),
        "deviation": (predicted.mean(dim=0) / mean - 1).tolist(),
        "noise_of_truth": (2 * true.std(dim=0) / math.sqrt(max(count, 1)) / mean).tolist(),
    }


def passed(result: dict[str, Any]) -> bool:
    close = all(abs(d) <= BAR for d in result["deviation"][:BANDS])
    return result["not_finite"] == 0 and close and result["solver_first_step"] <= SAME


def table(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| task | steps (data) | not finite | band | energy | truth | off by | noise of the truth |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        for band, name in enumerate(BAND_NAMES):
            lines.append(
                f"| {r['task']} | {r['steps']} ({r['steps_of_data']}) | {r['not_finite']} of {r['trajectories']} "
                f"| {name} | {r['energy'][band]:.4g} | {r['energy_of_truth'][band]:.4g} "
                f"| {r['deviation'][band]:+.1%} | {r['noise_of_truth'][band]:.1%} |"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="run or bundle")
    parser.add_argument("--data", type=Path, required=True, help="directory of the stores")
    parser.add_argument("--times", type=int, default=5, help="length relative to that of the data")
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--task", action="append", help="default: ks1d and ns2d")
    options = parser.parse_args()
    require_solvers()
    torch.set_num_threads(1)
    stepper = load_bundle(find_bundle(options.model)).stepper
    results = []
    for task in options.task or ("ks1d", "ns2d"):
        config = TaskConfig(name=task, path=str(options.data / f"{task}.zarr"))
        with contextlib.closing(open_task(config)) as reader:
            results.append(examine(stepper, reader, options.times, options.trajectories))
    good = all(passed(r) for r in results)
    print("\n".join(table(results)))
    print(json.dumps(to_json({"tasks": results, "bar": BAR, "passed": good})))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
