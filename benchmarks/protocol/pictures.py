"""The pictures of a result of ups-bench: ratios, error against cost, and the joint model on every task.

Made from the result and the bundle of a run, so that they can be drawn again without a training.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.protocol.recipes import JOINT, Entry
from ups.errors import UpsError
from ups.record.files import write_file_atomically

FOLDER = "pictures"
# The page of tasks shows, of so many test trajectories, the one with the median error: neither the best nor the worst.
NUM_TRAJECTORIES = 9
TITLES = {
    "ratios.png": "Error of the joint model relative to others, one step and rollout",
    "cost.png": "Error against the cost of a step, means over tasks",
    "cost-by-task.png": "Rollout error against the cost of a step, for each task",
    "joint-model.png": "One joint model on every task: truth, prediction and error",
}
log = logging.getLogger(__name__)


def write_pictures(document: Mapping[str, Any], out: Path, data: Path) -> dict[str, str]:
    """What the result has something to show for; returns title -> path relative to `out`.

    A picture that can not be drawn is a warning: the tables are worth hours of training.
    """
    from benchmarks.protocol.charts import cost_chart, cost_chart_by_task, ratio_chart

    rows = document["rows"]
    makers: dict[str, Callable[[], bytes | None]] = {
        "ratios.png": lambda: ratio_chart(rows),
        "cost.png": lambda: cost_chart(rows),
        "cost-by-task.png": lambda: cost_chart_by_task(rows),
        "joint-model.png": lambda: joint_page(rows, out, data),
    }
    found = {}
    for name, make in makers.items():
        try:
            drawn = make()
        except UpsError as error:
            log.warning("no picture %s: %s", name, error)
            continue
        if drawn is not None:
            (out / FOLDER).mkdir(exist_ok=True)
            write_file_atomically(out / FOLDER / name, drawn)
            found[TITLES[name]] = f"{FOLDER}/{name}"
    return found


def joint_page(rows: Any, out: Path, data: Path) -> bytes | None:
    """The joint model on all of its tasks: of its seeds the median one. None if no joint model was trained."""
    from benchmarks.protocol.charts import task_page
    from ups.config.schema import TaskConfig
    from ups.data.open import open_task
    from ups.evaluation.figures import examples
    from ups.evaluation.results import trajectory_means
    from ups.evaluation.rollout import RolloutPlan, score_task
    from ups.inference.bundle import load_bundle
    from ups.spec.batch import RankInfo

    chosen = median_seed(rows)
    if chosen is None:
        return None
    model, seed, tasks = chosen
    stepper = load_bundle(out / "runs" / Entry(model, tasks, seed, {}).name / "bundle").stepper
    shown, errors = [], []
    for task in tasks:
        with contextlib.closing(open_task(TaskConfig(name=task, path=str(data / f"{task}.zarr")))) as reader:
            plan = RolloutPlan.whole(reader, stepper.context_frames)
            scores = score_task({model: stepper}, reader, RankInfo(0, 1), plan, max_trajectories=NUM_TRAJECTORIES)[
                model
            ]
            means = trajectory_means(scores.rows)
            middle = sorted(means, key=lambda t: means[t])[len(means) // 2]
            shown += examples(stepper, reader, plan, [middle])
            errors.append(means[middle])
    title = f"One model with one set of weights on {len(tasks)} tasks; test trajectories of median error"
    return task_page(shown, errors, title)


def median_seed(rows: Any) -> tuple[str, int, tuple[str, ...]] | None:
    """Model, seed and tasks of the joint model whose rollouts are the middle ones over its seeds."""
    from benchmarks.protocol.page import geometric_mean

    for model in sorted(JOINT):
        mine = [r for r in rows if r["model"] == model]
        tasks = tuple(dict.fromkeys(r["task"] for r in mine))
        seeds = sorted({int(r["seed"]) for r in mine})
        errors = {s: geometric_mean(float(r["scores"]["trmse"]) for r in mine if r["seed"] == s) for s in seeds}
        if errors:
            return model, sorted(errors, key=lambda s: errors[s])[len(errors) // 2], tasks
    return None
