"""`ups track sync RUN`: bring the trackers of a run to where the run stands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ups.cli.options import JsonOption, new_app
from ups.cli.output import report, say, table

app = new_app()


@app.callback()
def _track() -> None:
    """What other places know about a run: TensorBoard, MLflow, Weights & Biases, or a tracker of your own."""


@app.command()
def sync(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Directory of a run, or its name under runs/.")],
    json: JsonOption = False,
) -> None:
    """Send each tracker of a run the rows that it does not have, the report, and how the run ended.

    For a tracker that was down, a supervisor that was killed, or a report that was written later. A run that goes on
    is fed by its own processes.
    """
    from ups.errors import RunHeldError, TrackerError
    from ups.supervise.run_file import find_run, read_run
    from ups.supervise.trackers import sync as sync_trackers

    run_dir = find_run(run)
    if read_run(run_dir)["state"] == "running":
        raise RunHeldError(f"{run_dir} goes on, and feeds its trackers itself", hint="see `ups status`")
    problems = sync_trackers(run_dir, _names(run_dir))
    rows = _rows(run_dir, problems)
    if json:
        report(rows)
    else:
        shown = [[str(row[key] or "-") for key in ("name", "rows", "told", "url", "problem")] for row in rows]
        say(table([["tracker", "rows", "told", "where", "problem"], *shown]))
    failed = [name for name, problem in problems.items() if problem]
    if failed:
        words = f"{', '.join(failed)} of {run_dir.name}: {problems[failed[0]]}"
        raise TrackerError(words, hint="call this again when it can be reached")


def _names(run_dir: Path) -> list[str]:
    from ups.config.recipe import resolve
    from ups.config.tracker import by_name
    from ups.errors import ConfigError
    from ups.record.run_dir import RunDir
    from ups.supervise.tracker_feed import check_trackers

    trackers = resolve(RunDir(run_dir).config).recipe.tracking.trackers
    if not trackers:
        raise ConfigError(f"the recipe of {run_dir} names no tracker", hint="see tracking.trackers in docs/trackers.md")
    check_trackers(trackers)
    return list(by_name(trackers))


def _rows(run_dir: Path, problems: dict[str, str]) -> list[dict[str, Any]]:
    from ups.supervise.trackers import read_note

    notes = {name: read_note(run_dir, name) for name in problems}
    return [
        {"name": name, "rows": note.rows, "told": note.state, "url": note.url, "problem": problems[name]}
        for name, note in notes.items()
    ]
