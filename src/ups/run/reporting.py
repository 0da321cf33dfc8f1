"""Writes scores and report of a trained model: scores.json always, index.html where it is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ups.record.run_dir import RunDir, is_bundle
from ups.run.scoring import MODEL, worst_examples

if TYPE_CHECKING:
    from ups.run.trained import Trained

LEAST_DRAWING_SECONDS = 20.0


def report_folder(model: Path) -> Path:
    """Where the report of a run or bundle goes: RUN/report, or next to a bundle, in which any new file is damage."""
    if not is_bundle(model):
        return RunDir(model).report
    named = model.resolve() if model.name in ("", "..") else model
    return named.with_name(f"{named.name}-report")


def write_scores(
    folder: Path, trained: Trained, results: Sequence[Mapping[str, Any]], *, page: bool, scoring_seconds: float = 0.0
) -> list[Path]:
    """Write scores.json, and with `page` index.html, into `folder`; returns what was written."""
    from ups.evaluation.headline import headlines
    from ups.evaluation.results import to_json
    from ups.record.manifest import write_file_atomically

    folder.mkdir(parents=True, exist_ok=True)
    data = {"model": trained.name, "identity": trained.identity, "config": trained.config_text}
    data["results"] = to_json(
        [{**result, "headline": [line.to_json() for line in headlines(result, MODEL)]} for result in results]
    )
    scores = folder / "scores.json"
    write_file_atomically(scores, json.dumps(data, indent=1, allow_nan=False).encode())
    return [scores, write_page(folder, trained, results, scoring_seconds)] if page else [scores]


def write_page(
    folder: Path, trained: Trained, results: Sequence[Mapping[str, Any]], scoring_seconds: float = 0.0
) -> Path:
    """Write index.html into `folder`; returns it. Drawing takes no longer than scoring did, or LEAST_DRAWING_SECONDS.

    Pictures are for eyes, and on a machine without free cores they would take longer than the training.
    """
    import time
    import warnings

    from ups.evaluation.report.page import write_report
    from ups.record.manifest import write_file_atomically

    # JAX, if a solver was measured, warns of every fork; the one that makes films replaces itself at once.
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
    ends = time.monotonic() + max(scoring_seconds, LEAST_DRAWING_SECONDS)
    examples = worst_examples(trained, results)
    text = write_report(
        results,
        examples,
        title=f"{trained.name}: scores",
        model=MODEL,
        identity=trained.identity,
        config_text=trained.config_text,
        seconds=ends - time.monotonic(),
    )
    write_file_atomically(folder / "index.html", text.encode())
    return folder / "index.html"
