"""Judges the scores that a run has by the gate of its recipe. Reads scores.json and nothing else: no torch, no data.

A condition that cannot be judged does not hold: a missing score, or one that is not a number, never passes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ups.config.schema import BEST, COST, DRIFT, GateCondition
from ups.errors import ConfigError
from ups.inference.stored_scores import MODEL
from ups.record.files import load_object


@dataclass(frozen=True, slots=True)
class Judged:
    """One condition on one task ('' for all). value: what the limit is held against, NaN where there is none."""

    task: str
    condition: str
    holds: bool
    value: float
    says: str

    def to_json(self) -> dict[str, Any]:
        """As JSON, where NaN and infinity do not exist."""
        return {**asdict(self), "value": self.value if math.isfinite(self.value) else str(self.value)}


def read_results(scores: Path) -> list[dict[str, Any]]:
    """The results of a scores.json, one for each task. Raises ConfigError if they cannot be read."""
    try:
        results = load_object(scores)["results"]
        if not isinstance(results, list) or not all(_is_result(result) for result in results):
            raise ValueError("its results are not what `ups eval` writes")
    except (OSError, ValueError, KeyError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{scores} cannot be read: {reason}", hint="score it again with: ups eval RUN") from error
    return results


def _is_result(result: object) -> bool:
    if not isinstance(result, dict) or not isinstance(result.get("task"), str):
        return False
    predictors = result.get("predictors")
    return isinstance(predictors, dict) and all(
        isinstance(predictor, dict) and isinstance(predictor.get("summary"), dict) for predictor in predictors.values()
    )


def judge(conditions: Sequence[GateCondition], results: Sequence[Mapping[str, Any]]) -> list[Judged]:
    """Each condition on each of its tasks. One for all tasks leaves out those that have no such score by nature."""
    return [verdict for condition in conditions for verdict in _judge(condition, results)]


def _judge(condition: GateCondition, results: Sequence[Mapping[str, Any]]) -> list[Judged]:
    by_name = {result["task"]: result for result in results}
    low = -math.inf if condition.at_least is None else condition.at_least
    high = math.inf if condition.at_most is None else condition.at_most
    verdicts = []
    for name in condition.tasks or by_name:
        result = by_name.get(name)
        value, problem = (math.nan, "was not scored") if result is None else _value(condition, result)
        if not problem or condition.tasks is not None:
            # A comparison with NaN is false; what is infinite never passes, whatever the limit.
            holds = not problem and math.isfinite(value) and low <= value <= high
            verdicts.append(Judged(name, condition.words(), holds, value, problem or f"is {value:.4g}"))
    return verdicts or [Judged("", condition.words(), False, math.nan, "no task has such a score")]


def _value(condition: GateCondition, result: Mapping[str, Any]) -> tuple[float, str]:
    """The value that the limit applies to, and '' or why it is missing."""
    if condition.metric == COST:
        return _number(result.get("cost"), COST, "its cost was not measured")
    if condition.metric == DRIFT:
        return _drift(result)
    summaries = {name: predictor["summary"] for name, predictor in result["predictors"].items()}
    ours, problem = _number(summaries.get(MODEL), condition.metric, f"has no score {condition.metric}")
    if problem or condition.relative_to is None:
        return ours, problem
    others = {name: summary for name, summary in summaries.items() if name != MODEL}
    if condition.relative_to != BEST:
        others = {name: summary for name, summary in others.items() if name == condition.relative_to}
    theirs = [_number(summary, condition.metric, "no number")[0] for summary in others.values()]
    known = [value for value in theirs if not math.isnan(value)]
    if not known:
        return math.nan, f"has no reference '{condition.relative_to}' with that score"
    # A limit from below is for a score that should be high: its best reference is the highest.
    best = min if condition.at_least is None else max
    return _ratio(ours, best(known)), ""


def _ratio(ours: float, theirs: float) -> float:
    if theirs > 0:
        return ours / theirs
    # A reference without error: equal to it is 1, everything else infinitely worse.
    return 1.0 if ours == theirs else math.inf


def _drift(result: Mapping[str, Any]) -> tuple[float, str]:
    """The largest, over steps and conserved channels, of the mean drift over trajectories."""
    conserved, channels = result.get("conserved") or [], result.get("channels") or []
    # A vector field `v` has the channels `v_x`, `v_y`.
    indices = [n for n, name in enumerate(channels) if any(name == f or name.startswith(f"{f}_") for f in conserved)]
    if not indices:
        return math.nan, "conserves nothing"
    try:
        curve = result["predictors"][MODEL]["curves"][DRIFT]
        return max(float(step[channel]) for step in curve for channel in indices), ""
    except (KeyError, IndexError, TypeError, ValueError):
        return math.nan, "has no drift"


def _number(values: object, name: str, problem: str) -> tuple[float, str]:
    """A number by name, infinity written as text included."""
    value = values.get(name) if isinstance(values, Mapping) else None
    try:
        # float() of a text reads 'inf' and 'nan', as scores.json has them.
        return (float(value), "") if value is not None and not isinstance(value, bool) else (math.nan, problem)
    except (TypeError, ValueError):
        return math.nan, problem


def gate_words(judged: Sequence[Judged]) -> str:
    """The first condition that does not hold, and how many more; '' if all hold."""
    failed = [one for one in judged if not one.holds]
    if not failed:
        return ""
    first = f"{failed[0].task}: " if failed[0].task else ""
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    return f"{first}{failed[0].condition}: {failed[0].says}{more}"
