"""What a page about many runs shows of each: verdict, scores, loss. Reads run directories that may be untrusted: a
bounded part of each file, links refused. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ups.inference.stored_scores import ScoreRow, score_rows
from ups.record.files import is_number, read_end, read_object
from ups.record.run_dir import BUNDLE_FILE, RunDir
from ups.run.follow_metrics import rows_of
from ups.run.tags import read_tags
from ups.supervise.run_file import faults_of, list_runs, list_unreadable_runs

MAX_METRICS_BYTES = 8 << 20
MAX_SCORES_BYTES = 32 << 20
MAX_POINTS = 240
MAX_TASKS = 64


@dataclass(frozen=True, slots=True)
class RunCard:
    """One run. loss: (step, loss) of its last stage, thinned out; took: seconds, None where it is not known.

    report: its page, None where there is none.
    """

    name: str
    path: Path
    state: str
    cause: str = ""
    verdict: str = ""
    started: float | None = None
    took: float | None = None
    step: int | None = None
    ranks: int = 0
    faults: int = 0
    tags: tuple[str, ...] = ()
    gate: tuple[Mapping[str, Any], ...] = ()
    scores: tuple[ScoreRow, ...] = ()
    loss: tuple[tuple[float, float], ...] = field(default=())
    report: Path | None = None


def cards(directory: Path) -> list[RunCard]:
    """Every run of a directory, the newest first; then those whose record cannot be read."""
    tags = read_tags(directory)
    found = []
    for path, document in list_runs(directory):
        ended = document["ended"]
        found.append(
            RunCard(
                name=path.name,
                path=path,
                state=document["state"],
                cause=document["cause"],
                verdict=document["verdict"],
                started=float(document["started"]),
                took=None if ended is None else float(ended) - float(document["started"]),
                step=document["checkpoint"],
                ranks=int(document["ranks"]),
                faults=len(faults_of(document)),
                tags=tuple(sorted(tag for tag, one in tags.items() if one["run"] == path.name)),
                gate=tuple(document.get("gate", {}).get("conditions", ())),
                scores=tuple(scores_of(path)),
                loss=tuple(loss_of(path)),
                report=page if (page := RunDir(path).report_page).is_file() else None,
            )
        )
    return found + [RunCard(path.name, path, "unreadable", cause) for path, cause in list_unreadable_runs(directory)]


def scores_of(run_dir: Path) -> list[ScoreRow]:
    """Scores by the report of the run, or else by its bundle."""
    report = read_object(RunDir(run_dir).scores, MAX_SCORES_BYTES) or {}
    results = report.get("results")
    if isinstance(results, list) and results:
        named = [(one.get("task"), one) for one in results if isinstance(one, dict)]
    else:
        bundle = read_object(RunDir(run_dir).bundle / BUNDLE_FILE, MAX_SCORES_BYTES) or {}
        by_task = bundle.get("scores")
        items = by_task.items() if isinstance(by_task, dict) else ()
        named = list(items)
    return [row for task, one in named[:MAX_TASKS] for row in score_rows(task, one)]


def loss_of(run_dir: Path) -> list[tuple[float, float]]:
    """(step, loss) of the last stage by metrics.jsonl: losses of stages are not of one kind.

    Steps that were repeated after a restart as they were computed last.
    """
    lines = (read_end(RunDir(run_dir).metrics, MAX_METRICS_BYTES) or b"").splitlines()
    rows = [row for row in rows_of(lines) if is_number(row.get("step")) and is_number(row.get("loss"))]
    by_step = {float(row["step"]): float(row["loss"]) for row in rows if row.get("stage") == rows[-1].get("stage")}
    return thinned(sorted(by_step.items()))


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MAX_POINTS of them, evenly, the last one included."""
    if len(points) <= MAX_POINTS:
        return list(points)
    chosen = {round(n * (len(points) - 1) / (MAX_POINTS - 1)) for n in range(MAX_POINTS)}
    return [points[n] for n in sorted(chosen)]
