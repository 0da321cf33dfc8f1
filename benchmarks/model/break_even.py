"""Whether the joint model pays on each task: its cost next to the cheapest solver with its error, and on larger grids.

    python benchmarks/model/break_even.py --data DIR --out DIR [--model ups-joint] [--task NAME ...]
        [--training-seconds S] [--no-predictions] [--laws]

DIR of --data holds the stores of the tasks. --out gets a file for each task; what is there is not measured again, so an
interrupted call continues. --training-seconds: CPU time of the training with its tuning, of all tasks together.
Predictions are what `ups plan --break-even` says before a training: the same network with the guess of its error.

--laws: milliseconds per frame of solver and model on ns2d against the number of points, and where they would cross. The
solver needs twice the steps for twice the points, the model one step for each frame. Weights do not matter for that.

Prints a table of each task, as Markdown, and a last line of JSON. No bar; rows measured while other machines took more
than 10 % of the processors are marked as not judged.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from in_turns import in_turns

from ups.config.schema import TaskConfig
from ups.data.open import open_task
from ups.evaluation.cost import INSTANT, break_even, setting_words
from ups.evaluation.results import from_json, to_json
from ups.evaluation.rollout import RolloutPlan, read_inputs
from ups.inference.bundle import load_bundle
from ups.models.normalization import one_thread
from ups.models.stepper import Stepper
from ups.record.run_dir import find_bundle
from ups.solvers import spectral
from ups.solvers.tasks import BENCH_TASKS

POINTS = (16, 32, 64, 128)
LAW_SAMPLES, LAW_FRAMES, BLOCKS = 4, 5, 3


def measure(model: Stepper, path: Path, name: str, training_seconds: float | None, predict: bool) -> dict[str, Any]:
    """What one task costs: `measured`, and `predicted` before a training."""
    reader = open_task(TaskConfig.model_validate({"name": name, "path": str(path)}))
    plan = RolloutPlan.whole(reader, model.context_frames, split="test")
    started = time.process_time()
    found = {"measured": break_even(reader, plan, model, training_seconds=training_seconds)}
    if predict:
        found["predicted"] = break_even(reader, plan, model, trained=False, training_seconds=training_seconds)
    return {"task": name, **found, "cpu_seconds": time.process_time() - started}


def laws(model: Stepper, path: Path) -> dict[str, Any]:
    """Milliseconds per frame and trajectory of ns2d on grids of `POINTS`, medians of blocks in turns."""
    reader = open_task(TaskConfig.model_validate({"name": "ns2d", "path": str(path)}))
    batch, _ = read_inputs(reader, "test", range(LAW_SAMPLES), RolloutPlan(1, 0, 1), torch.device("cpu"), torch.float32)
    rows = {}
    for points in POINTS:
        factor = points // batch.space[0] if points >= batch.space[0] else 1
        stride = batch.space[0] // points if points < batch.space[0] else 1

        def resize(x: torch.Tensor, factor: int = factor, stride: int = stride) -> torch.Tensor:
            x = x[..., ::stride, ::stride]
            return x.repeat_interleave(factor, -1).repeat_interleave(factor, -2)

        ours = type(batch).of(
            batch.task,
            state=resize(batch.state),
            static=resize(batch.static),
            parameters=batch.parameters,
            dt=batch.dt,
            coordinates=tuple(np.arange(points) * (2 * math.pi / points) for _ in range(2)),
        )
        start = ours.state[:, 0, 0].double().numpy()

        def solve(start: Any = start) -> None:
            spectral.navier_stokes(start, 2 * math.pi, 0.02, 0.1, 1.0, reader.task.dt, LAW_FRAMES, single=True)

        def step(ours: Any = ours) -> None:
            with torch.no_grad():
                model(ours)

        with one_thread():
            seconds = in_turns({"solver": solve, "model": step}, BLOCKS, 1)
        solver = float(np.median(seconds["solver"])) / (LAW_SAMPLES * (LAW_FRAMES - 1))
        rows[points] = {"solver": 1e3 * solver, "model": 1e3 * float(np.median(seconds["model"])) / LAW_SAMPLES}
        print(json.dumps({"points": points, **rows[points]}), flush=True)
    (low, a), (high, b) = ((n, rows[n]["solver"] / rows[n]["model"]) for n in POINTS[-2:])
    power = math.log(b / a) / math.log(high / low)
    crossing = high * (1 / b) ** (1 / power) if power > 0 else math.inf
    return {"milliseconds": rows, "power": power, "crossing": crossing}


def answer(one: dict[str, Any]) -> str:
    """A number of solves, `never`, or that no setting is as accurate."""
    if one["solver"] is None:
        return "no setting is as accurate"
    return "never" if one["num_solves"] is None else f"{one['num_solves']:,.0f}"


def show(rows: list[dict[str, Any]]) -> None:
    """The table, as Markdown."""
    heads = ["task", "error of the model", "averaged", "cheapest solver with that error", "solver, ms", "model, ms"]
    heads += ["model / solver", "break-even, solves", "one at a time", "time-averaged fields", "predicted"]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for row in rows:
        found = row["measured"]
        many = found["matched"][INSTANT][str(found["num_trajectories"])]
        alone, others = found["matched"][INSTANT]["1"], [v for k, v in found["matched"].items() if k != INSTANT]
        averaged = answer(others[0][str(found["num_trajectories"])]) if others else "-"
        guess = row.get("predicted")
        predicted = answer(guess["matched"][INSTANT][str(guess["num_trajectories"])]) if guess else "-"
        solver = "-" if many["setting"] is None else setting_words(many["setting"], steady=found["steady"])
        price = [f"{many[k]:.3g}" if many[k] is not None else "-" for k in ("solver", "model", "ratio")]
        mark = "" if found["judged"] else " (not judged)"
        mean = f"{found['model']['error_of_average']:.2g}" if others else "-"
        cells = [
            row["task"] + mark,
            f"{found['model']['error']:.2g}",
            mean,
            solver,
            *price,
            answer(many),
            answer(alone),
        ]
        print("| " + " | ".join([*cells, averaged, predicted]) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="ups-joint")
    parser.add_argument("--task", action="append", choices=BENCH_TASKS)
    parser.add_argument("--training-seconds", type=float)
    parser.add_argument("--no-predictions", action="store_true")
    parser.add_argument("--laws", action="store_true")
    options = parser.parse_args()
    model = load_bundle(find_bundle(options.model), stated=False).stepper
    options.out.mkdir(parents=True, exist_ok=True)
    share = None if options.training_seconds is None else options.training_seconds / len(model.tasks)
    rows = []
    for name in options.task or BENCH_TASKS:
        file = options.out / f"{name}.json"
        if not file.exists():
            found = measure(model, options.data / f"{name}.zarr", name, share, not options.no_predictions)
            file.write_text(json.dumps(to_json(found), allow_nan=False))
            print(f"{name}: {found['measured']['sentence']}", flush=True)
        rows.append(from_json(json.loads(file.read_text())))
    law = None
    if options.laws:
        file = options.out / "laws.json"
        if not file.exists():
            file.write_text(json.dumps(to_json(laws(model, options.data / "ns2d.zarr"))))
        law = from_json(json.loads(file.read_text()))
        print(f"\nns2d: solver / model grows as points^{law['power']:.2f}; even at {law['crossing']:.0f} points")
    print()
    show(rows)
    tasks = {row["task"]: row["measured"]["matched"] for row in rows}
    print(json.dumps({"benchmark": "break_even", "tasks": to_json(tasks), "laws": to_json(law)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
