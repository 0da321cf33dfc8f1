"""Writes scores and report of a trained model: scores.json always, index.html where it is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ups.cli.scoring import MODEL, worst_examples

if TYPE_CHECKING:
    from ups.cli.trained import Trained


def write_scores(folder: Path, trained: Trained, results: Sequence[Mapping[str, Any]], *, page: bool) -> list[Path]:
    """Write scores.json, and with `page` index.html, into `folder`; returns what was written."""
    from ups.evaluation.results import to_json
    from ups.record.manifest import write_file_atomically

    folder.mkdir(parents=True, exist_ok=True)
    data = {"model": trained.name, "identity": trained.identity, "results": to_json(results)}
    scores = folder / "scores.json"
    write_file_atomically(scores, json.dumps(data, indent=1, allow_nan=False).encode())
    written = [scores]
    if page:
        from ups.evaluation.report.page import write_report

        text = write_report(
            results,
            worst_examples(trained, results),
            title=f"{trained.name}: scores",
            model=MODEL,
            identity=trained.identity,
            config_text=trained.config_text,
        )
        write_file_atomically(folder / "index.html", text.encode())
        written.append(folder / "index.html")
    return written
