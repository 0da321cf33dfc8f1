"""`ups sweep RECIPE --over ...`: a run for each combination of values (work: ups.library.sweep, ups.config.sweep)."""

from __future__ import annotations

from typing import Annotated

import typer

from ups.cli.options import JsonOption, OverOption, RecipeArgument, SetOption, new_app
from ups.errors import ConfigError

app = new_app()


@app.command()
def sweep(
    recipe: RecipeArgument,
    over: OverOption,
    jobs: Annotated[int, typer.Option("--jobs", min=1, max=1024, help="Runs at the same time on this host.")] = 1,
    ranks: Annotated[int, typer.Option("--ranks", min=1, max=100_000, help="Processes of each run.")] = 1,
    slurm: Annotated[
        str,
        typer.Option(metavar="OPTIONS", help="Submit an array, with these options of `ups launch slurm`: '--time 30'."),
    ] = "",
    set: SetOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Train a recipe with each combination of values, supervised; a table at the end.

    The same command continues an interrupted sweep: finished runs are kept, others continue from their checkpoints.
    Exit code 6: a run has failed; the others are trained nevertheless.
    """
    import shlex
    import sys

    from ups.cli.output import note, report, say, table
    from ups.config.sweep import axes_of
    from ups.library.sweep import Sweep
    from ups.record.text import path_text
    from ups.run.progress_line import ProgressLine

    if slurm:
        if jobs > 1 or ranks > 1:
            raise ConfigError("--jobs and --ranks are for this host", hint="use --slurm '--ranks-per-node 8 ...'")
        from ups.cli.launch import app as launch

        named = [word for name, texts in (("--over", over), ("--set", set)) for text in texts for word in (name, text)]
        words = ["slurm", recipe, *slurm.split(), *named, *(["--json"] if json else [])]
        typer.main.get_command(launch).main(words, prog_name="ups launch", standalone_mode=False)
        return
    work = Sweep(recipe, set, axes_of(over), ranks)
    with ProgressLine() as line:
        code = work.run(jobs, line)
    rows = work.rows()
    if json:
        report({"runs": rows, "exit_code": code})
    else:
        error = "{task} {score} {model:.4g} ({reference_name} {reference:.4g})"
        ends = [row["why"] or ", ".join(error.format(**score) for score in row["scores"]) for row in rows]
        lines = [[row["name"], row["state"], end] for row, end in zip(rows, ends, strict=True)]
        say(table([["run", "state", "error (reference), or why it is not completed"], *lines]))
    if code:
        done = sum(row["state"] == "completed" for row in rows)
        note(f"{done} of {len(rows)} runs are completed; to continue: {shlex.join(['ups', *sys.argv[1:]])}")
    else:
        note(f"compare them with: ups compare {' '.join(shlex.quote(path_text(cell.run_dir)) for cell in work.cells)}")
    raise typer.Exit(code)
