"""`ups runs`, `ups status`, `ups why` and `ups track`: what runs have done, are doing, and why they stopped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ups.cli.options import JsonOption, new_app
from ups.cli.output import note, report, say, table
from ups.config.recipe import resolve
from ups.config.tracker import by_name
from ups.errors import ConfigError, RunHeldError, TrackerError, UpsError
from ups.record.files import write_file_atomically
from ups.record.run_dir import RUNS, RunDir, is_bundle
from ups.record.text import counted, duration_text, path_text, printable, size_text
from ups.run import many_runs
from ups.run.many_runs import candidates, remove_run, tags_of
from ups.run.overview import cards, overview_page
from ups.supervise import status as live
from ups.supervise.checkpoints import last_commit
from ups.supervise.run_file import faults_of, find_run, read_run, run_or_newest, survey_runs
from ups.supervise.status import rows_of_hosts
from ups.supervise.tracker_feed import check_trackers
from ups.supervise.trackers import catch_up, read_note
from ups.supervise.trackers import sync as sync_trackers
from ups.supervise.why import explain, faults_as_json

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Directory of a run, or its name under runs/.")]
RunOrNewest = Annotated[
    str | None, typer.Argument(metavar="RUN", help="Directory of a run, or its name under runs/; default the newest.")
]
RunsArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Where the runs lie.")]
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
def list_(directory: RunsArgument = Path(RUNS), json: JsonOption = False) -> None:
    """List runs, the newest first: state, cause, attempts, last checkpoint, when."""
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
def remove(run: RunArgument, json: JsonOption = False) -> None:
    """Delete a run with its checkpoints, bundle and report. Refuses a run that is alive."""
    path, left = remove_run(run)
    if json:
        report({"removed": str(path), "left": left})
        return
    say(f"removed {path}")
    if left:
        note(f"note: {path} stays, with files that no run has written: {', '.join(left[:8])}")


@app.command()
def promote(
    run: RunArgument,
    tag: Annotated[str, typer.Argument(metavar="TAG", help="A name such as production; one run has it at a time.")],
    take_away: Annotated[bool, typer.Option("--take-away", help="Take the tag from the run instead.")] = False,
    json: JsonOption = False,
) -> None:
    """Give a tag to a completed run with a whole bundle. A run with a tag is neither removed nor cleaned away."""
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
    directory: RunsArgument = Path(RUNS),
    completed: Annotated[bool, typer.Option("--completed", help="Also runs that have a bundle.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them.")] = False,
    json: JsonOption = False,
) -> None:
    """Say which runs have ended without a bundle, and remove them with --yes. Never one with a tag, or one alive."""
    runs = candidates(directory, completed=completed)
    chosen = [one for one in runs if not one.kept]
    failed: dict[Path, str] = {}
    for one in chosen if yes else ():
        try:
            remove_run(str(one.path))
        except UpsError as error:  # it was started or promoted since
            failed[one.path] = error.message
    removed = [one for one in chosen if yes and one.path not in failed]
    if json:
        report(
            {
                "removed": [str(one.path) for one in removed],
                "not_removed": {str(path): reason for path, reason in failed.items()},
                "runs": [one.to_json() for one in runs],
            }
        )
    elif not chosen:
        say(f"nothing to remove under {directory}/")
    else:
        head = "removed" if yes else "would remove"
        rows = [[failed.get(one.path, head), one.path.name, one.state, size_text(one.num_bytes)] for one in chosen]
        kept_rows = [["kept", one.path.name, one.state, one.kept] for one in runs if one.kept]
        say(table([*rows, *kept_rows]))
        total = size_text(sum(one.num_bytes for one in (removed if yes else chosen)))
        say(f"{counted(len(removed if yes else chosen), 'run')}, {total}" + ("" if yes else "; remove with --yes"))
    if failed:
        raise typer.Exit(1)


@app.command()
def page(
    directory: RunsArgument = Path(RUNS),
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page. [default: DIR/index.html]")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write one HTML page about all runs of a directory: verdicts, gates, scores, small loss curves."""
    path = output or directory / "index.html"
    rows = cards(directory, path.parent)
    if not rows:
        raise ConfigError(f"there is no run under {directory}/", hint="start one with: ups run RECIPE")
    write_file_atomically(path, overview_page(rows, f"Runs in {directory}", time.time()).encode())
    if json:
        report({"page": str(path), "runs": len(rows)})
    else:
        say(f"wrote {path}")


_MAX_ROWS = 64

status_app = new_app()


@status_app.command()
def status(
    run: RunOrNewest = None,
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second until the run ends.")] = False,
) -> None:
    """Show step, loss, rate, time left, and what each rank is doing."""
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


why_app = new_app()


@why_app.command()
def why(
    run: RunOrNewest = None,
    json: JsonOption = False,
    fault: Annotated[int | None, typer.Option(help="Which fault to explain; 0 is the first.")] = None,
) -> None:
    """Explain why a run stopped or restarted: one line per fault, what to do, then the evidence."""
    run_dir = run_or_newest(run)
    document = read_run(run_dir)
    if json:
        report(faults_as_json(document))
    else:
        if run is None:
            say(f"About {path_text(run_dir)}:")
        say(explain(run_dir, document, number=fault))


track_app = new_app()


@track_app.callback()
def _track() -> None:
    """What other places know about a run: TensorBoard, MLflow, Weights & Biases, or a tracker of your own."""


@track_app.command()
def sync(run: RunArgument, json: JsonOption = False) -> None:
    """Send each tracker of a run the rows that it does not have, the report, and how the run ended.

    For a tracker that was down, a supervisor that was killed, or a report that was written later. The processes of
    a run that is still running feed its trackers.
    """
    run_dir = find_run(run)
    if read_run(run_dir)["state"] == "running":
        raise RunHeldError(f"{run_dir} is still running, and feeds its trackers itself", hint="see `ups status`")
    trackers = resolve(RunDir(run_dir).config).recipe.tracking.trackers
    if not trackers:
        raise ConfigError(f"the recipe of {run_dir} names no tracker", hint="see tracking.trackers in docs/trackers.md")
    check_trackers(trackers)
    problems = sync_trackers(run_dir, list(by_name(trackers)))
    notes = {name: read_note(run_dir, name) for name in problems}
    rows = [
        {"name": name, "rows": note.rows, "told": note.state, "url": note.url, "problem": problems[name]}
        for name, note in notes.items()
    ]
    if json:
        report(rows)
    else:
        shown = [[str(row[key] or "-") for key in ("name", "rows", "told", "url", "problem")] for row in rows]
        say(table([["tracker", "rows", "told", "where", "problem"], *shown]))
    failed = [name for name, problem in problems.items() if problem]
    if failed:
        words = f"{', '.join(failed)} of {run_dir.name}: {problems[failed[0]]}"
        raise TrackerError(words, hint="call this again when it can be reached")
