"""What `ups doctor RECIPE --bisect` and `--compare-python` print: a line for each trial, then one verdict."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ups.cli.output import report, say, styled

if TYPE_CHECKING:
    from ups.doctor.other_python import Comparison
    from ups.doctor.rehearsal import Outcome, Trials, Variant
    from ups.run.progress_line import ProgressLine

_WIDTH = 12


@contextmanager
def _prepared(
    recipe: str, ranks: int, overrides: Sequence[str], steps: int, line: ProgressLine
) -> Iterator[tuple[Trials, Variant]]:
    from ups.config.recipe import recipe_file, resolve
    from ups.doctor.rehearsal import Trials, Variant
    from ups.run.directory import check_ranks, run_dir_of

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
    from ups.doctor.bisect import Bisection, place_of
    from ups.doctor.bisect_words import module_text, next_step, to_json, verdict, windows_text
    from ups.run.progress_line import ProgressLine

    with (
        ProgressLine(quiet=as_json) as line,
        _prepared(recipe, ranks, overrides, steps, line) as (trials, variant),
    ):

        def ended(outcome: Outcome) -> None:
            line.clear()
            show_outcome(outcome)

        finding = Bisection(trials, variant, 60 * minutes, None if as_json else ended).run()
        failed = finding.failure.failed if finding.failure else None
        if failed is None:
            shutil.rmtree(trials.root, ignore_errors=True)
    if as_json:
        report(to_json(finding, recipe))
    else:
        mark = ("bold", "green") if failed is None else ("bold", "red")
        say(styled(verdict(finding), *mark))
        place = place_of(finding)
        rows = []
        if failed is not None:
            rows.append(("failure", f"{failed.cause}: {failed.says}"))
        if "culprit" in place:
            rows.append(("made in", module_text(place["culprit"])))
        if "windows" in place:
            rows.append(("data", windows_text(place["windows"])))
        rows += [("not needed", ", ".join(finding.simplified))] if finding.simplified else []
        rows += [("unclear", "; ".join(finding.unclear))] if finding.unclear else []
        rows += [("not tried", f"{', '.join(finding.not_tried)}: the time was up")] if finding.not_tried else []
        rows.append(("try", next_step(finding, recipe)))
        if finding.smallest is not None:
            rows.append(("smallest", f"{finding.smallest} with --ranks {finding.ranks}"))
        if failed is not None:
            rows.append(("log", failed.log))
        for title, text in rows:
            say(f"        {title.ljust(_WIDTH)}{text}")
    if failed is not None:
        raise typer.Exit(failed.exit_code)


def show_outcome(outcome: Outcome) -> None:
    """One line for a trial."""
    mark = styled("ok    ", "green") if outcome.ok else styled("FAILS ", "bold", "red")
    found = "" if outcome.failed is None else f": {outcome.failed.says}"
    say(f"{mark}  {outcome.label}{found}  ({outcome.seconds:.1f} s)")


def run_comparison(
    recipe: str, ranks: int, overrides: Sequence[str], python: str, steps: int, *, as_json: bool
) -> None:
    """Compare, show, and leave with 0 only if all numbers agree."""
    from ups.doctor.other_python import compare, to_json
    from ups.errors import TrainingError
    from ups.run.progress_line import ProgressLine

    with (
        ProgressLine(quiet=as_json) as line,
        _prepared(recipe, ranks, overrides, steps, line) as (trials, variant),
    ):
        found = compare(trials, variant, python)
        if found.failed is None:
            shutil.rmtree(trials.root, ignore_errors=True)
    if as_json:
        report(to_json(found))
    else:
        show_comparison(found, python)
    if found.failed is not None:
        raise typer.Exit(found.failed[1].exit_code)
    if not found.ok:
        raise typer.Exit(TrainingError.exit_code)


def show_comparison(found: Comparison, python: str) -> None:
    """Versions, steps, and the first difference."""
    from ups.doctor.other_python import DATA_READ

    for title, versions in (("here", found.here), ("there", found.there)):
        shown = ", ".join(
            f"{name} {value}" for name, value in versions.items() if isinstance(value, str) and name != "ups_path"
        )
        say(f"{title.ljust(6)}  {shown}")
    other = sorted(n for n in found.here if n != "ups_path" and found.here[n] != found.there.get(n))
    say(f"        differ in: {', '.join(other) or 'no version'}")
    if found.here["ups_path"] != found.there["ups_path"]:
        say(f"        ups is read from {found.here['ups_path']} here, from {found.there['ups_path']} there")
    for row in found.rows:
        parts = [
            f"{name.replace('_', ' ')} {row[name]['here']:.9g} and {row[name]['there']:.9g} "
            f"(apart {row[name]['apart']:.1e}, rounding {row[name]['rounding']:.1e})"
            for name in ("loss", "gradient_norm")
        ]
        say(f"stage {row['stage']}, step {row['step']}: {'; '.join(parts)}")
    if found.failed is not None:
        label, verdict = found.failed
        say(styled(f"{label} failed: {verdict.says}", "bold", "red"))
        say(f"        try         ups doctor RECIPE --bisect, with that environment\n        log         {verdict.log}")
    elif found.first is None:
        say(styled(f"the same to rounding: {len(found.rows)} steps", "bold", "green"))
    else:
        first = found.first
        tensor = f"; of the gradients, that of {first['tensor']} differs most" if "tensor" in first else ""
        values = "has other bytes" if first["quantity"] == DATA_READ else f"is {first['here']:.9g} here"
        values += " there" if first["quantity"] == DATA_READ else f" and {first['there']:.9g} there"
        say(
            styled(
                f"they differ first in step {first['step']} of stage {first['stage']}: {first['quantity']} {values}"
                f"{tensor}",
                "bold",
                "red",
            )
        )
        say(f"        try         {_what_to_change(other, python)}")


def _what_to_change(other: Sequence[str], python: str) -> str:
    """other: what has another version there."""
    if len(other) > 1:
        return f"give {python} the versions of here one after the other ({', '.join(other)}) until it is gone"
    if other:
        return f"give {python} the {other[0]} of here: if it stays then, something without a version differs"
    return "the versions are the same: compare the files of ups, environment variables (threads, flags) and builds"
