"""`ups doctor [RECIPE]`: runs the checks in order, shows each as it ends, and explains the first that fails.

With `--bisect`: a line for each trial, then one verdict.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups.cli.options import JsonOption, PluginOption, SetOption, new_app
from ups.cli.output import report, say, styled
from ups.config.recipe import recipe_file, resolve
from ups.doctor.examine import Examination, examine
from ups.doctor.gpu_report import write_report
from ups.doctor.trials import Trials, Variant
from ups.errors import ConfigError, MachineError
from ups.record.run_dir import RUNS
from ups.run.directory import check_ranks, run_dir_of
from ups.run.progress_line import ProgressLine

if TYPE_CHECKING:
    from ups.doctor.examine import Verdict
    from ups.doctor.trials import TrialOutcome

app = new_app()

_NAME_WIDTH = 12


@app.command()
def doctor(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE", help="A recipe file, or a run directory. Without one only the machine is examined."
        ),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Ranks to try; default one per GPU, else 2.")
    ] = None,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="Find which part of a failing recipe the failure needs.")
    ] = False,
    gpu_report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Try a machine with GPUs in every way, and write a report without secrets."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=100_000, help="Steps that --bisect trains.")] = 4,
    minutes: Annotated[float | None, typer.Option(min=0.1, help="Time limit; default 30, of a report 20.")] = None,
    set: SetOption = [],  # noqa: B006 - typer copies it
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Probe this machine with your recipe, check by check, each in its own process; the first that
    fails is explained.
    """
    # One rank for each GPU that this machine shows; 2 where there is none: one rank proves nothing about many.
    number = ranks or len(list(Path("/dev").glob("nvidia[0-9]*"))) or 2
    if gpu_report is not None:
        if recipe is None:
            raise ConfigError("a report is about a recipe, and none was given", hint="ups doctor RECIPE --gpu-report F")
        examined = partial(examination_of, recipe, number, set)
        lines = write_report(gpu_report, examined, minutes or 20.0, None if json else show)
        report({"file": str(gpu_report), "missing": lines}) if json else _say_rows([("missing", x) for x in lines])
        raise typer.Exit(MachineError.exit_code if lines else 0)
    if bisect:
        if recipe is None:
            raise ConfigError("a part of a recipe is looked for, and none was given", hint="ups doctor RECIPE --bisect")
        run_bisect(recipe, number, set, steps, minutes or 30.0, as_json=json)
        return
    examination = Examination(number, Path.cwd() / RUNS) if recipe is None else examination_of(recipe, number, set)
    verdicts = examine(examination, None if json else show)
    failed = next((v for v in verdicts if not v.ok), None)
    if json:
        summary = {"ok": failed is None, "failed": failed.check if failed else None, "ranks": number}
        report({**summary, "rungs": [v.to_json() for v in verdicts]})
    elif failed is None:
        say(f"{styled('all well', 'bold', 'green')}: {len(verdicts)} checks with {number} ranks")
    if failed is not None:
        raise typer.Exit(failed.exit_code)


def examination_of(recipe: str, ranks: int, overrides: Sequence[str], changes: Sequence[str] = ()) -> Examination:
    """Of a recipe, as the command names it."""
    resolved = resolve(recipe_file(recipe), [*overrides, *changes])
    check_ranks(resolved.recipe, ranks)
    return Examination(ranks, run_dir_of(resolved, recipe), resolved.text)


def show(verdict: Verdict) -> None:
    """One line for a check; four more for the one that failed."""
    mark = styled("ok    ", "green") if verdict.ok else styled("FAILED", "bold", "red")
    where = "" if verdict.rank is None else f"rank {verdict.rank}: "
    say(f"{mark}  {verdict.check.ljust(_NAME_WIDTH)}{where}{verdict.says}  ({verdict.seconds:.1f} s)")
    rows = [("warning", text) for text in verdict.warnings]
    if not verdict.ok:
        rows += [("means", verdict.means), ("try", verdict.advice), ("log", verdict.log)]
    _say_rows(rows)


def _say_rows(rows: Sequence[tuple[str, str]]) -> None:
    for title, text in rows:
        say(f"        {title.ljust(_NAME_WIDTH)}{text}")


@contextmanager
def _prepared(
    recipe: str, ranks: int, overrides: Sequence[str], steps: int, line: ProgressLine
) -> Iterator[tuple[Trials, Variant]]:
    resolved = resolve(recipe_file(recipe), overrides)
    check_ranks(resolved.recipe, ranks)
    root = Path(tempfile.mkdtemp(prefix="ups-bisect-"))
    try:
        trials = Trials(root, run_dir_of(resolved, recipe), on_start=line.working)
        yield trials, Variant(resolved.recipe, ranks, steps=steps)
    finally:
        with suppress(OSError):  # it stays if a trial left something
            root.rmdir()


def run_bisect(recipe: str, ranks: int, overrides: Sequence[str], steps: int, minutes: float, *, as_json: bool) -> None:
    """Search, show, and leave with the exit code of the failure."""
    from ups.doctor.bisect import Bisection, module_text, next_step, place_of, to_json, verdict, windows_text

    with ProgressLine(quiet=as_json) as line, _prepared(recipe, ranks, overrides, steps, line) as (trials, variant):

        def ended(outcome: TrialOutcome) -> None:
            line.clear()
            mark = styled("ok    ", "green") if outcome.ok else styled("FAILS ", "bold", "red")
            failure = "" if outcome.failed is None else f": {outcome.failed.says}"
            say(f"{mark}  {outcome.label}{failure}  ({outcome.seconds:.1f} s)")

        finding = Bisection(trials, variant, 60 * minutes, None if as_json else ended).run()
        failed = finding.failure.failed if finding.failure else None
        if failed is None:
            shutil.rmtree(trials.root, ignore_errors=True)
    if as_json:
        report(to_json(finding, recipe))
    else:
        mark = ("bold", "green") if failed is None else ("bold", "red")
        say(styled(verdict(finding), *mark))
        location = place_of(finding)
        rows = []
        if failed is not None:
            rows.append(("failure", f"{failed.cause}: {failed.says}"))
        if "culprit" in location:
            rows.append(("made in", module_text(location["culprit"])))
        if "windows" in location:
            rows.append(("data", windows_text(location["windows"])))
        rows += [("not needed", ", ".join(finding.simplified))] if finding.simplified else []
        rows += [("unclear", "; ".join(finding.unclear))] if finding.unclear else []
        rows += [("not tried", f"{', '.join(finding.not_tried)}: the time was up")] if finding.not_tried else []
        rows.append(("try", next_step(finding, recipe)))
        if finding.smallest is not None:
            rows.append(("smallest", f"{finding.smallest} with --ranks {finding.ranks}"))
        if failed is not None:
            rows.append(("log", failed.log))
        _say_rows(rows)
    if failed is not None:
        raise typer.Exit(failed.exit_code)
