"""The headline of a result: every score of a model next to the best predictor that learned nothing, and what that
means.

A small error says nothing alone, and a difference over a handful of trajectories may be chance. So a score is never
shown without its reference, and is called better only if the paired difference over trajectories is significant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ups.evaluation.results import paired_difference, trajectory_means

# Heading, key of a predictor's summary. Medians of nRMSE and VRMSE: a few frames that have decayed to nothing make
# their means say nothing.
SCORES = (
    ("one step", "one_step_trmse"),
    ("rollout", "trmse"),
    ("median nRMSE", "nrmse_median"),
    ("median VRMSE", "vrmse_median"),
)
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


def headlines(result: Mapping[str, Any], model: str) -> list[Headline]:
    """The scores of a result's model, each with its own best reference. A steady task has no rollout."""
    found = []
    for score, key in SCORES:
        if result["steady"] and key == "one_step_trmse":
            continue  # the same number as that of its solution
        name = best_reference(result, key, model)
        ours, theirs = (float(result["predictors"][p]["summary"][key]) for p in (model, name))
        ratio = theirs / ours if ours > 0 and not math.isinf(ours) else math.inf if theirs > ours else math.nan
        words = verdict(difference(result, model, result, name, key), ours, theirs, with_article(name))
        label = "solution" if result["steady"] and key == "trmse" else score
        found.append(Headline(label, ours, theirs, name, ratio, words))
    return found


def best_reference(result: Mapping[str, Any], key: str, model: str) -> str:
    """The predictor, other than the model, with the smallest value of a summary."""
    others: dict[str, float] = {str(n): float(p["summary"][key]) for n, p in result["predictors"].items() if n != model}
    return min(others, key=lambda name: others[name])


def difference(
    a: Mapping[str, Any], a_name: str, b: Mapping[str, Any], b_name: str, key: str
) -> dict[str, float] | None:
    """Paired difference of a score between predictors of two results; None where it was not kept per trajectory."""
    metric = key.removesuffix("_median")
    rows = a["predictors"][a_name]["rows"], b["predictors"][b_name]["rows"]
    if not all(metric in row for some in rows for row in some.values()):
        return None  # scores that were written before one step was kept for each trajectory
    ours, theirs = (trajectory_means(some, metric) for some in rows)
    return paired_difference(ours, theirs, median=metric != key)


def significant(found: Mapping[str, float] | None) -> bool:
    """Whether a paired difference is more than chance: its 95 % interval leaves 0 out, over enough trajectories."""
    return (
        found is not None and found["num_trajectories"] >= MIN_TRAJECTORIES and (found["low"] > 0 or found["high"] < 0)
    )


def verdict(found: Mapping[str, float] | None, ours: float, theirs: float, name: str) -> str:
    """What a difference to `name` means, in a few words."""
    if not ours < theirs:
        worse = math.isinf(ours) or significant(found)
        return f"worse than {name}" if worse and ours > theirs else f"not better than {name}"
    if found is None:
        return f"better than {name}, significance not known"
    if found["num_trajectories"] < MIN_TRAJECTORIES:
        return f"not significantly better than {name} (too few trajectories to tell)"
    if math.isinf(theirs) or (significant(found) and found["high"] < 0):
        return f"better than {name}"
    return f"not significantly better than {name}"


def with_article(name: str) -> str:
    """'the training mean', 'persistence'."""
    return f"the {name}" if name.startswith("training") else name
