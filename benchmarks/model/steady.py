"""The stage `steady` on darcy2d next to the baselines of ups-bench, each trained for the same CPU time on one task.

    python benchmarks/model/steady.py --data DIR --out DIR [--cpu-seconds 240] [--seeds 0] [--refine 0,3] [--jobs 2]

Baselines are those of ups-bench by its own recipes. The steady network is that of `ups-alone`, trained by the stage
`steady`, with so many steps of refinement by the discretized equation (docs/stages.md); with 0 the network alone
answers, as a baseline does. Budgets are turned into steps beforehand (`protocol/step_cost.py`). Scores are of 64 test
trajectories, relative to the field; median over seeds. Asked: with refinement at or below the best baseline. The cost
of an answer is CPU time of one thread for 16 samples in turns, relative to the first row. What is finished is not
repeated. Last line: one JSON object. Exit code 1 if what is asked is not reached.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

from in_process import Job, Recipe, file_name, run_jobs
from in_turns import in_turns

TASK = "darcy2d"
BASELINES = ("fno", "unet", "fno+", "unet+")
STEADY = "steady"
NUM_SCORED, NUM_TIMED, BLOCKS = 64, 16, 10


def job_of(options: argparse.Namespace, model: str, seed: int) -> Job:
    from benchmarks.protocol.recipes import entries

    baseline = model in BASELINES
    entry = entries([model if baseline else "ups-alone"], [TASK], str(options.data.resolve()), options.cpu_seconds)[0]
    recipe: Recipe = copy.deepcopy(entry.recipe)
    recipe["run"]["seed"] = seed
    if not baseline:
        recipe["model"]["refine_steps"] = int(model.removeprefix(STEADY))
        (stage,) = recipe["stages"]
        recipe["stages"] = [
            {"type": STEADY} | {name: stage[name] for name in ("budget_clock", "budget_seconds", "optim")}
        ]
    place = options.out / f"{file_name(model)}_{seed}"
    title = f"{title_of(model)}, seed {seed}"
    return Job(
        title, place / "result.json", recipe, NUM_SCORED, options.out / "costs", model, keep=place / "bundle", test=True
    )


def title_of(model: str) -> str:
    if model in BASELINES:
        return model
    steps = int(model.removeprefix(STEADY))
    return f"stage steady, {steps} steps of refinement" if steps else "stage steady, the network alone"


def answer_costs(bundles: dict[str, Path], data: Path) -> dict[str, float]:
    """CPU time of an answer of each model relative to the first, in turns; median."""
    import torch

    from ups.data.open import open_paths
    from ups.evaluation.rollout import RolloutPlan, read_inputs
    from ups.inference.bundle import load_bundle

    torch.set_num_threads(1)
    steppers = {name: load_bundle(bundle).stepper for name, bundle in bundles.items()}
    reader = open_paths(data / f"{TASK}.zarr")
    plan = RolloutPlan.whole(reader, 1, split="test")
    batch, _ = read_inputs(reader, "test", range(NUM_TIMED), plan, torch.device("cpu"), torch.float32)
    reader.close()
    for stepper in steppers.values():
        stepper.fix_weights()
    with torch.inference_mode():
        seconds = in_turns({name: partial(stepper, batch) for name, stepper in steppers.items()}, BLOCKS, 1)
    first = next(iter(seconds.values()))
    ratios = {name: [a / b for a, b in zip(found, first, strict=True)] for name, found in seconds.items()}
    return {name: statistics.median(found) for name, found in ratios.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the stores")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu-seconds", type=float, default=240.0, help="for each model")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--refine", default="0,3", help="steps of refinement, by commas")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    options.out = options.out.resolve()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    own = [f"{STEADY}{int(steps)}" for steps in options.refine.split(",")]
    models = [*BASELINES, *own]
    run_jobs([job_of(options, model, seed) for seed in seeds for model in models], options.jobs)
    jobs = {model: [job for seed in seeds if (job := job_of(options, model, seed)).finished()] for model in models}
    errors = {
        model: statistics.median(job.finished()["test_scores"][TASK]["one_step"] for job in found)  # type: ignore[index]
        for model, found in jobs.items()
        if found
    }
    bundles: dict[str, Path] = {model: found[0].keep for model, found in jobs.items() if found and found[0].keep}
    costs = answer_costs(bundles, options.data)
    print("| model | error | cost of an answer |\n|---|---|---|")
    for model, error in errors.items():
        print(f"| {title_of(model)} | {error:.4g} | {costs[model]:.2f} |")
    best = min((errors[model] for model in BASELINES if model in errors), default=None)
    reached = {model: error for model, error in errors.items() if model in own and model != f"{STEADY}0"}
    passed = best is not None and bool(reached) and all(error <= best for error in reached.values())
    summary: dict[str, Any] = {"cpu_seconds": options.cpu_seconds, "errors": errors, "costs": costs, "passed": passed}
    print(json.dumps(summary))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
