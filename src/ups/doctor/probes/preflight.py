"""What `ups train` looks at before it starts ranks: those of the doctor's checks that need no ranks and no torch.

The checks are the doctor's own; together they take well under two seconds. What they refuse would fail in every
attempt, so it is refused once, with the exit code and the hint of the check.
"""

from __future__ import annotations

from pathlib import Path

from ups.config.schema import Recipe
from ups.doctor.probes import machine
from ups.doctor.probes.check import Assignment, CheckFailed, Report
from ups.doctor.probes.data import check_fit, check_windows
from ups.errors import DataError, MachineError


def preflight(recipe: Recipe, ranks: int, run_dir: Path) -> list[str]:
    """Warnings about machine and data. Raises MachineError or DataError for what no attempt could survive."""
    from ups.data.open import open_task

    report = Report("preflight")
    try:
        machine.check(Assignment(run_dir, run_dir, ranks, recipe), report)
    except CheckFailed as error:
        raise MachineError(error.full_message(), hint=error.hint) from error
    for config in recipe.data.tasks:
        reader = open_task(config)
        try:
            check_fit(reader, recipe)
            check_windows(reader, "train", 0)
            reader.identity()  # of a store that was never committed there is none
        except CheckFailed as error:
            raise DataError(error.full_message(), hint=error.hint) from error
        finally:
            reader.close()
    return report.warnings
