"""`ups compare`: scores of several models side by side. What may be compared: `ups.evaluation.comparison`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups.cli.options import JsonOption, PluginOption, new_app
from ups.cli.output import note, report, say, styled

if TYPE_CHECKING:
    from ups.evaluation.comparison import TaskComparison
    from ups.library.scores import Comparison

# More models of several seeds are shown as means only.
MAX_COLUMNS = 4
app = new_app()


@app.command()
def compare(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|BUNDLE|SCORES", help="Runs, bundles, reports or scores.json files.", show_default=False
        ),
    ],
    task: Annotated[list[str], typer.Option(metavar="NAME", help="Only this task; may be given many times.")] = [],  # noqa: B006
    out: Annotated[str | None, typer.Option(help="Directory for a page with tables and curves.")] = None,
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Print scores of several models next to their references, with paired differences to the first.

    A run without scores is scored first. Refuses scores of other data or of another protocol.
    """
    from ups.library.scores import compare as compare_models

    show(compare_models(*models, tasks=task, progress=not json), out, json=json)


def show(found: Comparison, out: str | None, *, json: bool) -> None:
    """Print a comparison, and write its page into `out`."""
    from ups.library.scores import seed_table

    written = found.write(Path(out)) if out is not None else None
    if json:
        report({**found.to_json(), "page": None if written is None else str(written)})
        return
    for one in found.tasks:
        if found.groups:
            say(styled(f"{one.task}: mean and standard deviation over seeds", "bold"))
            say(seed_table(one, found.groups))
        if not found.groups or len(one.results) <= MAX_COLUMNS:
            say(_lines(one, found.costs))
    for line in found.notes:
        note(line)
    for label, rows in found.recipe_changes.items():
        say(f"recipe of {label} against {found.models[0]}:" + ("" if rows else " no difference known"))
        for field, old, new in rows:
            say(f"  {field}: {old} -> {new}")
    if written is not None:
        say(f"wrote {written}")


def _lines(found: TaskComparison, costs: dict[str, dict[str, float]]) -> str:
    """A table for people: models side by side with the reference, a star for the best if it is no accident."""
    from ups.evaluation.report import difference_words

    steady = found.first["steady"]
    rows = [["error", *found.results, "reference", "", ""]]
    for head, key in found.scores():
        winner, words = found.winner(key)
        cells = [f"{found.summary(label)[key]:.4g}" + ("*" if winner == label else "") for label in found.results]
        name, value = found.reference(key)
        rows.append([head, *cells, f"{value:.4g}", name, words])
    for name in next(iter(costs.values()), {}):
        cells = [f"{costs[label][name]:.4g}" for label in found.results]
        rows.append([name, *cells, "", "", ""])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        # padded before it is styled: a style is characters, too
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  " + "  ".join(styled(c, "bold") if "*" in c else c for c in padded).rstrip())
    first = next(iter(found.results))
    for label in found.results:
        line = f"  {'solution' if steady else 'rollout'} of {label}: {found.rollout_verdict(label)}"
        if label in found.differences:
            line += f"; minus {first}: {difference_words(found.differences[label])}"
        lines.append(line)
    plan = found.first["protocol"]
    length = "" if steady else f", {plan['num_steps']} steps"
    title = f"{found.task}: {plan['num_trajectories']} trajectories{length}, * significantly best"
    return "\n".join([styled(title, "bold"), *lines])
