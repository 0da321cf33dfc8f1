"""`ups runs page`: one self-contained page about many runs, with verdict, scores and loss of each. No torch.

Names, causes and scores come from files that anybody may have written: a bounded part of each file is read, links are
refused, and every text is escaped. The page has no script and no address outside.
"""

from __future__ import annotations

import html
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ups.inference.stored_scores import ScoreRow, score_rows
from ups.record.files import is_number, read_end, read_object
from ups.record.run_dir import BUNDLE_FILE, RunDir
from ups.record.text import counted, duration_text, printable
from ups.run.many_runs import read_tags
from ups.run.progress_line import rows_of
from ups.supervise.run_file import faults_of, survey_runs

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
    all_cards = []
    readable, unreadable = survey_runs(directory)
    for path, document in readable:
        ended = document["ended"]
        all_cards.append(
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
    return all_cards + [RunCard(path.name, path, "unreadable", cause) for path, cause in unreadable]


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
_STYLE = """
:root { color-scheme: light; --ink: #1b1f24; --soft: #5b6570; --line: #d8dee4; --blue: #0072B2; }
* { box-sizing: border-box; }
body { font: 16px/1.45 system-ui, sans-serif; color: var(--ink); margin: 0 auto; max-width: 84rem; padding: 1rem; }
h1 { font-size: 1.6rem; margin: .3rem 0; } h2 { font-size: 1.1rem; margin: 0; overflow-wrap: anywhere; }
p { margin: .35rem 0; } .soft { color: var(--soft); font-size: .88rem; margin: .2rem 0; }
article { border: 1px solid var(--line); border-radius: 8px; padding: .9rem 1rem; margin: .8rem 0; display: grid;
  grid-template-columns: 1fr; gap: .5rem 1.5rem; }
article > * { min-width: 0; }
@media (min-width: 56rem) { article { grid-template-columns: 17rem 1fr 17rem; align-items: start; } }
.state { display: inline-block; border-radius: 4px; padding: 0 .5rem; font-size: .85rem; font-weight: 600;
  border: 1px solid; }
.good { color: #03633f; background: #e6f5ee; } .bad { color: #8f2d00; background: #fdeee6; }
.going { color: #00527f; background: #e6f1f8; } .held { color: #5a4a00; background: #faf3d7; }
.tag { display: inline-block; border-radius: 4px; padding: 0 .5rem; font-size: .85rem; background: var(--ink);
  color: #fff; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem; }
a { color: var(--blue); }
th, td { text-align: right; padding: .15rem .2rem; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; font-size: .8rem; } th:first-child, td:first-child { text-align: left; }
td:last-child, th:last-child { text-align: left; padding-left: .8rem; } td.poor { color: #8f2d00; }
@media (max-width: 40rem) {
  tr { display: block; padding: .3rem 0; border-bottom: 1px solid var(--line); } tr:first-child { display: none; }
  td, td:last-child { display: flex; justify-content: space-between; gap: 1rem; padding: 0; border: 0;
    text-align: right; overflow-wrap: anywhere; }
  td::before { content: attr(data-head); color: var(--soft); white-space: nowrap; }
}
ul { margin: .4rem 0 0; padding-left: 1.1rem; font-size: .9rem; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; display: block; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
.words { overflow-wrap: anywhere; font-size: .85rem; color: var(--soft); font-family: ui-monospace, monospace; }
"""


def overview_page(cards: Sequence[RunCard], title: str, now: float, folder: Path) -> str:
    """The page as text. now: seconds since 1970, for its date; folder: where the page will lie, for its links."""
    counts = Counter(_word(card.state) for card in cards)
    summary = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(now))
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        # Whatever slips through: nothing is run and nothing is loaded.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_text(title)}</h1>",
        f'<p class="soft">{_text(counted(len(cards), "run"))}{_text(": " + summary if cards else "")}. '
        f"As of {made}.</p>",
        *(_article(card, folder) for card in cards),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _text(value: object) -> str:
    """A text that can be nothing but text: control characters as words, then escaped."""
    return html.escape(printable(str(value)[:2000]), quote=True)


def _word(state: str) -> str:
    return _STATES.get(state, (state, ""))[0]


def _link(path: Path, folder: Path, words: str) -> str:
    """A link from a page in `folder` to something else on this disk. A name in the path cannot be a scheme or a tag."""
    address = quote(os.path.relpath(path, folder), safe="/")
    return f'<a href="./{html.escape(address, quote=True)}">{_text(words)}</a>'


def _article(card: RunCard, folder: Path) -> str:
    style = _STATES.get(card.state, ("", "held"))[1]
    tags = "".join(f' <span class="tag">{_text(tag)}</span>' for tag in card.tags)
    facts = [counted(card.ranks, "rank")] if card.ranks else []
    facts += [f"step {card.step}"] if card.step is not None else []
    facts += [duration_text(card.took)] if card.took is not None else []
    facts += [counted(card.faults, "fault")] if card.faults else []
    started = "" if card.started is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(card.started))
    lines = [
        f"<article><div><h2>{_link(card.path, folder, card.name)}</h2>",
        f'<p><span class="state {style}">{_text(_word(card.state))}</span>{tags}</p>',
        f'<p class="soft">{_text(started)}</p>' if started else "",
        f'<p class="soft">{_text(", ".join(facts))}</p>' if facts else "",
        f'<p class="words">{_text(card.cause)}</p>' if card.cause else "",
        f"<p>{_link(card.report, folder, 'report')}</p>" if card.report else "",
        "</div>",
        f"<div>{_scores(card.scores)}{_gate(card)}</div>",
        f"<div>{_curve(card.loss)}</div></article>",
    ]
    return "\n".join(line for line in lines if line)


def _scores(rows: Sequence[ScoreRow]) -> str:
    if not rows:
        return '<p class="soft">no scores</p>'
    heads = ("task", "error of", "model", "best reference", "ratio", "the model is")
    head = "<tr>" + "".join(f"<th>{one}</th>" for one in heads) + "</tr>"
    body = []
    for row in rows:
        ratio = row.reference / row.model if row.model > 0 and math.isfinite(row.model) else math.nan
        reference = f"{_figure(row.reference)} {row.reference_name}" if row.reference_name else "-"
        cells = (row.task, row.score, _figure(row.model), reference, "-" if math.isnan(ratio) else f"{ratio:.3g}x")
        style = "" if row.verdict.startswith("better") or not row.verdict else ' class="poor"'
        shown = [f'<td data-head="{one}">{_text(cell)}</td>' for one, cell in zip(heads, cells, strict=False)]
        shown.append(f'<td data-head="{heads[-1]}"{style}>{_text(row.verdict or "-")}</td>')
        body.append(f"<tr>{''.join(shown)}</tr>")
    return f"<table>{head}{''.join(body)}</table>"


def _gate(card: RunCard) -> str:
    if not card.gate:
        return ""
    items = []
    for one in sorted(card.gate, key=lambda one: bool(one["holds"]))[:20]:
        words = f"{one['task'] or 'all tasks'}: {one['condition']}: {one['says']}"
        items.append(f"<li>{'holds' if one['holds'] else '<b>failed</b>'}: {_text(words)}</li>")
    return f"<ul>{''.join(items)}</ul>"


def _figure(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.4g}"


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """Loss over steps as a small line, on a logarithmic scale where all of it is positive."""
    if len(points) < 2:
        return '<p class="soft">no loss curve</p>'
    steps, losses = [p[0] for p in points], [p[1] for p in points]
    logarithmic = min(losses) > 0
    heights = [math.log10(loss) for loss in losses] if logarithmic else losses
    low, high = min(heights), max(heights)
    top, bottom = 14.0, HEIGHT - 14.0

    def at(step: float, height: float) -> str:
        x = WIDTH * (step - steps[0]) / ((steps[-1] - steps[0]) or 1)
        y = bottom - (bottom - top) * (height - low) / ((high - low) or 1)
        return f"{x:.1f},{y:.1f}"

    line = " ".join(at(step, height) for step, height in zip(steps, heights, strict=True))
    scale = ", logarithmic" if logarithmic else ""
    words = f"loss from {losses[0]:.3g} to {losses[-1]:.3g}, steps {steps[0]:g} to {steps[-1]:g}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(words)}">'
        f'<text x="0" y="10">{_text(f"{max(losses):.3g}")}</text>'
        f'<polyline points="{line}" fill="none" stroke="#0072B2" stroke-width="1.6" stroke-linejoin="round"/>'
        f'<text x="0" y="{HEIGHT - 2}">{_text(f"{min(losses):.3g}")}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 2}" text-anchor="end">{_text(f"step {steps[-1]:g}{scale}")}</text></svg>'
        f'<p class="soft">{_text(words)}</p>'
    )
