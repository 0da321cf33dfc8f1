"""Scores as plain data: what `ups eval` writes as JSON and what the report draws.

A result names its protocol (split, context, start frame, steps) and the identity of data and model, because a score
without them means nothing. Infinite scores (a blow-up) are written as the text "inf": JSON has no infinity.

The headline of a result is every score of the model next to the best reference, and what that means. A small error says
nothing without a reference, and a difference over a handful of trajectories may be chance: a score is called better
only if the paired difference over trajectories is significant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ups.evaluation.accumulate import Accumulator
from ups.evaluation.metrics import metric_columns
from ups.evaluation.rollout import RolloutPlan
from ups.formats.base import Reader
from ups.record.text import printable
from ups.spec.keyed import key_of

# Name of the model among the predictors of a result (`ups.inference.stored_scores`).
MODEL = "model"
ONE_STEP = ("trmse", "nrmse", "vrmse")
CURVES = ("trmse", "nrmse", "vrmse", "rmse", "drift")
NUM_RESAMPLES = 2000


def task_result(
    reader: Reader,
    plan: RolloutPlan,
    split: str,
    scores: Mapping[str, Accumulator],
    model: str,
    one_step: Mapping[str, Accumulator],
    in_train: Mapping[int, int] | None = None,
) -> dict[str, Any]:
    """One task's result: for every predictor its summary, curves and rows, and the model's paired differences.

    scores are of rollouts; one_step of the same frames, each predicted from the true ones before it. in_train: what
    `ups.data.validate` found, trajectory -> the same one in the train split.
    """
    first = next(iter(scores.values()))
    result: dict[str, Any] = {
        "task": reader.task.name,
        "steady": reader.task.steady,
        "equation": reader.task.equation,
        "split": split,
        "data_identity": reader.identity(),
        "space": list(reader.space),
        "dt": reader.task.dt,
        "protocol": {
            "context_frames": plan.context_frames,
            "start_frame": plan.start_frame,
            "num_steps": plan.num_steps,
            "num_trajectories": first.num_samples,
        },
        "channels": list(first.channels),
        "conserved": list(reader.task.conserved),
        "in_train": {str(t): twin for t, twin in (in_train or {}).items()},
        "spectrum_steps": list(first.spectrum_steps),
        "truth": {"spectra": first.spectra("truth").tolist()},
        "predictors": {},
        "differences": {},
    }
    if added := metric_columns():
        result["metrics"] = added
    ours = trajectory_means(scores[model].rows)
    for name, score in scores.items():
        result["predictors"][name] = {
            "summary": score.summary() | {f"one_step_{k}": one_step[name].summary()[k] for k in ONE_STEP},
            "curves": {c: score.curve(c).tolist() for c in CURVES if c in score.sums},
            "spectra": score.spectra().tolist(),
            "rows": {
                str(t): row | {"one_step_trmse": one_step[name].rows[t]["trmse"]}
                for t, row in sorted(score.rows.items())
            },
            "worst": score.worst(),
        }
        if name != model:
            result["differences"][name] = paired_difference(ours, trajectory_means(score.rows))
    return result


def trajectory_means(rows: Mapping[Any, Mapping[str, Any]], metric: str = "trmse") -> dict[int, float]:
    """Mean over steps and channels of a metric of each trajectory. rows: of an accumulator, or of a scores.json."""
    return {int(t): sum(row[metric]) / len(row[metric]) for t, row in rows.items()}


def paired_difference(
    ours: Mapping[int, float], theirs: Mapping[int, float], *, median: bool = False
) -> dict[str, float]:
    """Mean of (ours - theirs) over trajectories with a 95 % bootstrap interval; below 0 means ours is better.

    Trajectories are resampled as pairs, because a hard trajectory is hard for everyone. Infinite if either blew up.
    median: difference of the two medians over trajectories instead (then under `mean`, too).
    """
    shared = sorted(set(ours) & set(theirs))
    pairs = np.array([[ours[t] for t in shared], [theirs[t] for t in shared]])
    if not np.isfinite(pairs).all():
        return {"mean": math.inf, "low": math.inf, "high": math.inf, "num_trajectories": float(len(shared))}
    generator = np.random.default_rng(key_of(0, "bootstrap", len(shared)))
    picks = generator.integers(0, len(shared), size=(NUM_RESAMPLES, len(shared)))
    if median:
        center = np.subtract(*np.median(pairs, axis=1))
        means = np.subtract(*np.median(pairs[:, picks], axis=2))
    else:
        values = pairs[0] - pairs[1]
        center = values.mean()
        means = values[picks].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return {
        "mean": float(center),
        "low": float(low),
        "high": float(high),
        "num_trajectories": float(len(shared)),
    }


def to_json(value: Any) -> Any:
    """The same data with infinities and NaN as text, so that any JSON parser reads it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value > 0 else "-inf" if value < 0 else "nan"
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_json(v) for v in value]
    return value


def from_json(value: Any) -> Any:
    """What `to_json` wrote, with its texts for infinities and NaN as numbers again."""
    if isinstance(value, str):
        return float(value) if value in ("inf", "-inf", "nan") else value
    if isinstance(value, Mapping):
        return {k: from_json(v) for k, v in value.items()}
    if isinstance(value, list):
        return [from_json(v) for v in value]
    return value


def leak_words(result: Mapping[str, Any]) -> str:
    """What to say about scored trajectories that the model has been trained on."""
    shared = list(result["in_train"].items())
    shown = ", ".join(f"{mine} (train {theirs})" for mine, theirs in shared[:5]) + (", ..." if len(shared) > 5 else "")
    return (
        f"{len(shared)} {result['split']} trajectories of '{result['task']}' are also in the train split: {shown}; "
        "scores on them say nothing"
    )


# Heading, key of a predictor's summary. Medians of nRMSE and VRMSE: a few frames that have decayed to nothing make
# their means say nothing.
SCORES = (
    ("one step", "one_step_trmse"),
    ("rollout", "trmse"),
    ("median nRMSE", "nrmse_median"),
    ("median VRMSE", "vrmse_median"),
)
HIGHER_IS_BETTER = frozenset({"correlation_time"})
# With fewer pairs not even equal signs of all differences are significant (sign test, 5 %).
MIN_TRAJECTORIES = 6


@dataclass(frozen=True)
class Headline:
    """One score: of the model, of the best reference, their ratio (above 1 the model is better), and a plain word."""

    score: str
    model: float
    reference: float
    reference_name: str
    ratio: float
    verdict: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def headlines(result: Mapping[str, Any]) -> list[Headline]:
    """The scores of a result's model, each with its own best reference. A steady task has no rollout."""
    lines = []
    for score, key in scores_of(result):
        name = best_reference(result, key)
        sign = direction(result, key)
        ours, theirs = (float(result["predictors"][p]["summary"][key]) for p in (MODEL, name))
        words = verdict(difference(result, MODEL, result, name, key), sign * ours, sign * theirs, with_article(name))
        ratio = _ratio(theirs, ours) if sign > 0 else _ratio(ours, theirs)
        lines.append(Headline(score, ours, theirs, name, ratio, words))
    return lines


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 and not math.isinf(below) else math.inf if above > below else math.nan


def scores_of(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Heading and key of the scores that are shown of a result: those of the protocol, then metrics that were added."""
    scores = list(SCORES)
    if result["steady"]:  # one step has the same number as the solution
        scores = [("solution" if key == "trmse" else heading, key) for heading, key in SCORES[1:]]
    return scores + [
        (printable(str(metric["heading"])[:60]), name) for name, metric in result.get("metrics", {}).items()
    ]


def direction(result: Mapping[str, Any], key: str) -> float:
    """1 where smaller values of a score are better, -1 where larger ones are."""
    metric = result.get("metrics", {}).get(key, {})
    return -1.0 if metric.get("higher_is_better") or key in HIGHER_IS_BETTER else 1.0


def best_predictor(result: Mapping[str, Any], key: str) -> str:
    """Name of the predictor with the best value of a score."""
    predictors: Mapping[str, Any] = result["predictors"]
    sign = direction(result, key)
    return min(predictors, key=lambda name: sign * float(predictors[name]["summary"][key]))


def best_reference(result: Mapping[str, Any], key: str) -> str:
    """The predictor, other than the model, with the best value of a score."""
    others = {name: predictor for name, predictor in result["predictors"].items() if name != MODEL}
    return best_predictor({**result, "predictors": others}, key)


def difference(
    a: Mapping[str, Any], a_name: str, b: Mapping[str, Any], b_name: str, key: str
) -> dict[str, float] | None:
    """Paired difference of a score between predictors of two results; None where it was not kept per trajectory.

    Below 0 the first is better, whatever the direction of the score.
    """
    metric = key.removesuffix("_median")
    rows = a["predictors"][a_name]["rows"], b["predictors"][b_name]["rows"]
    if not all(metric in row for some in rows for row in some.values()):
        return None  # scores that were written before one step was kept for each trajectory
    sign = direction(a, key)
    ours, theirs = ({t: sign * mean for t, mean in trajectory_means(some, metric).items()} for some in rows)
    return paired_difference(ours, theirs, median=metric != key)


def significant(delta: Mapping[str, float] | None) -> bool:
    """Whether a paired difference is more than chance: its 95 % interval leaves 0 out, over enough trajectories."""
    return (
        delta is not None and delta["num_trajectories"] >= MIN_TRAJECTORIES and (delta["low"] > 0 or delta["high"] < 0)
    )


def verdict(delta: Mapping[str, float] | None, ours: float, theirs: float, name: str) -> str:
    """What a difference to `name` means, in a few words."""
    if not ours < theirs:
        worse = math.isinf(ours) or significant(delta)
        return f"worse than {name}" if worse and ours > theirs else f"not better than {name}"
    if delta is None:
        return f"better than {name}, significance not known"
    if delta["num_trajectories"] < MIN_TRAJECTORIES:
        return f"not significantly better than {name} (too few trajectories to tell)"
    if math.isinf(theirs) or (significant(delta) and delta["high"] < 0):
        return f"better than {name}"
    return f"not significantly better than {name}"


def with_article(name: str) -> str:
    """'the training mean', 'persistence'."""
    return f"the {name}" if name.startswith("training") else name
