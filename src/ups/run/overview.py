"""`ups runs page`: one self-contained page about many runs, with verdict, scores and loss of each. No torch.

Names, causes and scores come from files that anybody may have written: a bounded part of each file is read, links are
refused, and every text is escaped. The page has no script and no address outside; it is `templates/overview.html`.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ups.inference.stored_scores import ScoreRow, score_rows
from ups.record.files import is_number, read_end, read_object
from ups.record.run_dir import BUNDLE_FILE, RunDir
from ups.record.text import counted, duration_text, printable
from ups.run.many_runs import tags_of
from ups.supervise.run_file import RunDocument, faults_of, survey_runs
from ups.tracking.metrics_file import rows_in

MAX_METRICS_BYTES = 8 << 20
MAX_SCORES_BYTES = 32 << 20
MAX_POINTS = 240
MAX_TASKS = 64


def cards(directory: Path, folder: Path) -> list[dict[str, Any]]:
    """What the page in `folder` shows of every run of a directory: the newest first, then the unreadable ones."""
    readable, unreadable = survey_runs(directory)
    shown = [_card(path, document, folder) for path, document in readable]
    return shown + [_head(path, "unreadable", cause, folder) for path, cause in unreadable]


def scores_of(run_dir: Path) -> list[ScoreRow]:
    """Scores by the report of the run, or else by its bundle."""
    report = read_object(RunDir(run_dir).scores, MAX_SCORES_BYTES) or {}
    results = report.get("results")
    if isinstance(results, list) and results:
        named = [(one.get("task"), one) for one in results if isinstance(one, dict)]
    else:
        bundle = read_object(RunDir(run_dir).bundle / BUNDLE_FILE, MAX_SCORES_BYTES) or {}
        by_task = bundle.get("scores")
        named = list(by_task.items()) if isinstance(by_task, dict) else []
    return [row for task, one in named[:MAX_TASKS] for row in score_rows(task, one)]


def loss_of(run_dir: Path) -> list[tuple[float, float]]:
    """(step, loss) of the last stage by metrics.jsonl: losses of stages are not of one kind.

    Steps that were repeated after a restart as they were computed last; at most MAX_POINTS, evenly, the last included.
    """
    lines = (read_end(RunDir(run_dir).metrics, MAX_METRICS_BYTES) or b"").splitlines()
    rows = [row for row in rows_in(lines) if is_number(row.get("step")) and is_number(row.get("loss"))]
    by_step = {float(row["step"]): float(row["loss"]) for row in rows if row.get("stage") == rows[-1].get("stage")}
    points, most = sorted(by_step.items()), MAX_POINTS - 1
    if len(points) <= MAX_POINTS:
        return points
    return [points[round(n * (len(points) - 1) / most)] for n in range(MAX_POINTS)]


WIDTH, HEIGHT = 260, 72
# State -> (word, class): never by color alone.
_STATES = {
    "completed": ("completed", "good"),
    "running": ("running", "going"),
    "gate_failed": ("gate failed", "bad"),
    "failed": ("failed", "bad"),
    "died": ("died", "bad"),
    "unreadable": ("unreadable", "bad"),
    "preempted": ("preempted", "held"),
    "stopped": ("stopped", "held"),
}
HEADS = ("task", "error of", "model", "best reference", "ratio", "the model is")


def overview_page(cards: Sequence[Mapping[str, Any]], title: str, now: float) -> str:
    """The page as text. now: seconds since 1970, for its date."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ups.run"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    counts = Counter(card["word"] for card in cards)
    states = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    return environment.get_template("overview.html").render(
        title=title,
        summary=counted(len(cards), "run") + (f": {states}" if cards else ""),
        made=_date(now),
        runs=cards,
        heads=HEADS,
        width=WIDTH,
        height=HEIGHT,
    )


def _head(path: Path, state: str, cause: str, folder: Path) -> dict[str, Any]:
    """What is known of a run whose record cannot be read."""
    word, style = _STATES.get(state, (state, "held"))
    nothing = dict.fromkeys(("tags", "facts", "report", "scores", "gate", "curve"), ())
    known = {"name": path.name, "address": _address(path, folder), "word": word, "style": style, "cause": cause}
    return nothing | known


def _card(path: Path, document: RunDocument, folder: Path) -> dict[str, Any]:
    """What the template shows of a run."""
    started, ended, step = document["started"], document["ended"], document["checkpoint"]
    facts = [counted(document["ranks"], "rank")] if document["ranks"] else []
    facts += [f"step {step}"] if step is not None else []
    facts += [duration_text(ended - started)] if ended is not None else []
    facts += [counted(len(faults), "fault")] if (faults := faults_of(document)) else []
    gate = sorted(document.get("gate", {}).get("conditions", ()), key=lambda one: bool(one["holds"]))[:20]
    page = RunDir(path).report_page
    return _head(path, document["state"], document["cause"], folder) | {
        "tags": tags_of(path),
        "facts": [line for line in (_date(started), ", ".join(facts)) if line],
        "report": _address(page, folder) if page.is_file() else "",
        "scores": [_score_cells(row) for row in scores_of(path)],
        "gate": [(one["holds"], f"{one['task'] or 'all tasks'}: {one['condition']}: {one['says']}") for one in gate],
        "curve": _curve(loss_of(path)),
    }


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _address(path: Path, folder: Path) -> str:
    """A link from a page in `folder` to something else on this disk. A name in the path cannot be a scheme or a tag."""
    return "./" + quote(os.path.relpath(path, folder), safe="/")


def _score_cells(row: ScoreRow) -> tuple[tuple[str, ...], bool]:
    """The cells under HEADS, and whether the model is not better than its reference."""
    ratio = row.reference / row.model if row.model > 0 and math.isfinite(row.model) else math.nan
    reference = f"{_figure(row.reference)} {row.reference_name}" if row.reference_name else "-"
    shown = "-" if math.isnan(ratio) else f"{ratio:.3g}x"
    cells = (row.task, row.score, _figure(row.model), reference, shown, row.verdict or "-")
    return cells, bool(row.verdict) and not row.verdict.startswith("better")


def _figure(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.4g}"


def _curve(points: Sequence[tuple[float, float]]) -> dict[str, str] | None:
    """Loss over steps as a small line, on a logarithmic scale where all of it is positive; None for too few points."""
    if len(points) < 2:
        return None
    steps, losses = [p[0] for p in points], [p[1] for p in points]
    logarithmic = min(losses) > 0
    heights = [math.log10(loss) for loss in losses] if logarithmic else losses
    low, high = min(heights), max(heights)
    top, bottom = 14.0, HEIGHT - 14.0

    def at(step: float, height: float) -> str:
        x = WIDTH * (step - steps[0]) / ((steps[-1] - steps[0]) or 1)
        y = bottom - (bottom - top) * (height - low) / ((high - low) or 1)
        return f"{x:.1f},{y:.1f}"

    return {
        "points": " ".join(at(step, height) for step, height in zip(steps, heights, strict=True)),
        "words": f"loss from {losses[0]:.3g} to {losses[-1]:.3g}, steps {steps[0]:g} to {steps[-1]:g}",
        "top": f"{max(losses):.3g}",
        "bottom": f"{min(losses):.3g}",
        "end": f"step {steps[-1]:g}{', logarithmic' if logarithmic else ''}",
    }
