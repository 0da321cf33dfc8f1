"""Scores of several models side by side, and the refusal to compare what was not scored alike.

A `Scored` is what `ups eval` wrote for one model. The first model of a task is what the others are held against, paired
over the trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ups.errors import ConfigError, DataError
from ups.evaluation.results import (
    MODEL,
    best_reference,
    difference,
    direction,
    from_json,
    headlines,
    paired_difference,
    scores_of,
    significant,
    trajectory_means,
    with_article,
)
from ups.record.files import load_object
from ups.record.text import printable

# Everything in which two results must agree before their numbers mean the same.
_SAME = ("split", "data_identity", "steady", "space", "dt", "channels")
MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class Scored:
    """One model's scores: label, task -> result (see `ups.evaluation.results`), recipe as text where it is known."""

    label: str
    results: Mapping[str, Mapping[str, Any]]
    config_text: str = ""


@dataclass(frozen=True)
class TaskComparison:
    """One task: label -> result of the models that have it, label -> rollout difference to the first of them."""

    task: str
    results: Mapping[str, Mapping[str, Any]]
    differences: Mapping[str, Mapping[str, float]]

    def summary(self, label: str) -> Mapping[str, float]:
        """Scores of a model on this task."""
        summary: Mapping[str, float] = self.results[label]["predictors"][MODEL]["summary"]
        return summary

    def scores(self) -> list[tuple[str, str]]:
        """Heading and key of the scores that all models of this task have."""
        return [
            (heading, key)
            for heading, key in scores_of(self.first)
            if all(key in self.summary(m) for m in self.results)
        ]

    def best(self, key: str) -> str:
        """Label of the model with the best value of a score."""
        sign = direction(self.first, key)
        return min(self.results, key=lambda label: sign * float(self.summary(label)[key]))

    @property
    def first(self) -> Mapping[str, Any]:
        """Result of the first model; the references in it are those of all, because the data is the same."""
        return next(iter(self.results.values()))

    def references(self) -> dict[str, Mapping[str, float]]:
        """Name -> summary of the baselines."""
        return {name: p["summary"] for name, p in self.first["predictors"].items() if name != MODEL}

    def reference(self, key: str) -> tuple[str, float]:
        """The best reference of a score, and its value."""
        name = best_reference(self.first, key)
        return name, float(self.references()[name][key])

    def winner(self, key: str) -> tuple[str | None, str]:
        """The model that is significantly better than all others and than the reference, or None and why not."""
        best, (name, _) = self.best(key), self.reference(key)
        result = self.results[best]
        if not _better(difference(result, MODEL, result, name, key)):
            return None, f"no model is significantly better than {with_article(name)}"
        others = [label for label in self.results if label != best]
        alike = [o for o in others if not _better(difference(result, MODEL, self.results[o], MODEL, key))]
        return (None, f"{best} is not significantly better than {', '.join(alike)}") if alike else (best, "")

    def over_seeds(self, groups: Mapping[str, Sequence[str]], key: str) -> dict[str, dict[str, float]]:
        """Group -> number of its runs, mean and standard deviation (nan of one run) of a score; the best mean first."""
        rows = {}
        for name, labels in groups.items():
            values = [float(self.summary(label)[key]) for label in labels if label in self.results]
            if values:
                mean, freedom = sum(values) / len(values), len(values) - 1
                square = sum((value - mean) ** 2 for value in values) / freedom if freedom else math.nan
                rows[name] = {"num_seeds": len(values), "mean": mean, "std": math.sqrt(square)}
        sign = direction(self.first, key)
        return dict(sorted(rows.items(), key=lambda item: sign * item[1]["mean"]))

    def rollout_verdict(self, label: str) -> str:
        """What the rollout error of a model means next to its reference."""
        lines = {line.score: line for line in headlines(self.results[label])}
        return lines["solution" if self.first["steady"] else "rollout"].verdict

    def curves(self) -> dict[str, list[float]]:
        """Error relative to the trajectory at each predicted step, mean over channels: of models and references."""
        parts = {label: self.results[label]["predictors"][MODEL] for label in self.results}
        parts |= {name: self.first["predictors"][name] for name in self.references() if name not in parts}
        return {name: [sum(step) / len(step) for step in part["curves"]["trmse"]] for name, part in parts.items()}


def _better(delta: Mapping[str, float] | None) -> bool:
    return delta is not None and significant(delta) and delta["high"] < 0


def read_scores(path: Path, label: str) -> Scored:
    """The scores of one file. Raises DataError if it is not one that this version of `ups eval` wrote."""
    try:
        return scored_from(load_object(path, MAX_BYTES), label)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise DataError(
            f"{path} does not hold scores that can be compared ({type(error).__name__}: {error})",
            hint="write them again with: ups eval RUN",
        ) from error


def scored_from(data: Mapping[str, Any], label: str) -> Scored:
    """Scores from the content of a scores.json; looks up every part that a comparison needs."""
    results = {}
    for result in from_json(data["results"]):
        numbers = [result["protocol"][key] for key in ("num_trajectories", "num_steps", "start_frame")]
        for part in result["predictors"].values():
            numbers += [part["summary"][key] for _, key in scores_of(result)]
            numbers += [sum(step) / len(step) for step in part["curves"]["trmse"]]
        for value in [*numbers, *trajectory_means(result["predictors"][MODEL]["rows"]).values()]:
            if type(value) not in (int, float):
                raise TypeError(f"a {type(value).__name__} where a number belongs")
            float(value)  # an OverflowError for whole numbers that are none
        headlines(result)
        for key in _SAME:
            result[key]
        if not isinstance(result["task"], str):
            raise TypeError("a task has no name")
        results[printable(result["task"])] = result
    return Scored(label, results, str(data.get("config", "")))


def compare(scored: Sequence[Scored]) -> tuple[list[TaskComparison], list[str]]:
    """Comparisons of all tasks that two models or more have, and a line about each task that only one has.

    Raises ConfigError if a task was scored on other data or by another protocol.
    """
    tasks = dict.fromkeys(task for one in scored for task in one.results)
    compared, notes = [], []
    for task in tasks:
        having = [one for one in scored if task in one.results]
        if len(having) == 1:
            notes.append(f"only {having[0].label} has scores of {task}")
            continue
        first = having[0]
        for other in having[1:]:
            check_alike(task, first, other)
            rows = (one.results[task]["predictors"][MODEL]["rows"] for one in (first, other))
            if not set.intersection(*(set(map(int, row)) for row in rows)):
                raise ConfigError(f"{first.label} and {other.label} have no trajectory of '{task}' in common")
        means = {o.label: trajectory_means(o.results[task]["predictors"][MODEL]["rows"]) for o in having}
        differences = {one.label: paired_difference(means[one.label], means[first.label]) for one in having[1:]}
        compared.append(TaskComparison(task, {one.label: one.results[task] for one in having}, differences))
    if not compared:
        raise ConfigError(
            "there is no task that two of them have: " + "; ".join(f"{s.label}: {', '.join(s.results)}" for s in scored)
        )
    return compared, notes


def check_alike(task: str, a: Scored, b: Scored) -> None:
    """Raises ConfigError that names each part of data and protocol in which two results of a task differ."""
    ours, theirs = a.results[task], b.results[task]
    pairs = [(key, ours[key], theirs[key]) for key in _SAME]
    plans = ours["protocol"], theirs["protocol"]
    pairs += [(key, plans[0].get(key), plans[1].get(key)) for key in dict.fromkeys([*plans[0], *plans[1]])]
    wrong = [f"{key} {_short(x)} and {_short(y)}" for key, x, y in pairs if x != y]
    if wrong:
        raise ConfigError(
            f"scores of '{task}' by {a.label} and {b.label} do not mean the same: {'; '.join(wrong)}",
            hint="score both on the same data in the same way with `ups eval`, or choose tasks with --task",
        )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}..."
