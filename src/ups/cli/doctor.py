"""`ups doctor [RECIPE]`: runs the checks in order, shows each as it ends, and explains the first that fails."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups.cli.options import JsonOption, SetOption, new_app
from ups.cli.output import report, say, styled
from ups.record.places import RUNS

if TYPE_CHECKING:
    from ups.doctor.examine import Verdict

app = new_app()

_NAME_WIDTH = 12


@app.command()
def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE",
            help="A recipe file, or a run directory. Without one only the machine is examined.",
            show_default=False,
        ),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, max=1024, help="Ranks to try; default one per GPU, else 2.", show_default=False),
    ] = None,
    set: SetOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Probe this machine with your recipe, check by check, each in its own process; the first that
    fails is explained.
    """
    from ups.doctor.examine import Examination, examine

    number = ranks if ranks is not None else default_ranks()
    if recipe is None:
        examination = Examination(number, Path.cwd() / RUNS)
    else:
        from ups.config.recipe import recipe_file, resolve
        from ups.run.directory import check_ranks, run_dir_of

        resolved = resolve(recipe_file(recipe), set)
        check_ranks(resolved.recipe, number)
        examination = Examination(number, run_dir_of(resolved, recipe), resolved.text)
    verdicts = examine(examination, None if json else show)
    failed = next((v for v in verdicts if not v.ok), None)
    if json:
        found = {"ok": failed is None, "failed": failed.check if failed else None, "ranks": number}
        report({**found, "rungs": [v.to_json() for v in verdicts]})
    elif failed is None:
        say(f"{styled('all well', 'bold', 'green')}: {len(verdicts)} checks with {number} ranks")
    if failed is not None:
        raise typer.Exit(failed.exit_code)


def default_ranks() -> int:
    """One per GPU that this machine shows; 2 where there is none, because one rank proves nothing about many."""
    return len(list(Path("/dev").glob("nvidia[0-9]*"))) or 2


def show(verdict: Verdict) -> None:
    """One line for a check; four more for the one that failed."""
    mark = styled("ok    ", "green") if verdict.ok else styled("FAILED", "bold", "red")
    where = "" if verdict.rank is None else f"rank {verdict.rank}: "
    say(f"{mark}  {verdict.check.ljust(_NAME_WIDTH)}{where}{verdict.says}  ({verdict.seconds:.1f} s)")
    rows = [("warning", text) for text in verdict.warnings]
    if not verdict.ok:
        rows += [("means", verdict.means), ("try", verdict.advice), ("log", verdict.log)]
    for title, text in rows:
        say(f"        {title.ljust(_NAME_WIDTH)}{text}")
