"""What the joint model is worth on a task that it never saw, with few trajectories.

    python benchmarks/model/transfer.py --data DIR --out DIR [--cpu-seconds 240] [--fine-tune-seconds 60] [--jobs 2]
                                        [--seeds 0,1,2] [--sources 3] [--trajectories 16,64,256]
                                        [--left-out burgers1d,diffreact2d] [--rates 0.3,1,3]

One 1D and one 2D task are left out: burgers1d and diffreact2d. Both are made of terms that the other seven have (ks1d
carries itself along as Burgers does, reacdiff1d reacts and diffuses), and neither has a sibling with its own equation:
where joint training can teach anything, it is here. The joint recipe of ups-bench is trained on the other seven with
`cpu-seconds` for each of them, once for each of the first `sources` seeds. Then three models learn each left-out task
from 16, 64 and 256 trajectories, each with the same CPU-seconds and the same features of training:

    ups, warm      the multiscale network, from the weights of the joint model; what belongs to the new task is new
    ups, scratch   the same network, from nothing
    fno+           the FNO of the benchmark, from nothing

The learning rates of the benchmark times `rates` are tried by each with the first seed; the try with the best
valid split (geometric mean of one step and rollout) gives the rate for the other seeds. The table is of the test split:
median and spread over seeds. What is finished is not repeated. Last line: one JSON object. Exit code 1 if with 64
trajectories the warm model has more than half of the FNO's error on one of the tasks, in one step or in rollouts.
CPU time: sources x 7 x cpu-seconds, and 90 times fine-tune-seconds with the defaults.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from in_process import Job, Recipe, Result, run_jobs
from store_copy import copy_store

LEFT_OUT = ("burgers1d", "diffreact2d")
WARM, SCRATCH, FNO = "ups, warm", "ups, scratch", "fno+"
ENTRY = {WARM: "ups-alone", SCRATCH: "ups-alone", FNO: "fno+"}
BAR, BAR_TRAJECTORIES = 0.5, 64
METRICS = ("one_step", "rollout")
# Trajectories of the joint model's own tasks that are scored: only to show that it was trained.
SCORED_SOURCE = 8


@dataclass(frozen=True)
class Case:
    """A table cell: one model on one task with so many trajectories."""

    task: str
    trajectories: int
    model: str


class Study:
    """The jobs of one directory, and what they found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.data, self.out = options.data.resolve(), options.out.resolve()
        self.cpu_seconds, self.tuning = options.cpu_seconds, options.fine_tune_seconds
        self.seeds = [int(seed) for seed in options.seeds.split(",")]
        self.sources = self.seeds[: options.sources]
        self.counts = [int(count) for count in options.trajectories.split(",")]
        self.factors = [float(factor) for factor in options.rates.split(",")]
        self.left_out, self.scored = options.left_out.split(","), options.score
        self.cases = [Case(t, n, model) for t in self.left_out for n in self.counts for model in ENTRY]

    def source(self, seed: int) -> Job:
        """The joint model of the other tasks."""
        from benchmarks.protocol.recipes import entries
        from ups.solvers.tasks import BENCH_TASKS

        others = [task for task in BENCH_TASKS if task not in self.left_out]
        recipe = copy.deepcopy(entries(["ups"], others, str(self.data), self.cpu_seconds)[0].recipe)
        recipe["run"]["seed"] = seed
        place = self.out / f"source_{seed}"
        title = f"joint model without {', '.join(self.left_out)}, seed {seed}"
        costs = self.out / "costs"
        return Job(title, place / "result.json", recipe, SCORED_SOURCE, costs, "source", keep=place / "bundle")

    def tuned(self, case: Case, factor: float, seed: int) -> Job:
        """One model on one task."""
        from benchmarks.protocol.recipes import entries

        stores = self.out / "data" / str(case.trajectories)
        recipe: Recipe = copy.deepcopy(entries([ENTRY[case.model]], [case.task], str(stores), self.tuning)[0].recipe)
        recipe["run"]["seed"] = seed
        for name in ("learning_rate", "matrix_learning_rate"):
            recipe["stages"][-1]["optim"][name] *= factor
        model = "".join(c for c in case.model if c.isalnum())
        name = f"{case.task}_{case.trajectories}_{model}_{factor:g}_{seed}.json"
        start = None
        if case.model == WARM:
            source = self.sources[self.seeds.index(seed) % len(self.sources)]
            start = self.out / f"source_{source}" / "bundle"
        title = f"{case.task}, {case.trajectories} trajectories, {case.model}, rates x {factor:g}, seed {seed}"
        # Rates and weights at the start change no costs.
        cost = f"{ENTRY[case.model]} {case.task}"
        return Job(title, self.out / name, recipe, self.scored, self.out / "costs", cost, start=start, test=True)

    def run(self, at_once: int) -> None:
        """Everything that is not there yet."""
        for task in self.left_out:
            for count in self.counts:
                part = self.out / "data" / str(count) / f"{task}.zarr"
                copy_store(self.data / f"{task}.zarr", part, train=count)
        run_jobs([self.source(seed) for seed in self.sources], at_once)
        run_jobs([self.tuned(case, factor, self.seeds[0]) for case in self.cases for factor in self.factors], at_once)
        chosen = [(case, self.best_factor(case)) for case in self.cases]
        run_jobs([self.tuned(c, f, seed) for seed in self.seeds[1:] for c, f in chosen if f is not None], at_once)

    def best_factor(self, case: Case) -> float | None:
        """The rates that are best on the valid split; None if no try was finished."""
        found = {f: self.tuned(case, f, self.seeds[0]).finished() for f in self.factors}
        errors = {f: valid_error(result, case.task) for f, result in found.items() if result is not None}
        return min(errors, key=lambda f: errors[f]) if errors else None

    def errors(self, case: Case, metric: str) -> list[float]:
        """On the test split with the chosen rates, one for each finished seed."""
        factor = self.best_factor(case)
        if factor is None:
            return []
        found = [self.tuned(case, factor, seed).finished() for seed in self.seeds]
        return [float(result["test_scores"][case.task][metric]) for result in found if result is not None]

    def ratio(self, task: str, count: int, metric: str, other: str = FNO) -> float:
        """Median error of the warm model relative to that of another; not a number where one is missing."""
        mine, theirs = (self.errors(Case(task, count, model), metric) for model in (WARM, other))
        return statistics.median(mine) / statistics.median(theirs) if mine and theirs else math.nan

    def table(self) -> list[str]:
        lines = [
            "| task | trajectories | error | " + " | ".join(ENTRY) + " | warm / scratch | warm / fno+ | rates x |",
            "|---|---|---|" + "---|" * (len(ENTRY) + 3),
        ]
        for task in self.left_out:
            for count in self.counts:
                factors = [self.best_factor(Case(task, count, model)) for model in ENTRY]
                words = ", ".join("-" if f is None else f"{f:g}" for f in factors)
                for metric in METRICS:
                    cells = [spread(self.errors(Case(task, count, model), metric)) for model in ENTRY]
                    ratios = [f"{self.ratio(task, count, metric, other):.2f}" for other in (SCRATCH, FNO)]
                    name = metric.replace("_", " ")
                    lines.append(f"| {task} | {count} | {name} | {' | '.join([*cells, *ratios, words])} |")
        return lines

    def summary(self) -> dict[str, Any]:
        ratios = {
            f"{task}, {count}": {metric: self.ratio(task, count, metric) for metric in METRICS}
            for task in self.left_out
            for count in self.counts
        }
        judged = [v for key, found in ratios.items() if key.endswith(f", {BAR_TRAJECTORIES}") for v in found.values()]
        jobs = [self.tuned(c, f, s) for c in self.cases for f in self.factors for s in self.seeds]
        used = {job.result.stem: r["cpu_seconds"] for job in jobs if (r := job.finished()) is not None}
        return {
            "left_out": self.left_out,
            "warm_relative_to_fno": ratios,
            "bar": BAR,
            "cpu_seconds": [min(used.values(), default=0.0), max(used.values(), default=0.0)],
            "passed": bool(judged) and all(value <= BAR for value in judged),
        }


def valid_error(result: Result, task: str) -> float:
    """Geometric mean of one step and rollout; infinite if a rollout blew up."""
    values = [float(result["scores"][task][metric]) for metric in METRICS]
    return math.exp(statistics.fmean(math.log(v) for v in values)) if all(map(math.isfinite, values)) else math.inf


def spread(values: list[float]) -> str:
    if not values:
        return "-"
    ends = f" ({min(values):.3g} to {max(values):.3g})" if len(values) > 1 else ""
    return f"{statistics.median(values):.3g}{ends}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the nine stores")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu-seconds", type=float, default=240.0, help="of the joint model, for each of its tasks")
    parser.add_argument("--fine-tune-seconds", type=float, default=60.0)
    parser.add_argument("--left-out", default=",".join(LEFT_OUT), help="tasks, by commas")
    parser.add_argument("--trajectories", default="16,64,256", help="for fine-tuning, by commas")
    parser.add_argument("--score", type=int, default=64, help="trajectories of valid and of test that are scored")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--sources", type=int, default=3, help="joint models, each with a seed of its own")
    parser.add_argument("--rates", default="0.3,1,3", help="learning rates to try, times those of the benchmark")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    from ups.evaluation.results import to_json

    study = Study(options)
    study.run(options.jobs)
    summary = study.summary()
    print("\n".join(study.table()))
    print(json.dumps(to_json(summary)))
    return 0 if summary["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
