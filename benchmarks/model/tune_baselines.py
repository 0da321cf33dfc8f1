"""Learning rates, windows and sizes of models of one task that are trained as our joint model is: tried on validation.

    python benchmarks/model/tune_baselines.py --data data --out tuning [--cpu-seconds 300] [--jobs 2]
                                              [--trajectories 16] [--factor 0.5 ...] [--task NAME ...]
                                              [--model fno+ ...] [--windows 16,4 ...] [--weight-decay 0.1 ...]
                                              [--size 0.5 ...]

Each model is trained once for each factor of the learning rates of `ups` (and each number of windows of a 1D and of a
2D task in a step, each weight decay and each size, if given; otherwise those of ups-bench). A size is a factor of the
width of hidden layers. Each training has `cpu-seconds` for all nine
tasks together, as a line of `ablations.py` has. So short a training likes high rates: `--cpu-seconds 2160` is the
budget of the benchmark, and with it a few tasks say whether the choice holds. The table shows errors relative to the
first line of a model, as the geometric mean over tasks (below 1: better); docs/ablations.md says what was chosen by it.
What is finished is not repeated. `ups-alone` may ask for other rates than `ups`: kernels of a model of lines have one
axis, and those of the joint model two, whose sum moves up to three times as far in a step.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from pathlib import Path
from typing import Any

from in_process import Job, file_name, run_jobs

MODELS = ("fno+", "unet+", "ups-alone")
FACTORS = [1.0, 0.5, 2.0, 4.0]
OF_BENCH = "of ups-bench"


def job_of(
    options: argparse.Namespace, model: str, task: str, factor: float, windows: str, decay: float | None, size: float
) -> Job:
    """One training of one task. Learning rates and weight decay do not change what a step costs."""
    from benchmarks.protocol.recipes import OWN_RATES, entries
    from ups.solvers.tasks import BENCH_TASKS

    entry = entries([model], [task], str(options.data.resolve()), options.cpu_seconds / len(BENCH_TASKS))[0]
    recipe: dict[str, Any] = copy.deepcopy(entry.recipe)
    recipe["stages"][-1]["optim"] |= {name: factor * rate for name, rate in OWN_RATES.items()}
    if decay is not None:
        recipe["stages"][-1]["optim"]["weight_decay"] = decay
    cost = entry.name
    if windows != OF_BENCH:
        line, plane = (int(number) for number in windows.split(","))
        for data in recipe["data"]["tasks"]:
            data["batch_size"] = line if task.endswith("1d") else plane
        cost = f"{entry.name}, {recipe['data']['tasks'][0]['batch_size']} windows"
    if size != 1:
        recipe["model"]["width"] = round(size * recipe["model"]["width"])
        cost += f", width {recipe['model']['width']}"
    title = f"{cost}, rates x {factor:g}" + ("" if decay is None else f", weight decay {decay:g}")
    return Job(
        title, options.out / f"{file_name(title)}.json", recipe, options.trajectories, options.out / "costs", cost
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu-seconds", type=float, default=300.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--trajectories", type=int, default=16)
    parser.add_argument("--factor", type=float, action="append", help=f"default: {FACTORS}")
    parser.add_argument("--windows", action="append", help=f"in 1D and 2D, as 16,4; default: those {OF_BENCH}")
    parser.add_argument("--weight-decay", type=float, action="append", help=f"of matrices; default: that {OF_BENCH}")
    parser.add_argument("--size", type=float, action="append", help="times the width of fno+ and unet+; default: 1")
    parser.add_argument("--task", action="append", help="default: all nine")
    parser.add_argument("--model", action="append", choices=MODELS, help="default: all")
    options = parser.parse_args()
    from ups.solvers.tasks import BENCH_TASKS

    factors, tasks, models = options.factor or FACTORS, options.task or list(BENCH_TASKS), options.model or MODELS
    choices = [
        (factor, windows, decay, size)
        for windows in options.windows or [OF_BENCH]
        for factor in factors
        for decay in options.weight_decay or [None]
        for size in options.size or [1.0]
    ]
    run_jobs([job_of(options, m, t, *choice) for m in models for choice in choices for t in tasks], options.jobs)
    heads = ["model", "rates x", "windows", "weight decay", "width x", "one step", "rollout", "mean"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for model in models:
        for choice in choices:
            logs: dict[str, list[float]] = {"one_step": [], "rollout": []}
            for task in tasks:
                found, base = (job_of(options, model, task, *of).finished() for of in (choice, choices[0]))
                if found is None or base is None:
                    continue
                for key, values in logs.items():
                    ratio = found["scores"][task][key] / base["scores"][task][key]
                    values.append(math.log(ratio if math.isfinite(ratio) else 10))
            if all(logs.values()):
                one, rolled = (statistics.fmean(values) for values in logs.values())
                means = [math.exp(value) for value in (one, rolled, (one + rolled) / 2)]
                decay = OF_BENCH if choice[2] is None else f"{choice[2]:g}"
                settings = [f"{choice[0]:g}", choice[1], decay, f"{choice[3]:g}"]
                words = [model, *settings, *(f"{mean:.3f}" for mean in means)]
                print(f"| {' | '.join(words)} |")


if __name__ == "__main__":
    main()
