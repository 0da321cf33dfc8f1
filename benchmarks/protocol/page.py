"""The result of ups-bench as a page of tables: scores, ratios between models, and what each training was.

A model that was trained with several seeds stands in the tables with its median, and the spread after it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.protocol.recipes import METRICS, MODELS, REFERENCE
from ups.solvers.tasks import BENCH_TASKS

Rows = Sequence[Mapping[str, Any]]
BASELINES = ("fno", "unet", "fno+", "unet+", "fno+law", "unet+law", "dilated+")
# (heading, whose score is divided, by the best of whom)
RATIOS = (
    ("ups / best baseline", "ups", BASELINES),
    ("ups-alone / best baseline", "ups-alone", BASELINES),
    ("ups / ups-alone", "ups", ("ups-alone",)),
    ("ups=windows / ups-alone", "ups=windows", ("ups-alone",)),
    ("ups / better of fno, unet", "ups", ("fno", "unet")),
)
# Our linear law is the exact solution of this task: means are given without it first.
SOLVED_BY_THE_LAW = "advection1d"
# Where each score of a row is: on the test split of the data, and on that of a second store.
SPLITS = {"scores": "", "second_scores": ", second test split"}
# Its frames decay to almost nothing, and this error is relative to the frame.
MEANINGLESS = {("burgers1d", key) for _, key in METRICS if not key.endswith("trmse")}
RATIO_METRICS = (("One step", "one_step_trmse"), ("Whole rollout", "trmse"))


def markdown(document: Mapping[str, Any], pictures: Mapping[str, str] | None = None) -> str:
    """document: rows, command, machine, data, failures (see `trainings.py`); pictures: title -> path."""
    rows: Rows = document["rows"]
    tasks = [task for task in BENCH_TASKS if any(r["task"] == task for r in rows)]
    models = [model for model in MODELS if any(r["model"] == model for r in rows)]
    machine = ", ".join(f"{key} {value}" for key, value in document["machine"].items())
    parts = [
        f"{document['protocol']}: {document['cpu_seconds_per_task']:g} CPU-seconds of one thread for each task.",
        f"Made by `{document['command']}` on {machine}.",
        "",
        *_table(["model", "what it is"], ([model, MODELS[model]] for model in models)),
    ]
    for title, path in (pictures or {}).items():
        parts += ["", f"![{title}]({path})"]
    parts += _ratio_tables(rows, tasks, models)
    for heading, key in METRICS:
        parts += ["", f"### {heading}", ""]
        parts += _table(["task", *models], (_cells(rows, task, models, key, "scores") for task in tasks))
    again = [model for model in models if any(r["model"] == model and "second_scores" in r for r in rows)]
    for heading, key in RATIO_METRICS if again else ():
        parts += ["", f"### {heading}, relative to the trajectory{SPLITS['second_scores']}", ""]
        parts += _table(["task", *again], (_cells(rows, task, again, key, "second_scores") for task in tasks))
    parts += _training_tables([r for r in rows if r["model"] != REFERENCE], tasks, models)
    parts += ["", "### Data", ""]
    parts += ["Identities: " + ", ".join(f"{task} `{document['data'][task][:16]}`" for task in tasks) + "."]
    parts += [f"\nFailed: {name}, see its log." for name in document["failures"]]
    return "\n".join(parts) + "\n"


def values_of(rows: Rows, task: str, model: str, key: str, split: str = "scores") -> list[float]:
    """The scores of a model on a task, one for each seed; none of rows that were not scored on this split."""
    return [float(r[split][key]) for r in rows if r["task"] == task and r["model"] == model and split in r]


def ratios_of(
    rows: Rows, tasks: Sequence[str], model: str, others: Sequence[str], key: str, split: str = "scores"
) -> dict[str, float]:
    """Task -> median score of a model relative to that of the best of the others; only where both are there."""
    found = {}
    for task in tasks:
        mine = values_of(rows, task, model, key, split)
        best = [statistics.median(v) for other in others if (v := values_of(rows, task, other, key, split))]
        if mine and best:
            found[task] = statistics.median(mine) / min(best)
    return found


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(v) if v > 0 else -math.inf for v in values]
    return math.exp(sum(logs) / len(logs))


def mean_ratio(ratios: Mapping[str, float]) -> float | None:
    """The geometric mean over tasks. None if there is none: an error that grew without end has no ratio."""
    known = ratios and all(0 < value < math.inf for value in ratios.values())
    return geometric_mean(ratios.values()) if known else None


def _ratio_tables(rows: Rows, tasks: Sequence[str], models: Sequence[str]) -> list[str]:
    """A table for each metric: a line for each task, and the geometric mean over them."""
    kept = [r for r in RATIOS if r[1] in models and any(other in models for other in r[2])]
    if not kept:
        return []
    parts: list[str] = []
    for split, suffix in SPLITS.items():
        if not any(split in r for r in rows):
            continue
        for title, key in RATIO_METRICS:
            columns = [ratios_of(rows, tasks, model, others, key, split) for _, model, others in kept]
            lines = [[task, *(number(column[task]) if task in column else "-" for column in columns)] for task in tasks]
            few = [{task: v for task, v in column.items() if task != SOLVED_BY_THE_LAW} for column in columns]
            if SOLVED_BY_THE_LAW in tasks:
                lines.append([f"geometric mean without {SOLVED_BY_THE_LAW}", *map(_mean, few)])
            lines.append(["geometric mean", *map(_mean, columns)])
            parts += ["", f"### {title}, relative to the trajectory: ratios{suffix}", ""]
            parts += _table(["task", *(heading for heading, _, _ in kept)], lines)
    return parts


def _mean(ratios: Mapping[str, float]) -> str:
    mean = mean_ratio(ratios)
    return "-" if mean is None else number(mean)


def _cells(rows: Rows, task: str, models: Sequence[str], key: str, split: str) -> list[str]:
    """A line of a table: the best value in bold."""
    found = {model: v for model in models if (v := values_of(rows, task, model, key, split))}
    if not found or (task, key) in MEANINGLESS:
        return [task, *["-"] * len(models)]
    medians = {model: statistics.median(v) for model, v in found.items()}
    best = min(medians, key=lambda m: medians[m])
    texts = [task]
    for model in models:
        if model not in medians:
            texts.append("-")
            continue
        text = number(medians[model])
        text = f"**{text}**" if model == best else text
        spread = [number(min(found[model])), number(max(found[model]))]
        texts.append(f"{text} ({' to '.join(spread)})" if len(found[model]) > 1 else text)
    return texts


# Heading, key in a row, form of a number.
_FACTS = (
    ("Parameters that work on the task", "active_parameters", "{:,.0f}"),
    ("Steps of training", "steps", "{:,.0f}"),
    ("CPU-seconds of training", "cpu_seconds", "{:.0f}"),
    ("Memory, MiB", "memory_mib", "{:.0f}"),
    ("Rollout step, CPU ms", "rollout_ms", "{:.2f}"),
)


def _training_tables(rows: Rows, tasks: Sequence[str], models: Sequence[str]) -> list[str]:
    """A table for each fact: its median over seeds, and the range."""
    parts: list[str] = []
    rows = [{**r, "active_parameters": r.get("active_parameters") or r["parameters"]} for r in rows]
    for heading, key, form in _FACTS:
        known = [r for r in rows if r.get(key) is not None]
        columns = [model for model in models if any(r["model"] == model for r in known)]
        lines = []
        for task in tasks:
            cells = [[r[key] for r in known if (r["task"], r["model"]) == (task, model)] for model in columns]
            lines.append([task, *(_fact(values, form) for values in cells)])
        parts += ["", f"### {heading}", "", *_table(["task", *columns], lines)] if columns else []
    return parts


def _fact(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    median, least, most = (form.format(v) for v in (statistics.median(values), min(values), max(values)))
    return median if least == most else f"{median} ({least} to {most})"


def number(value: float) -> str:
    """Three significant digits; a blow-up is written as such."""
    if not math.isfinite(value):
        return "blew up"
    return f"{value:.3g}" if 1e-4 <= abs(value) < 1e4 or not value else f"{value:.1e}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *(f"| {' | '.join(r)} |" for r in rows)]
