"""Runs the checks of `ups doctor`, each in its own processes, and believes what they leave.

A check ends in a verdict of its own, in a crash, or at its deadline; each of these is a finding with a name. The doctor
stops at the first one. No torch here: when torch is what is broken, this process still says so.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ups.doctor.checks import CHECK_PROGRAMS, CheckProgram
from ups.doctor.judge import Verdict, judge
from ups.doctor.processes import Examination, run_program


def examine(examination: Examination, on_verdict: Callable[[Verdict], None] | None = None) -> list[Verdict]:
    """Run checks until one fails; verdicts in order, the failed one last. Leaves no process and no scratch file behind.

    The output of a failed check stays in the directory that its verdict names.
    """
    work_dir = Path(tempfile.mkdtemp(prefix="ups-doctor-"))
    missing = _first_missing(examination.run_dir)
    verdicts: list[Verdict] = []
    try:
        write_assignment(examination, work_dir)
        for program in CHECK_PROGRAMS:
            if (program.recipe and examination.recipe_text is None) or (
                examination.only and program.module not in examination.only
            ):
                continue
            for verdict in run_checks(program, examination, work_dir):
                verdicts.append(verdict)
                if on_verdict is not None:
                    on_verdict(verdict)
                if not verdict.ok:
                    return verdicts
        return verdicts
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(examination.run_dir / f".doctor-{work_dir.name}")
        _remove_empty(examination.run_dir, missing)
        if not verdicts or verdicts[-1].ok:
            shutil.rmtree(work_dir, ignore_errors=True)


def write_assignment(examination: Examination, work_dir: Path) -> None:
    """What the checks read."""
    recipe = ""
    if examination.recipe_text is not None:
        recipe = str(work_dir / "config.yaml")
        Path(recipe).write_text(examination.recipe_text)
    document = {
        "recipe": recipe,
        "run_dir": str(examination.run_dir),
        "ranks": examination.ranks,
    }
    (work_dir / "assignment.json").write_text(json.dumps(document))


def run_checks(program: CheckProgram, examination: Examination, work_dir: Path) -> Iterator[Verdict]:
    """The verdicts of one check program, ending with the first that failed."""
    started = time.monotonic()
    left = run_program(program, examination, work_dir)
    yield from judge(program, left, time.monotonic() - started)


def _first_missing(path: Path) -> Path | None:
    """The outermost directory above and with `path` that does not exist yet."""
    missing = None
    while not path.exists():
        missing, path = path, path.parent
    return missing


def _remove_empty(path: Path, outermost: Path | None) -> None:
    """Remove the directories that the examination made, if nothing is in them."""
    while outermost is not None and path.is_relative_to(outermost):
        with contextlib.suppress(OSError):
            path.rmdir()
        path = path.parent
