"""Scores as reports and bundles store them, with verdicts, and the warnings that follow for a bundle. No torch.

Documents may be untrusted or of earlier versions: what is missing or malformed counts as not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ups.record.files import is_number, read_object
from ups.record.run_dir import BUNDLE_FILE
from ups.record.text import path_text, printable

MODEL = "model"
MAX_WORDS = 200
# Heading, key in the summary of a predictor.
SCORES = (("one step", "one_step_trmse"), ("rollout", "trmse"))
MEDIANS = (("median nRMSE", "nrmse_median"), ("median VRMSE", "vrmse_median"))
# How verdicts begin (`ups.evaluation.results`) where a model is not better than its best reference.
_NOT_BETTER = ("not better", "not significantly better", "worse")
# In the provenance of a bundle: in what way its training was shorter than its recipe means.
TOO_SHORT = "training too short"


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """One score of the model on a task, and the best baseline ('' if there is none).

    verdict: what that means, '' where it is not known.
    """

    task: str
    score: str
    model: float
    reference: float
    reference_name: str
    verdict: str = ""


def not_better(scores: Mapping[str, Any], task: str) -> str:
    """The scores on which a task is not better than its best reference, in a line; '' for none, and if not known."""
    groups: dict[str, list[str]] = {}
    for row in score_rows(task, scores.get(task), SCORES + MEDIANS):
        # Where there are too few trajectories to tell, the number itself is better.
        if row.verdict.startswith(_NOT_BETTER) and "too few" not in row.verdict:
            groups.setdefault(row.verdict, []).append(f"{row.score} {row.model:.4g} ({row.reference:.4g})")
    texts = [f"{verdict}: {', '.join(rows)}" for verdict, rows in groups.items()]
    return printable(f"this simulator is {' and '.join(texts)}") if texts else ""


def bundle_warnings(scores: Mapping[str, Any], provenance: Mapping[str, str]) -> list[str]:
    """Everything that speaks against a bundle, a line each. scores, provenance: as `BundleInfo` has them."""
    lines = [f"{task[:100]}: {text}" for task in scores if (text := not_better(scores, task))]
    return [printable(line) for line in [*lines, *([provenance[TOO_SHORT][:400]] if TOO_SHORT in provenance else [])]]


def stored_warnings(bundle: Path) -> tuple[str, list[str]]:
    """Steps of the training of a bundle, and the warnings about it. Nothing of a bundle that cannot be read."""
    document = read_object(bundle / BUNDLE_FILE) or {}
    tables = (document.get("scores"), document.get("provenance"))
    scores, provenance = (table if isinstance(table, dict) else {} for table in tables)
    texts = {name: str(text) for name, text in provenance.items()}
    return printable(texts.get("step", "?")[:20]), bundle_warnings(scores, texts)


def written_words(bundle: Path) -> str:
    """The last line about a bundle that was written: after how many steps, and what speaks against it."""
    step, texts = stored_warnings(bundle)
    return "; WARNING: ".join([f"wrote {path_text(bundle)} after {step} steps", *texts])


def score_rows(task: object, result: object, scores: Sequence[tuple[str, str]] = SCORES) -> list[ScoreRow]:
    """Rows of a task's result as a report or a bundle stores it. scores: heading and key of each."""
    if not isinstance(result, dict) or not isinstance(task, str):
        return []
    summaries, verdicts = _summaries(result.get("predictors")), _verdicts(result.get("headline"))
    rows = []
    for heading, key in scores:
        ours = _number(summaries.get(MODEL, {}).get(key))
        others = {name: _number(one.get(key)) for name, one in summaries.items() if name != MODEL}
        known = {name: value for name, value in others.items() if not math.isnan(value)}
        best = min(known, key=lambda name: known[name], default="")
        if not math.isnan(ours):
            rows.append(ScoreRow(task, heading, ours, known.get(best, math.nan), best))
    if len(rows) > 1 and rows[0].model == rows[1].model:  # a steady task: the same number twice
        rows = [replace(rows[0], score="solution"), *rows[2:]]
    return [replace(row, verdict=verdicts.get(row.score) or _plain_verdict(row)) for row in rows]


def _verdicts(headline: object) -> dict[str, str]:
    """Score -> what it means next to the reference; runs of earlier versions have none."""
    lines = [line for line in headline if isinstance(line, dict)] if isinstance(headline, list) else []
    return {str(line.get("score")): str(line.get("verdict", ""))[:MAX_WORDS] for line in lines}


def _summaries(predictors: object) -> dict[str, Mapping[str, Any]]:
    """Name -> summary; a bundle keeps the summaries alone."""
    if not isinstance(predictors, dict):
        return {}
    summaries = {str(name): one.get("summary", one) for name, one in predictors.items() if isinstance(one, dict)}
    return {name: one for name, one in summaries.items() if isinstance(one, dict)}


def _plain_verdict(row: ScoreRow) -> str:
    """What two numbers say without those of each trajectory: never that a model is significantly better."""
    worse = bool(row.reference_name) and not row.model < row.reference
    return "not better than the best reference" if worse else ""


def _number(value: object) -> float:
    """A number of a document; infinity is written as text there, and everything else is none."""
    if value == "inf":
        return math.inf
    return float(value) if is_number(value) else math.nan  # type: ignore[arg-type]
