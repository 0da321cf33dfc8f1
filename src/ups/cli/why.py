"""`ups why RUN`: which rank, where, why, what was lost, what to do; then the evidence."""

from __future__ import annotations

from typing import Annotated

import typer

from ups.cli.options import JsonOption, new_app
from ups.cli.output import report, say
from ups.record.text import path_text

app = new_app()


@app.command()
def why(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Directory of a run, or its name under runs/; default the newest."),
    ] = None,
    json: JsonOption = False,
    fault: Annotated[int | None, typer.Option("--fault", help="Which fault to explain; 0 is the first.")] = None,
) -> None:
    """Explain why a run stopped or restarted: one line per fault, what to do, then the evidence."""
    from ups.supervise.run_file import read_run, run_or_newest
    from ups.supervise.why import explain, faults_as_json

    run_dir = run_or_newest(run)
    document = read_run(run_dir)
    if json:
        report(faults_as_json(document))
    else:
        if run is None:
            say(f"About {path_text(run_dir)}:")
        say(explain(run_dir, document, number=fault))
