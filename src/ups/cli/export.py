"""`ups export`: turn a run into something others can use."""

from __future__ import annotations

from typing import Annotated

import typer

from ups.cli.options import JsonOption, PluginOption, new_app
from ups.cli.output import report, say, styled

app = new_app("Turn a run into something others can use.")


@app.callback()
def _group() -> None:
    """Keeps `bundle` a command of its own while it is the only one."""


@app.command(short_help="Weights, config, statistics and a card with scores.")
def bundle(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run.", show_default=False)],
    out: Annotated[str | None, typer.Option(help="Directory of the bundle; default RUN/bundle.")] = None,
    trajectories: Annotated[int, typer.Option(help="Test trajectories of each task to score.", min=1)] = 64,
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Write a bundle: weights, config, statistics and a card with scores, as plain files without pickle."""
    from pathlib import Path

    from ups.evaluation.results import to_json
    from ups.inference.stored_scores import stored_warnings, written_words
    from ups.run.progress_line import ProgressLine
    from ups.run.scoring import bundle_of_run, score_lines

    with ProgressLine(quiet=json) as line:
        path, results = bundle_of_run(run, Path(out) if out is not None else None, trajectories, line.count)
    if json:
        report({"bundle": str(path), "results": to_json(results), "warnings": stored_warnings(path)[1]})
        return
    say(score_lines(results, styled))
    say(written_words(path))
