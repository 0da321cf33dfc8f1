"""What a corrector is worth, next to an operator that was trained for the same CPU time.

    python benchmarks/model/corrector.py --data DIR --out DIR [--kind ensemble|flow] [--cpu-seconds 240] [--share 0.25]
                                         [--seeds 0,1,2] [--factors 0.3,1,3] [--score 64] [--members 8] [--jobs 2]

Tasks: ks1d and ns2d, which lose their future to chaos; and advection1d, where no gain is expected: it is linear and
fully given by its first frame, so that nothing is left to be uncertain about. Two models of each, by the recipe
`ups-alone` of ups-bench with the same network:

    operator    cpu-seconds for the operator
    corrected   (1 - share) of them for the operator, share for the corrector that starts from it. Kind ensemble: in
                each step a quarter of the operator's windows, as two members of two steps. Kind flow: two thirds of the
                share for the corrector, a network of half the width, and one for its student

Both kinds may share a directory: operators and starts are then trained once. Budgets are turned into steps beforehand
(`protocol/step_cost.py`). The rates of the corrector, relative to a quarter of the operator's, are chosen by the CRPS
on the valid split with the first seed. The table is of the test split, over all steps of whole rollouts; median over
seeds, with the ends. Asked of the first two tasks, and shown of the third:

    mean        the error of the mean of the members is not above the operator's
    crps        is below the operator's absolute error, and below that of Gaussian noise of equal spread around the
                central member
    spread      divided by skill, with the factor of so many members, is between 0.8 and 1.25 in the second half
    high band   the energy in wave numbers from 12 on at the last step is nearer to the truth than the operator's, by
                20 % at least

and with kind flow, whose members are draws of the student:

    student     keeps 85 % or more of what its teacher's CRPS gains over the operator's absolute error, and a step
                with its draw costs at most 1.5 steps of the operator (measured in turns, on 64 rows)

What is finished is not repeated. Last line: one JSON object. Exit code 1 if something that is asked is not reached. CPU
time: for each task seeds x 2 x cpu-seconds, and two more correctors for the rates.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from in_process import Job, Recipe, run_jobs

ASKED, NO_GAIN = ("ks1d", "ns2d"), ("advection1d",)
OPERATOR, START, ENSEMBLE, FLOW = "operator", "start", "ensemble", "flow"
NOISE_SIZE = 16
# A sample of an ensemble is two members of two steps: with so much less of them a step costs what an operator's does.
FEWER_WINDOWS = 4
# Of the rates of the operator's stage, for a stage that trains on from it.
RATE = 0.25
# Of the network of a flow next to the operator's, at half of its widths: what a student's draw may cost.
SMALL = {"blocks": [1, 1, 1]}
HIGH_BAND = 12
LEAST_RATIO, LARGEST_RATIO = 0.8, 1.25
NEARER = 0.8


@dataclass(frozen=True)
class Row:
    """One line of the table: a value of each seed, and when it is good enough."""

    name: str
    values: Callable[[dict[str, Any], dict[str, Any]], float]
    good: Callable[[float], bool]
    bar: str


def _ratio(above: str, below: str) -> Callable[[dict[str, Any], dict[str, Any]], float]:
    """A score of the ensemble relative to one of its own (`own `) or of the operator."""

    def value(ensemble: dict[str, Any], operator: dict[str, Any]) -> float:
        other = ensemble if below.startswith("own ") else operator
        return float(ensemble["summary"][above] / other["summary"][below.removeprefix("own ")])

    return value


def _off(result: dict[str, Any], of: str) -> float:
    """Distance of the energy in the high band from the truth's, relative to that."""
    energy, truth = (sum(sum(channel[HIGH_BAND:]) for channel in result["spectra"][name]) for name in (of, "truth"))
    return float(abs(energy - truth) / truth)


def _high_band(ensemble: dict[str, Any], operator: dict[str, Any]) -> float:
    """Distance of the members' energy from the truth's, relative to that of the operator's."""
    return _off(ensemble, "members") / max(_off(operator, "central"), 1e-300)


def _kept_gain(ensemble: dict[str, Any], operator: dict[str, Any]) -> float:
    """What the student keeps of the gain of its teacher over the operator of the same run."""
    alone = ensemble["summary"]["absolute_error"]
    gain = alone - ensemble["teacher"]["crps"]
    return float((alone - ensemble["summary"]["crps"]) / gain) if gain > 0 else math.nan


def _shown(_: float) -> bool:
    return True


FLOW_ROWS = (
    Row(
        "operator under the corrector / operator of all the time",
        _ratio("absolute_error", "absolute_error"),
        _shown,
        "-",
    ),
    Row("student's part of its teacher's gain", _kept_gain, lambda v: v >= 0.85, ">= 0.85"),
    Row("a step with the student / without", lambda e, _: float(e["step_cost"]), lambda v: v <= 1.5, "<= 1.5"),
)
ROWS = (
    Row("error of the mean / operator", _ratio("mean_rmse", "mean_rmse"), lambda v: v <= 1, "<= 1"),
    Row("CRPS / operator's absolute error", _ratio("crps", "absolute_error"), lambda v: v < 1, "< 1"),
    Row("CRPS / Gaussian of equal spread", _ratio("crps", "own gaussian"), lambda v: v < 1, "< 1"),
    Row(
        "spread / skill, second half",
        lambda ensemble, _: float(ensemble["summary"]["spread_skill_second_half"]),
        lambda v: LEAST_RATIO <= v <= LARGEST_RATIO,
        f"{LEAST_RATIO} to {LARGEST_RATIO}",
    ),
    Row("distance of the high band / operator's", _high_band, lambda v: v <= NEARER, f"<= {NEARER}"),
    Row("energy of the high band off by, members", lambda e, _: _off(e, "members"), _shown, "-"),
    Row("energy of the high band off by, operator", lambda _, o: _off(o, "central"), _shown, "-"),
)


class Study:
    """The jobs of one directory, and what they found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.data, self.out = options.data.resolve(), options.out.resolve()
        self.cpu_seconds, self.share = options.cpu_seconds, options.share
        self.seeds = [int(seed) for seed in options.seeds.split(",")]
        self.factors = [float(factor) for factor in options.factors.split(",")]
        self.scored, self.members = options.score, options.members
        self.tasks = options.tasks.split(",")
        self.kind = options.kind
        self.rows = ROWS + (FLOW_ROWS if self.kind == FLOW else ())

    def job(self, task: str, model: str, seed: int, factor: float = 1.0) -> Job:
        """One training, whose bundle is kept. model: OPERATOR, START, or a corrector of this kind."""
        from benchmarks.protocol.recipes import entries

        budget = self.cpu_seconds * (1 if model == OPERATOR else 1 - self.share)
        recipe: Recipe = copy.deepcopy(entries(["ups-alone"], [task], str(self.data), budget)[0].recipe)
        recipe["run"]["seed"] = seed
        start = None
        if model not in (OPERATOR, START):
            self.put_corrector(recipe, factor)
            start = self.job(task, START, seed).keep
            recipe["stages"][0]["start_from"] = str(start)
        name = f"{task}_{model}_{factor:g}_{seed}"
        title = f"{task}, {model}, rates x {factor:g}, seed {seed}"
        cost = f"{model if start else OPERATOR} {task}"  # neither rates nor lengths change costs
        place = self.out / name
        costs = self.out / "costs"
        return Job(title, place / "result.json", recipe, 4, costs, cost, start=start, keep=place / "bundle")

    def put_corrector(self, recipe: Recipe, factor: float) -> None:
        """The corrector in place of the operator's stages, and its student."""

        def stage(share: float, rate: float, **settings: Any) -> dict[str, Any]:
            optim = dict(operator["optim"])
            for name in ("learning_rate", "matrix_learning_rate"):
                optim[name] *= rate * factor
            length = {"budget_clock": "cpu", "budget_seconds": self.cpu_seconds * self.share * share}
            return {"optim": optim, **length, **settings}

        operator = recipe["stages"][-1]
        if self.kind == ENSEMBLE:
            recipe["model"]["noise_size"] = NOISE_SIZE
            windows = recipe["data"]["tasks"][0]["batch_size"] // FEWER_WINDOWS
            recipe["stages"] = [stage(1.0, RATE, type="corrector", kind=ENSEMBLE, batch_size=windows)]
            return
        widths = recipe["model"].get("widths", [32, 64, 128])
        recipe["networks"] = {"flow": recipe["model"] | SMALL | {"widths": [width // 2 for width in widths]}}
        recipe["stages"] = [stage(2 / 3, 1.0, type="corrector", kind="flow"), stage(1 / 3, RATE, type="distill")]

    def run(self, at_once: int) -> None:
        """Everything that is not there yet."""
        first, rest = self.seeds[0], self.seeds[1:]
        run_jobs([self.job(t, m, s) for s in self.seeds for t in self.tasks for m in (START, OPERATOR)], at_once)
        tries = [self.job(task, self.kind, first, f) for task in self.tasks for f in self.factors]
        run_jobs(tries, at_once)
        self.score_all(tries, "valid", at_once)
        chosen = {task: self.best_factor(task) for task in self.tasks}
        run_jobs([self.job(t, self.kind, s, f) for t, f in chosen.items() if f for s in rest], at_once)
        pairs = [which for t, f in chosen.items() if f for s in self.seeds for which in self._pair(t, s, f)]
        self.score_all(pairs, "test", at_once)

    def score_all(self, jobs: Iterable[Job], split: str, at_once: int) -> None:
        """Score the kept bundles of those jobs that have none yet, so many at the same time."""
        todo = [job for job in jobs if job.finished() is not None and not self._scores_of(job, split).is_file()]
        with ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn")) as pool:
            limits = (self.data, split, self.scored, self.members)
            done = [pool.submit(score_into, self._scores_of(job, split), job.keep, *limits) for job in todo]
            for job, one in zip(todo, done, strict=True):
                one.result()
                print(f"{job.title}: scored on {split}", flush=True)

    def _scores_of(self, job: Job, split: str) -> Path:
        return job.result.with_name(f"{split}_{self.scored}_{self.members}.json")

    def scores(self, job: Job, split: str) -> dict[str, Any] | None:
        """What `score_all` found; None if the training failed."""
        from ups.evaluation.results import from_json

        if job.finished() is None:
            return None
        found: dict[str, Any] = from_json(json.loads(self._scores_of(job, split).read_text()))
        return found

    def best_factor(self, task: str) -> float | None:
        """The rates that are best on the valid split; None if no try was finished."""
        found = {f: self.scores(self.job(task, self.kind, self.seeds[0], f), "valid") for f in self.factors}
        errors = {f: result["summary"]["crps"] for f, result in found.items() if result is not None}
        return min(errors, key=lambda f: errors[f]) if errors else None

    def values(self, task: str, row: Row) -> list[float]:
        """One for each seed of which both models are finished."""
        factor = self.best_factor(task)
        found = []
        for seed in self.seeds if factor is not None else []:
            pair = [self.scores(job, "test") for job in self._pair(task, seed, factor or 1.0)]
            if pair[0] is not None and pair[1] is not None:
                found.append(row.values(pair[0], pair[1]))
        return found

    def _pair(self, task: str, seed: int, factor: float) -> list[Job]:
        return [self.job(task, self.kind, seed, factor), self.job(task, OPERATOR, seed)]

    def table(self) -> list[str]:
        lines = [
            "| | asked | " + " | ".join(f"{t}{' (no gain expected)' if t in NO_GAIN else ''}" for t in self.tasks),
            "|---|---|" + "---|" * len(self.tasks),
        ]
        lines[0] += " |"
        for row in self.rows:
            cells = [_spread(self.values(task, row)) for task in self.tasks]
            lines.append(f"| {row.name} | {row.bar} | {' | '.join(cells)} |")
        return lines

    def summary(self) -> dict[str, Any]:
        values = {task: {row.name: self.values(task, row) for row in self.rows} for task in self.tasks}
        judged = [(row, values[task][row.name]) for task in self.tasks if task in ASKED for row in self.rows]
        passed = all(found and row.good(statistics.median(found)) for row, found in judged)
        return {
            "kind": self.kind,
            "cpu_seconds": self.cpu_seconds,
            "share": self.share,
            "factors": {task: self.best_factor(task) for task in self.tasks},
            "values": values,
            "passed": bool(judged) and passed,
        }


def score_into(file: Path, *what: Any) -> None:
    """The scores as a file, by one thread."""
    import torch

    from ups.evaluation.results import to_json

    torch.set_num_threads(1)
    file.write_text(json.dumps(to_json(score(*what))))


def score(bundle: Path, data: Path, split: str, trajectories: int, members: int) -> dict[str, Any]:
    """Whole rollouts of the only task of a bundle; on the test split also teacher and cost of a flow."""
    from ups.data.open import open_paths
    from ups.evaluation.ensemble import score_ensemble
    from ups.evaluation.rollout import RolloutPlan
    from ups.inference.bundle import load_bundle
    from ups.models.ensemble import FlowMembers, has_members, members_of
    from ups.models.flow import STUDENT, trained_flow
    from ups.spec.batch import RankInfo

    stepper = load_bundle(bundle).stepper
    stepper.fix_weights()
    reader = open_paths(data / f"{stepper.tasks[0].name}.zarr")
    plan = RolloutPlan.whole(reader, stepper.context_frames, split=split)
    limits: dict[str, Any] = {"split": split, "max_trajectories": trajectories}

    def scored(ensemble: Any) -> dict[str, Any]:
        return score_ensemble(ensemble, reader, RankInfo(0, 1), plan, **limits).result()

    # A model without trained noise or corrector has one member, which is what its central one is.
    found = scored(members_of(stepper, stepper.tasks[0], members) if has_members(stepper) else Single(stepper, members))
    if trained_flow(stepper) == STUDENT and split == "test":
        found["teacher"] = scored(FlowMembers(stepper, members, 0, FLOW))["summary"]
        found["step_cost"] = step_cost(stepper, reader, plan, split)
    reader.close()
    return found


def step_cost(stepper: Any, reader: Any, plan: Any, split: str, rows: int = 64, repeats: int = 15) -> float:
    """CPU time of a step with a draw of the student relative to one of the operator alone, in turns; median."""
    import torch

    from ups.evaluation.rollout import read_inputs
    from ups.models.flow import STUDENT, PredictedStep, corrected, noise_of

    batch, _ = read_inputs(reader, split, range(rows), plan, torch.device("cpu"), torch.float32)
    noise = noise_of(batch, 0, 0)
    ratios = []
    with torch.inference_mode():
        for _ in range(repeats + 1):
            began = time.process_time()
            predicted = stepper.predict(batch)
            stepped = time.process_time()
            corrected(stepper, STUDENT, PredictedStep(batch, predicted), noise)
            ratios.append((time.process_time() - began) / (stepped - began))
    return statistics.median(ratios[1:])


@dataclass
class Single:
    """An operator as an ensemble whose members are all the same."""

    stepper: Any
    members: int
    seed: int = 0

    def __call__(self, batch: Any) -> Any:
        return self.stepper(batch)


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    middle = statistics.median(values)
    text = "inf" if math.isinf(middle) else f"{middle:.3g}"
    return text + (f" ({min(values):.3g} to {max(values):.3g})" if len(values) > 1 else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the stores")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=(ENSEMBLE, FLOW), default=ENSEMBLE, help="of the corrector")
    parser.add_argument("--cpu-seconds", type=float, default=240.0, help="for each model")
    parser.add_argument("--share", type=float, default=0.25, help="of them, for the corrector")
    parser.add_argument("--tasks", default=",".join((*ASKED, *NO_GAIN)), help="by commas")
    parser.add_argument("--factors", default="0.3,1,3", help="of the corrector's rates, by commas")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--score", type=int, default=64, help="trajectories of valid and of test that are scored")
    parser.add_argument("--members", type=int, default=8)
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
