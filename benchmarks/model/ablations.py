"""What each part of the joint model and of its training is worth: a training for each variant and seed, on validation.

    python benchmarks/model/ablations.py --data data --out ablations [--cpu-seconds 300] [--seeds 0,1] [--jobs 2]
                                         [--variant NAME ...] [--trajectories 16]

Every variant is the joint recipe of ups-bench on all nine tasks with one thing changed, and has the same CPU-seconds of
one thread: its number of steps follows from what a step costs (`protocol/step_cost.py`), so that others on the machine
do not change the result. Scores are of the valid split only: one step and whole rollouts, relative to the trajectory.
The table shows the geometric mean over tasks and seeds of each score relative to the unchanged recipe of the same seed
(above 1: worse; a task counts as 10 at most), and each seed. What is finished is not repeated. Takes `cpu-seconds` (and
some for scores) for each line and seed.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from in_process import Job, file_name, run_jobs

BASE = "unchanged"
# How many times larger one error may count than another.
MOST = 10.0
KEYS = ("one_step", "rollout")
Recipe = dict[str, Any]


def model(**changes: Any) -> Callable[[Recipe], None]:
    return lambda recipe: recipe["model"].update(changes)


def stage(**changes: Any) -> Callable[[Recipe], None]:
    return lambda recipe: recipe["stages"][-1].update(changes)


def optim(**changes: Any) -> Callable[[Recipe], None]:
    return lambda recipe: recipe["stages"][-1]["optim"].update(changes)


def windows(line: int, plane: int) -> Callable[[Recipe], None]:
    def change(recipe: Recipe) -> None:
        for task in recipe["data"]["tasks"]:
            task["batch_size"] = line if task["name"].endswith("1d") else plane

    return change


def windows_of(**numbers: int) -> Callable[[Recipe], None]:
    def change(recipe: Recipe) -> None:
        for task in recipe["data"]["tasks"]:
            task["batch_size"] = numbers.get(task["name"], task["batch_size"])

    return change


def both(*changes: Callable[[Recipe], None]) -> Callable[[Recipe], None]:
    def change(recipe: Recipe) -> None:
        for one in changes:
            one(recipe)

    return change


def without_linear_stage(recipe: Recipe) -> None:
    first = recipe["stages"].pop(0)
    recipe["stages"][0]["budget_seconds"] += first["budget_seconds"]


def without_propagator(recipe: Recipe) -> None:
    without_linear_stage(recipe)
    recipe["model"]["propagator"] = False


def adamw(recipe: Recipe) -> None:
    recipe["stages"][-1]["optim"] |= {"type": "adamw", "learning_rate": 2e-3}


def rates(factor: float) -> Callable[[Recipe], None]:
    def change(recipe: Recipe) -> None:
        for name in ("learning_rate", "matrix_learning_rate"):
            recipe["stages"][-1]["optim"][name] *= factor

    return change


def unrolled(steps: int) -> Callable[[Recipe], None]:
    """The last fifth of the budget as a stage of its own, whose rates begin where the first four end."""

    def change(recipe: Recipe) -> None:
        first = recipe["stages"][-1]
        last = copy.deepcopy(first)
        last["budget_seconds"], first["budget_seconds"] = 0.2 * first["budget_seconds"], 0.8 * first["budget_seconds"]
        share = 0.1  # of the highest rate: a cosine over both stages would have it there
        first["optim"]["final_fraction"] = share
        for name in ("learning_rate", "matrix_learning_rate"):
            last["optim"][name] *= share
        last["optim"] |= {"warmup_fraction": 0.0, "schedule": "linear"}
        last["unroll_steps"] = steps
        recipe["stages"].append(last)

    return change


# Variants that put another part in the place of the network's own, see `other_parts.py`.
PARTS = {
    "smoothing in 1D too": "smooth_lines",
    "matrices of waves instead of attention": "fourier",
    "numbers of waves instead of attention": "diagonal",
    "matrices of waves beside attention": "waves_and_attention",
    "reflection of 1D velocities": "odd_reflection",
}

# Of tasks that had other windows before matrices had a weight decay.
BEFORE = {"euler1d": 10, "diffreact2d": 3, "darcy2d": 5}
VARIANTS: dict[str, Callable[[Recipe], None]] = {
    BASE: lambda recipe: None,
    "no attention": model(attention=False),
    "attention after each block": model(attention=True),
    "no propagator": without_propagator,
    "propagator not fitted first": without_linear_stage,
    "AdamW instead of Muon": adamw,
    "amplitude scaling of all tasks": model(amplitude=True),
    "amplitude scaling of none": model(amplitude=False),
    "integrals not kept": model(conserve=False),
    "no smoothing": model(smooth=False),
    "no balance": stage(balance=0.0),
    "balance 0.75": stage(balance=0.75),
    "balance 1": stage(balance=1.0),
    "no noise": stage(noise=0.0),
    "a fifth of the noise": stage(noise=0.001),
    "no augmentation": stage(augment=False),
    "loss relative to the change": stage(loss="relative_l2"),
    **{name: lambda recipe: None for name in PARTS},
    "last fifth of the steps unrolled over 2": unrolled(2),
    "last fifth of the steps unrolled over 4": unrolled(4),
    "rates x 2": rates(2.0),
    "rates x 0.5": rates(0.5),
    "kernels shared by lines and planes": model(own_kernels=False),
    "kernel 5": model(kernel_size=5),
    "kernel 7": model(kernel_size=7),
    "narrower (24, 48, 96)": model(widths=[24, 48, 96], num_heads=3),
    "wider (48, 96, 192)": model(widths=[48, 96, 192], num_heads=6),
    "middle of 1": model(blocks=[1, 1, 1]),
    "middle of 4": model(blocks=[1, 1, 4]),
    "no weight decay": optim(weight_decay=0.0),
    "weight decay 0.3": optim(weight_decay=0.3),
    "weight decay 1": optim(weight_decay=1.0),
    "weight decay 0.3 and balance 0.75": both(optim(weight_decay=0.3), stage(balance=0.75)),
    "matrix learning rate 2.5e-3": optim(matrix_learning_rate=2.5e-3),
    "matrix learning rate 1e-2": optim(matrix_learning_rate=1e-2),
    "5 windows in 1D, 3 in 2D": windows(5, 3),
    "10 windows in 1D, 5 in 2D": windows(10, 5),
    "20 windows in 1D, 3 in 2D": windows(20, 3),
    "20 windows in 1D, 5 in 2D": windows(20, 5),
    "40 windows in 1D, 10 in 2D": windows(40, 10),
    "10 windows of reacdiff1d as of others": windows_of(reacdiff1d=10),
    "10 windows of euler1d as of others": windows_of(euler1d=10),
    "3 windows of diffreact2d as of others": windows_of(diffreact2d=3),
    "5 windows of advection1d": windows_of(advection1d=5),
    # Next to "weight decay 0.3", in trainings of 540 CPU-seconds.
    "attention after each block, weight decay 0.3": both(optim(weight_decay=0.3), model(attention=True)),
    "no attention, weight decay 0.3": both(optim(weight_decay=0.3), model(attention=False)),
    "no attention, weight decay 0.3, middle of 4": both(
        optim(weight_decay=0.3), model(attention=False, blocks=[1, 1, 4])
    ),
    "no attention, weight decay 0.3, balance 0.75": both(
        optim(weight_decay=0.3), model(attention=False), stage(balance=0.75)
    ),
    "no attention, weight decay 0.3, 20 windows of reacdiff1d": both(
        optim(weight_decay=0.3), model(attention=False), windows_of(reacdiff1d=20)
    ),
    "windows of before": windows_of(**BEFORE),
    "windows of before, weight decay 0.3": both(windows_of(**BEFORE), optim(weight_decay=0.3)),
    "windows of before, no weight decay": both(windows_of(**BEFORE), optim(weight_decay=0.0)),
}


# Variants that do the same work in a step, or all but a part that cannot be measured (noise and symmetries of the given
# frames, the size of a frame): to measure its cost again would only add what measurements differ by.
SAME_COST = (
    "no balance",
    "balance",
    "rates",
    "no weight decay",
    "weight decay",
    "matrix learning rate",
    "no noise",
    "a fifth of the noise",
    "no augmentation",
    "amplitude scaling",
    "integrals not kept",
    "reflection",
    # Smoothing costs 8 % of a step in 2D and nothing in 1D: within a twentieth, as the others, measured in turns.
    "matrices of waves",
    "numbers of waves",
    "no smoothing",
    "smoothing",
)


def recipe_of(variant: str, seed: int, data: Path, cpu_seconds: float) -> Recipe:
    """The joint recipe with one thing changed; `cpu_seconds` for all tasks together."""
    from benchmarks.protocol.recipes import entries
    from ups.solvers.tasks import BENCH_TASKS

    tasks = list(BENCH_TASKS)
    joint = entries(["ups"], tasks, str(data.resolve()), cpu_seconds / len(tasks))[0]
    recipe = copy.deepcopy(joint.recipe)
    recipe["run"]["seed"] = seed
    VARIANTS[variant](recipe)
    return recipe


def job_of(options: argparse.Namespace, variant: str, seed: int) -> Job:
    """The training of one variant. Seeds cost alike, and so do variants of `SAME_COST`."""
    return Job(
        f"{variant}, seed {seed}",
        options.out / f"{file_name(variant)}_{seed}.json",
        recipe_of(variant, seed, options.data, options.cpu_seconds),
        options.trajectories,
        options.out / "costs",
        BASE if variant.startswith(SAME_COST) else variant,
        part=PARTS.get(variant, ""),
    )


def log_ratio(value: float, other: float) -> float:
    """Of two errors, at most that of ten to one: how large an error that grows without end has become says nothing."""
    difference = math.log(min(value, 1e300)) - math.log(min(other, 1e300))  # an error may be infinite
    return min(max(difference, -math.log(MOST)), math.log(MOST))


def table(options: argparse.Namespace, variants: list[str], seeds: list[int]) -> list[str]:
    """A line for each variant that has a result, those that lose most first."""
    head = "| variant | steps | one step | rollout | blown up | worst task, one step and rollout | best task |"
    lines: list[tuple[float, str]] = []
    for variant in variants:
        pairs = [[job_of(options, name, seed).finished() for name in (variant, BASE)] for seed in seeds]
        found = [(result, base) for result, base in pairs if result is not None and base is not None]
        if found:
            lines.append(_line(variant, found))
    ordered = [text for _, text in sorted(lines, key=lambda line: -line[0])]
    return [head, "|---|---|---|---|---|---|---|", *ordered]


def _line(variant: str, found: list[tuple[dict[str, Any], dict[str, Any]]]) -> tuple[float, str]:
    """How much a variant loses over both scores, and its line of the table. found: results and bases of each seed."""
    tasks = list(found[0][0]["scores"])
    # (score, task) -> logarithms of the ratios, one for each seed.
    logs = {
        (key, task): [log_ratio(r["scores"][task][key], b["scores"][task][key]) for r, b in found]
        for key in KEYS
        for task in tasks
    }
    means = {key: [statistics.fmean(logs[key, task][n] for task in tasks) for n in range(len(found))] for key in KEYS}
    by_task = {task: [statistics.fmean(logs[key, task]) for key in KEYS] for task in tasks}
    order = sorted(tasks, key=lambda task: sum(by_task[task]))
    scores = [
        f"{math.exp(statistics.fmean(means[key])):.2f} ({', '.join(f'{math.exp(mean):.2f}' for mean in means[key])})"
        for key in KEYS
    ]
    ends = [
        f"{task} {', '.join(f'{math.exp(value):.2f}' for value in by_task[task])}" for task in (order[-1], order[0])
    ]
    blown = sum(s["blown_up"] for r, _ in found for s in r["scores"].values())
    cells = [variant, f"{found[0][0]['steps']}", *scores, f"{blown}", *ends]
    return sum(statistics.fmean(means[key]) for key in KEYS), f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu-seconds", type=float, default=300.0)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--trajectories", type=int, default=16)
    parser.add_argument("--variant", action="append", choices=list(VARIANTS))
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    variants = [BASE, *(v for v in (options.variant or VARIANTS) if v != BASE)]
    run_jobs([job_of(options, variant, seed) for seed in seeds for variant in variants], options.jobs)
    print("\n".join(table(options, variants, seeds)))


if __name__ == "__main__":
    main()
