"""`ups runs`: all runs of a directory and their verdicts; `ups runs remove` deletes one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ups.cli.options import JsonOption, new_app
from ups.cli.output import note, report, say, table
from ups.record.places import RUNS

app = new_app()


class _ListsByDefault(TyperGroup):
    """`ups runs` and `ups runs DIR` list."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        named = bool(args) and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else ["list", *args])


@app.callback(cls=_ListsByDefault)
def _runs() -> None:
    """List runs and their verdicts, or remove one. `ups runs [DIR]` is `ups runs list [DIR]`."""


@app.command("list")
def list_(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the runs lie.")] = Path(RUNS),
    json: JsonOption = False,
) -> None:
    """List runs, the newest first: state, cause, attempts, last checkpoint, when."""
    from ups.record.text import duration_text
    from ups.supervise.checkpoints import last_commit
    from ups.supervise.run_file import faults_of, list_runs, list_unreadable_runs
    from ups.supervise.tracker_process import catch_up

    known, unreadable = list_runs(directory), list_unreadable_runs(directory)
    catch_up(known)
    # From the disk, as `ups status` does: run.json knows of it only after a verdict.
    newest = {path: last_commit(path) for path, _ in known}
    if json:
        keys = ("name", "state", "cause", "exit_code", "checkpoint", "ranks", "started", "ended", "verdict")
        rows = [
            {
                **{key: d[key] for key in keys},
                "checkpoint": newest[p],
                "attempts": len(d["attempts"]),
                "faults": len(faults_of(d)),
                "path": str(p),
            }
            for p, d in known
        ]
        nothing = dict.fromkeys([*keys, "attempts", "faults"])
        rows += [
            {**nothing, "name": path.name, "state": "unreadable", "cause": reason, "path": str(path)}
            for path, reason in unreadable
        ]
        report(rows)
        return
    if not known and not unreadable:
        say(f"no run under {directory}/")
        return
    cells = [["run", "state", "attempts", "faults", "checkpoint", "started", "took", "cause"]]
    for path, document in known:
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(document["started"]))
        took = duration_text((document["ended"] or time.time()) - document["started"])
        checkpoint = "-" if newest[path] is None else str(newest[path])
        counts = [str(len(document["attempts"])), str(len(faults_of(document)))]
        cells.append([path.name, document["state"], *counts, checkpoint, started, took, document["cause"] or "-"])
    cells += [[path.name, "unreadable", *"-----", reason] for path, reason in unreadable]
    say(table(cells))


@app.command()
def remove(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Directory of a run, or its name under runs/.")],
    json: JsonOption = False,
) -> None:
    """Delete a run with its checkpoints, bundle and report. Refuses a run that is alive."""
    from ups.run.removal import remove_run

    path, left = remove_run(run)
    if json:
        report({"removed": str(path), "left": left})
        return
    say(f"removed {path}")
    if left:
        note(f"note: {path} stays, with files that no run has written: {', '.join(left[:8])}")
