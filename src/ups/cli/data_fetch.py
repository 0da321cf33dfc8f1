"""`ups data fetch`: asks for published data sets and shows how far they are (work: ups.data.fetch)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ups.cli.options import JsonOption
from ups.cli.output import report, say, table
from ups.record.text import counted, duration_text, path_text, size_text


def fetch(
    name: Annotated[
        str | None, typer.Argument(help="Data set, such as pdebench/burgers1d; none lists them.", show_default=False)
    ] = None,
    out: Annotated[str, typer.Option(help="Directory for the data sets.")] = "data",
    only: Annotated[
        list[str],
        typer.Option(metavar="PATTERN", help="Only files like this: '*Nu0.01*', 'data/train/*'.", show_default=False),
    ] = [],  # noqa: B006 - typer copies it
    mirror: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Fetch from here; {name} stands for the data set.", show_default=False),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=16, help="Files at once.")] = 4,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be fetched, with sizes.")] = False,
    json: JsonOption = False,
) -> None:
    """Fetch a data set of PDEBench or The Well; an interrupted command continues when it is run again."""
    if name is None:
        _list(json)
    elif dry_run:
        _plan(name, Path(out), only, mirror, json)
    else:
        _fetch(name, Path(out), only, mirror, jobs, json)


def _list(json: bool) -> None:
    from ups.data.fetch import catalog

    sets = catalog()
    if json:
        report({"sets": {name: [file.path for file in one.files] for name, one in sets.items()}})
        return
    say(table([(name, counted(len(one.files), "file")) for name, one in sets.items()]))


def _plan(name: str, out: Path, only: list[str], mirror: str | None, json: bool) -> None:
    from ups.data.download import shown
    from ups.data.fetch import plan

    wanted = plan(name, out, only=only, mirror=mirror)
    if json:
        rows = [
            {"path": str(one.target), "url": shown(one.file.url), "bytes": one.size, "present": one.present}
            for one in wanted
        ]
        report({"name": name, "files": rows})
        return
    for one in wanted:
        size = "size not known" if one.size is None else size_text(one.size)
        say(f"{size:>14}  {'here' if one.present else 'to fetch'}  {path_text(one.target)}")
    missing = [one for one in wanted if not one.present]
    unknown = sum(one.size is None for one in missing)
    total = size_text(sum(one.missing for one in missing)) + (f" and {unknown} of unknown size" if unknown else "")
    say(f"{counted(len(missing), 'file')} to fetch: {total}")


def _fetch(name: str, out: Path, only: list[str], mirror: str | None, jobs: int, json: bool) -> None:
    import time

    from ups.data.fetch import fetch as run
    from ups.run.progress_line import ProgressLine

    started = time.monotonic()
    with ProgressLine(quiet=json) as line:
        before = -1

        def show(done: int, total: int) -> None:
            nonlocal before
            megabytes = -(-total // 1_000_000)
            now = megabytes if done >= total else done // 1_000_000
            if now != before and total:  # where no size is known there is nothing to compare with
                before = now
                line.count("fetching", now, megabytes, "MB")

        found = run(name, out, only=only, mirror=mirror, jobs=jobs, progress=show)
    facts = {
        "name": found.name,
        "path": str(found.path),
        "files": [str(path) for path in found.paths],
        "fetched": found.num_fetched,
        "bytes": found.num_bytes,
        "seconds": round(time.monotonic() - started, 3),
    }
    if json:
        report(facts)
        return
    rows = [
        ("data set", found.name),
        ("path", path_text(found.path)),
        ("files", f"{len(found.paths)}, of which {found.num_fetched} were fetched now"),
        ("size", size_text(found.num_bytes)),
        ("took", duration_text(time.monotonic() - started)),
    ]
    say(table(rows))
