"""What `ups run` says: a line for each step, and what the training and the scores say in between."""

from __future__ import annotations

import sys
from pathlib import Path

from ups.library.output import Printed
from ups.library.recipe_steps import STEPS, StepOutput
from ups.record.text import duration_text
from ups.record.untrusted_files import printable
from ups.run.steps_file import DONE, StepRecord
from ups.supervise.run_file import GATE_FAILED

_WIDTH = max(len(step.name) for step in STEPS) + 2


class StepLines(Printed, StepOutput):
    """Lines on standard output, progress on standard error."""

    def line(self, text: str) -> None:
        """Write one line."""
        sys.stdout.write(printable(text) + "\n")

    def completed_before(self, run_dir: Path, step: int) -> None:
        """The line of the step says it."""

    def ended(self, record: StepRecord) -> None:
        words = {DONE: record.says, GATE_FAILED: f"not passed: {record.says}"}
        text = words.get(record.outcome, f"{record.outcome}: {record.cause or record.says}")
        self.line(f"{record.name:<{_WIDTH}}{text} ({duration_text(record.seconds)})")

    def pronounced(self, line: str) -> None:
        self.line(line)

    def unchanged(self, record: StepRecord) -> None:
        words = f"not passed: {record.says}" if record.outcome == GATE_FAILED else record.says
        self.line(f"{record.name:<{_WIDTH}}unchanged: {words}")
