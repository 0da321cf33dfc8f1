"""Scores as plain data: what `ups eval` writes as JSON and what the report draws.

A result names its protocol (split, context, start frame, steps) and the identity of data and model, because a score
without them means nothing. Infinite scores (a blow-up) are written as the text "inf": JSON has no infinity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ups.evaluation.accumulate import Accumulator
from ups.evaluation.rollout import RolloutPlan
from ups.formats.base import Reader
from ups.spec.keyed import key_of

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


def best_predictor(result: Mapping[str, Any], metric: str) -> str:
    """Name of the predictor with the smallest value of a summary metric."""
    predictors: Mapping[str, Any] = result["predictors"]
    return min(predictors, key=lambda name: float(predictors[name]["summary"][metric]))
