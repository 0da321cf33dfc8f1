"""`ups runs`: all runs of a directory and their verdicts, as a table or a page; promotes, removes and cleans up."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ups.cli.options import JsonOption, new_app
from ups.cli.output import note, report, say, table
from ups.record.run_dir import RUNS

app = new_app()


class _ListsByDefault(TyperGroup):
    """`ups runs` and `ups runs DIR` list."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        named = bool(args) and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else ["list", *args])


@app.callback(cls=_ListsByDefault)
def _runs() -> None:
    """List runs and their verdicts, promote one, clean up. `ups runs [DIR]` is `ups runs list [DIR]`."""


@app.command("list")
def list_(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the runs lie.")] = Path(RUNS),
    json: JsonOption = False,
) -> None:
    """List runs, the newest first: state, cause, attempts, last checkpoint, when."""
    from ups.record.run_dir import RunDir, is_bundle
    from ups.record.text import duration_text
    from ups.run.many_runs import tags_of
    from ups.supervise.checkpoints import last_commit
    from ups.supervise.run_file import faults_of, survey_runs
    from ups.supervise.trackers import catch_up

    known, unreadable = survey_runs(directory)
    catch_up(known)
    # From the disk, as `ups status` does: run.json knows of it only after a verdict.
    newest = {path: last_commit(path) for path, _ in known}
    if json:
        keys = ("name", "state", "cause", "exit_code", "checkpoint", "ranks", "started", "ended", "verdict")
        rows = [
            {
                **{key: value for key, value in d.items() if key in keys},
                "checkpoint": newest[p],
                "attempts": len(d["attempts"]),
                "faults": len(faults_of(d)),
                "gate": d.get("gate"),
                "tags": tags_of(p),
                "bundle": str(RunDir(p).bundle) if is_bundle(RunDir(p).bundle) else None,
                "path": str(p),
            }
            for p, d in known
        ]
        nothing = dict.fromkeys([*keys, "attempts", "faults", "gate", "bundle"]) | {"tags": []}
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
        words = document["cause"] or "-"
        tags = tags_of(path)
        cells.append([path.name, document["state"], *counts, checkpoint, started, took, words])
        cells[-1][-1] += f"  promoted: {', '.join(tags)}" if tags else ""
    cells += [[path.name, "unreadable", *"-----", reason] for path, reason in unreadable]
    say(table(cells))


@app.command()
def remove(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Directory of a run, or its name under runs/.")],
    json: JsonOption = False,
) -> None:
    """Delete a run with its checkpoints, bundle and report. Refuses a run that is alive."""
    from ups.run.many_runs import remove_run

    path, left = remove_run(run)
    if json:
        report({"removed": str(path), "left": left})
        return
    say(f"removed {path}")
    if left:
        note(f"note: {path} stays, with files that no run has written: {', '.join(left[:8])}")


@app.command()
def promote(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Directory of a run, or its name under runs/.")],
    tag: Annotated[str, typer.Argument(metavar="TAG", help="A name such as production; one run has it at a time.")],
    take_away: Annotated[bool, typer.Option("--take-away", help="Take the tag from the run instead.")] = False,
    json: JsonOption = False,
) -> None:
    """Give a tag to a completed run with a whole bundle. A run with a tag is neither removed nor cleaned away."""
    from ups.record.text import path_text
    from ups.run import many_runs

    if take_away:
        path = many_runs.take_away(run, tag)
        if json:
            report({"tag": tag, "run": str(path), "taken_away": True})
        else:
            say(f"{path_text(path)} does not have the tag '{tag}' any more")
        return
    made = many_runs.promote(run, tag)
    if json:
        report(made)
        return
    before = f", which {made['before']} had before" if made["before"] else ""
    say(f"{path_text(Path(made['run']))} is '{tag}'{before}: bundle {made['bundle_sha256'][:12]}")


@app.command()
def clean(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the runs lie.")] = Path(RUNS),
    completed: Annotated[bool, typer.Option("--completed", help="Also runs that have a bundle.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them.")] = False,
    json: JsonOption = False,
) -> None:
    """Say which runs have ended without a bundle, and remove them with --yes. Never one with a tag, or one alive."""
    from ups.errors import UpsError
    from ups.record.text import counted, size_text
    from ups.run.many_runs import candidates, remove_run

    found = candidates(directory, completed=completed)
    chosen = [one for one in found if not one.kept]
    failed: dict[Path, str] = {}
    for one in chosen if yes else ():
        try:
            remove_run(str(one.path))
        except UpsError as error:  # somebody has started or promoted it since
            failed[one.path] = error.message
    removed = [one for one in chosen if yes and one.path not in failed]
    if json:
        report(
            {
                "removed": [str(one.path) for one in removed],
                "not_removed": {str(path): reason for path, reason in failed.items()},
                "runs": [one.to_json() for one in found],
            }
        )
    elif not chosen:
        say(f"nothing to remove under {directory}/")
    else:
        head = "removed" if yes else "would remove"
        rows = [[failed.get(one.path, head), one.path.name, one.state, size_text(one.num_bytes)] for one in chosen]
        kept = [["kept", one.path.name, one.state, one.kept] for one in found if one.kept]
        say(table([*rows, *kept]))
        total = size_text(sum(one.num_bytes for one in (removed if yes else chosen)))
        say(f"{counted(len(removed if yes else chosen), 'run')}, {total}" + ("" if yes else "; remove with --yes"))
    if failed:
        raise typer.Exit(1)


@app.command()
def page(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the runs lie.")] = Path(RUNS),
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page. [default: DIR/index.html]")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write one HTML page about all runs of a directory: verdicts, gates, scores, small loss curves."""
    from ups.record.files import write_file_atomically
    from ups.run.overview import cards, overview_page

    found = cards(directory)
    if not found:
        from ups.errors import ConfigError

        raise ConfigError(f"there is no run under {directory}/", hint="start one with: ups run RECIPE")
    path = output or directory / "index.html"
    write_file_atomically(path, overview_page(found, f"Runs in {directory}", time.time(), path.parent).encode())
    if json:
        report({"page": str(path), "runs": len(found)})
    else:
        say(f"wrote {path}")
