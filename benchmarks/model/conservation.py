"""What keeping conserved integrals costs: errors of a model with and without the projection, and drift of integrals.

    python benchmarks/model/conservation.py MODEL --data DIR [--without MODEL] [--trajectories 64] [--task NAME ...]

MODEL is a run or bundle, DIR holds the stores of its tasks. Scored on the test split are the model as it is and one
with `conserve: false`, that is without taking the mean over space out of the predicted change: the model named by
`--without`, which was trained like that, or else the same weights, which never had to learn the mean and so look worse
than they could. Drift is the largest over steps and conserved fields of the mean deviation of an integral from that of
the first frame, relative to the mean absolute value there. Last line: one JSON object. Exit code 1 if the projection
makes an error of any task worse by more than 2 %, or if an integral drifts by more than 1e-5 (round-off of float32
over a rollout).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from ups.config.schema import TaskConfig
from ups.data.open import open_task
from ups.evaluation.results import to_json
from ups.evaluation.rollout import RolloutPlan, score_task
from ups.formats.base import Reader
from ups.inference.bundle import load_bundle
from ups.models.build import build_model
from ups.models.stepper import OPERATOR, Stepper
from ups.record.run_dir import find_bundle
from ups.spec.batch import RankInfo

BAR = 1.02
MAX_DRIFT = 1e-5
WITH, WITHOUT = "with", "without"


def without_projection(stepper: Stepper) -> Stepper:
    """A model with the same weights that keeps no integral."""
    configs = dict(stepper.configs)
    configs[OPERATOR] = configs[OPERATOR].model_copy(update={"conserve": False})
    other = build_model(configs, stepper.tasks, stepper.statistics, stepper.context_frames)
    other.load_state_dict(stepper.state_dict())
    return other.requires_grad_(False).eval()


def examine(pair: dict[str, Any], reader: Reader, context_frames: int, trajectories: int) -> dict[str, Any]:
    """Errors and drift of both models on one task."""
    plan, place = RolloutPlan.whole(reader, context_frames), RankInfo(0, 1)
    rolled = score_task(pair, reader, place, plan, max_trajectories=trajectories)
    stepped = score_task(pair, reader, place, plan, max_trajectories=trajectories, kind="one_step")
    task = reader.task
    kept = [
        field.name in task.conserved
        for field in task.fields_of("state")
        for _ in range(field.num_channels(task.num_spatial_dims))
    ]
    found: dict[str, Any] = {"task": task.name, "conserved": list(task.conserved)}
    for name in pair:
        found[name] = {
            "one_step": stepped[name].summary()["trmse"],
            "rollout": rolled[name].summary()["trmse"],
            "drift": float(rolled[name].curve("drift")[:, kept].max()),
        }
    return found


def ratios(result: dict[str, Any]) -> dict[str, float]:
    return {key: result[WITH][key] / result[WITHOUT][key] for key in ("one_step", "rollout")}


def passed(result: dict[str, Any]) -> bool:
    return all(value <= BAR for value in ratios(result).values()) and result[WITH]["drift"] <= MAX_DRIFT


def table(results: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| task | conserved | one step: with / without | rollout: with / without | drift with | drift without |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        found, ours, other = ratios(r), r[WITH], r[WITHOUT]
        cells = [f"{ours[k]:.4g} / {other[k]:.4g} = {found[k]:.3f}" for k in ("one_step", "rollout")]
        conserved = ", ".join(r["conserved"])
        lines.append(
            f"| {r['task']} | {conserved} | {cells[0]} | {cells[1]} | {ours['drift']:.1e} | {other['drift']:.1e} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="run or bundle")
    parser.add_argument("--data", type=Path, required=True, help="directory of the stores")
    parser.add_argument("--without", help="run or bundle that was trained with conserve: false")
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--task", action="append", help="default: every task of the model that conserves something")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stepper = load_bundle(find_bundle(options.model)).stepper
    other = load_bundle(find_bundle(options.without)).stepper if options.without else without_projection(stepper)
    if other.config.conserves or not stepper.config.conserves:
        parser.error("MODEL must keep integrals, and the one of --without must not")
    pair = {WITH: stepper, WITHOUT: other}
    names = options.task or [task.name for task in stepper.tasks if task.conserved and not task.steady]
    results = []
    for task in names:
        config = TaskConfig(name=task, path=str(options.data / f"{task}.zarr"))
        with contextlib.closing(open_task(config)) as reader:
            results.append(examine(pair, reader, stepper.context_frames, options.trajectories))
        print(f"{task} is done", file=sys.stderr, flush=True)
    good = bool(results) and all(passed(r) for r in results)
    print("\n".join(table(results)))
    print(json.dumps(to_json({"tasks": results, "bar": BAR, "max_drift": MAX_DRIFT, "passed": good})))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
