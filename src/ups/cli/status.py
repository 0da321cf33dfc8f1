"""`ups status [RUN]`: what a run is doing now."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from ups.cli.options import JsonOption, new_app
from ups.cli.output import report, say, table
from ups.record.text import printable

_MAX_ROWS = 64

app = new_app()


@app.command()
def status(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Directory of a run, or its name under runs/; default the newest."),
    ] = None,
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second until the run ends.")] = False,
) -> None:
    """Show step, loss, rate, time left, and what each rank is doing."""
    from ups.supervise import status as live
    from ups.supervise.run_file import read_run, run_or_newest
    from ups.supervise.status import rows_of_hosts
    from ups.supervise.trackers import catch_up

    run_dir = run_or_newest(run)
    catch_up([(run_dir, read_run(run_dir))])
    while True:
        document = read_run(run_dir)
        rows = live.rank_statuses(run_dir, document)
        if document["state"] == "running" and "hosts" in document:
            seen = {row.rank for row in rows}
            rows += [row for row in rows_of_hosts(run_dir) if row.rank not in seen]
        result = live.summary(run_dir, document, rows)
        if json:
            ranks: list[dict[str, Any]] = [row.document() for row in rows]
            report({**result, "ranks": ranks})
        else:
            say(printable(live.one_line(result)))
            for line in live.tracker_lines(result):
                say(printable(line))
            if line := live.mirror_line(result):
                say(printable(line))
            cells = live.rows_of_table(rows)
            say(table(cells[: _MAX_ROWS + 1]))
            if len(cells) > _MAX_ROWS + 1:
                say(f"  and {len(cells) - _MAX_ROWS - 1} more (--json has all)")
        if not watch or document["state"] != "running":
            return
        time.sleep(1.0)
