"""What `ups train` looks at before it starts ranks: those of the doctor's checks that need no ranks and no torch.

The checks are the doctor's own; together they take well under two seconds. What they refuse would fail in every
attempt, so it is refused once, with the exit code and the hint of the check.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ups.config.schema import Recipe
from ups.doctor.probes import machine
from ups.doctor.probes.check import Assignment, CheckFailed, Report
from ups.doctor.probes.data import check_fit, check_windows
from ups.errors import DataError, MachineError

if TYPE_CHECKING:
    from ups.formats.base import Reader


def check_machine(recipe: Recipe, ranks: int, run_dir: Path) -> list[str]:
    """Warnings about the machine. Raises MachineError for what no attempt could survive."""
    report = Report("preflight")
    try:
        machine.check(Assignment(run_dir, run_dir, ranks, recipe), report)
    except CheckFailed as error:
        raise MachineError(error.full_message(), hint=error.hint) from error
    return report.warnings


def check_data(recipe: Recipe, readers: Sequence[Reader]) -> None:
    """Look into every task. Raises DataError for what no attempt could survive."""
    for stage in recipe.stages:
        named = zip(recipe.data.tasks, readers, strict=True)
        own = [reader for task, reader in named if stage.trains(task.name)]
        if stage.needs_linear_part and all(reader.task.steady for reader in own):
            raise DataError(
                "a stage fits what is linear in time, and all tasks are steady", hint="leave the stage 'linear' out"
            )
    for reader in readers:
        try:
            check_fit(reader, recipe)
            check_windows(reader, "train", 0)
            reader.identity()  # of a store that was never committed there is none
        except CheckFailed as error:
            raise DataError(error.full_message(), hint=error.hint) from error
