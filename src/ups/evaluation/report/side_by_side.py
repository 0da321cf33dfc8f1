"""The page of a comparison: one table and one chart per task, and what differs in the recipes; one file."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from ups.evaluation.comparison import TaskComparison
from ups.evaluation.headline import SCORES
from ups.evaluation.report.charts import curve_figure
from ups.evaluation.report.page import difference_words, number, whole_page


def write_comparison(
    tasks: Sequence[TaskComparison],
    notes: Sequence[str],
    *,
    title: str,
    changes: Mapping[str, Sequence[tuple[str, str, str]]],
    seeds: Mapping[str, str] | None = None,
    costs: Mapping[str, Mapping[str, float]] | None = None,
) -> str:
    """The page as text. changes: label -> (field, value in the first, value in this one) of each differing field.

    seeds: task -> a table of means over seeds. costs: label -> what its training took, by name.
    """
    parts = [
        "<p>Scores on the same held-out trajectories, in physical units; lower is better. The best model of a column "
        "is <b>bold</b> if it is significantly better than the others and than every predictor that learned nothing; "
        "these stand below the models. A difference is of rollout errors, paired over trajectories, with its 95 % "
        "bootstrap interval; below 0 it is better than the first.</p>",
    ]
    parts += [f"<p class='soft'>{html.escape(note)}</p>" for note in notes]
    parts += [_task(task, _pre((seeds or {}).get(task.task, "")), costs or {}) for task in tasks]
    parts += [_changes(label, rows, next(iter(tasks[0].results))) for label, rows in changes.items()]
    return whole_page(title, parts)


def _pre(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>" if text else ""


def _task(task: TaskComparison, seeds: str, costs: Mapping[str, Mapping[str, float]]) -> str:
    names = list(next(iter(costs.values()), {}))
    best = {key: task.winner(key)[0] for _, key in SCORES}
    rows = []
    for label in task.results:
        cells = []
        for _, key in SCORES:
            text = number(float(task.summary(label)[key]))
            cells.append(f"<td><b>{text}</b></td>" if best[key] == label else f"<td>{text}</td>")
        cells += [f"<td>{costs[label][name]:.4g}</td>" for name in names]
        cells += [f"<td>{difference_words(task.differences.get(label))}</td>"]
        cells += [f"<td>{html.escape(task.rollout_verdict(label))}</td>"]
        rows.append(f"<tr class='model'><td>{html.escape(label)}</td>{''.join(cells)}</tr>")
    for reference, summary in task.references().items():
        cells = [f"<td>{number(float(summary[key]))}</td>" for _, key in SCORES] + ["<td>0</td>"] * len(names)
        rows.append(f"<tr><td>{html.escape(reference)}</td>{''.join(cells)}<td></td><td>reference</td></tr>")
    heads = "".join(f"<th>{head}</th>" for head in [*dict(SCORES), *names])
    name = html.escape(task.task)
    first = task.first
    plan = first["protocol"]
    protocol = f"{first['split']} split, {plan['num_trajectories']} trajectories"
    chart = ""
    if not first["steady"]:
        protocol += f", {plan['num_steps']} steps from frame {plan['start_frame']}"
        figure = curve_figure(
            task.curves(), "Rollout error over time", "error relative to the trajectory", "predicted step"
        )
        chart = f"<div class='plots'><div>{figure}</div></div>"
    return (
        f"<h2>{name}</h2><p class='soft'>{html.escape(protocol)}</p>{seeds}"
        f"<div class='wide many'><table><tr><th>model</th>{heads}"
        f"<th>rollout minus {html.escape(next(iter(task.results)))}</th><th>rollout</th></tr>"
        f"{''.join(rows)}</table></div>{chart}"
    )


def _changes(label: str, rows: Sequence[tuple[str, str, str]], first: str) -> str:
    cells = "".join(
        f"<tr><td>{html.escape(field)}</td><td>{html.escape(old)}</td><td>{html.escape(new)}</td></tr>"
        for field, old, new in rows
    )
    heads = f"<tr><th>field</th><th>{html.escape(first)}</th><th>{html.escape(label)}</th></tr>"
    body = f"<div class='wide'><table class='words'>{heads}{cells}</table></div>" if rows else "<p>none known</p>"
    return f"<h2>Recipe: {html.escape(label)} against {html.escape(first)}</h2>{body}"
