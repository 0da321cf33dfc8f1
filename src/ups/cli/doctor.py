"""`ups doctor [RECIPE]`: runs the checks in order, shows each as it ends, and explains the first that fails."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups.cli.options import JsonOption, PluginOption, SetOption, new_app
from ups.cli.output import report, say, styled
from ups.errors import ConfigError
from ups.record.run_dir import RUNS

if TYPE_CHECKING:
    from ups.doctor.judge import Verdict

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
    bisect: Annotated[
        bool,
        typer.Option("--bisect", help="Find which part of a failing recipe the failure needs."),
    ] = False,
    compare_python: Annotated[
        str | None,
        typer.Option(
            "--compare-python",
            metavar="PYTHON",
            help="Train the same few steps with the Python of another environment, and find the first number that "
            "differs.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", min=1, max=100_000, help="Steps that --bisect and --compare-python train.")
    ] = 4,
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, help="Time limit of all trials of --bisect.")] = 30.0,
    set: SetOption = [],  # noqa: B006 - typer copies it
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Probe this machine with your recipe, check by check, each in its own process; the first that
    fails is explained.
    """
    if bisect or compare_python is not None:
        from ups.cli.doctor_trials import run_bisect, run_comparison

        if recipe is None:
            raise ConfigError("a part of a recipe is looked for, and none was given", hint="ups doctor RECIPE --bisect")
        if bisect and compare_python is not None:
            raise ConfigError("--bisect and --compare-python are two examinations", hint="run one after the other")
        number = ranks if ranks is not None else default_ranks()
        if compare_python is not None:
            run_comparison(recipe, number, set, compare_python, steps, as_json=json)
        else:
            run_bisect(recipe, number, set, steps, minutes, as_json=json)
        return
    from ups.doctor.examine import examine
    from ups.doctor.processes import Examination

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
