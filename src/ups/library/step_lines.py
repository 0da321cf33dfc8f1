"""What `ups run` says: lines for each step, and what the training and the scores say in between."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ups.config.schema import Recipe
from ups.library.recipe_steps import STEPS, StepOutput, before_gate
from ups.record.run_dir import RunDir
from ups.record.text import duration_text, printable
from ups.run.steps_file import DONE, StepRecord
from ups.supervise.run_file import GATE_FAILED

if TYPE_CHECKING:
    from ups.run.progress_line import ProgressLine

_WIDTH = max(len(step.name) for step in STEPS) + 2


class StepLines(StepOutput):
    """Results on standard output; on standard error what a step does, how far it is, and that it goes on."""

    _progress: ProgressLine | None = None

    def line(self, text: str) -> None:
        """Write whole lines, above the progress."""
        if self._progress is not None:
            self._progress.clear()
        self.write(text)

    def write(self, text: str) -> None:
        """Write whole lines."""
        sys.stdout.write(printable(text, keep="\n") + "\n")
        sys.stdout.flush()

    @contextlib.contextmanager
    def working(self, name: str, does: str) -> Iterator[None]:
        from ups.run.progress_line import ProgressLine

        try:
            with ProgressLine() as self._progress:
                self._progress.working(f"{name}: {does}")
                yield
        finally:
            self._progress = None

    @contextlib.contextmanager
    def scoring(self) -> Iterator[Callable[[str, int, int], None] | None]:
        yield None if self._progress is None else self._progress.count

    @contextlib.contextmanager
    def following(self, run_dir: Path, recipe: Recipe) -> Iterator[Callable[[str], None]]:
        from ups.run.progress_line import MetricsFollower, ProgressLine

        stages = [stage.type for stage in recipe.stages]
        line = self._progress or ProgressLine(quiet=True)
        with MetricsFollower(RunDir(run_dir).metrics, stages, line) as rows:
            yield before_gate(rows.say, recipe)

    def scored(self, results: Sequence[Mapping[str, Any]], bundle: Path) -> None:
        from ups.run.scoring import score_lines

        self.line(score_lines(results))

    def ended(self, record: StepRecord) -> None:
        words = {DONE: record.says, GATE_FAILED: f"not passed: {record.says}"}
        text = words.get(record.outcome, f"{record.outcome}: {record.cause or record.says}")
        self.line(f"{record.name:<{_WIDTH}}{text} ({duration_text(record.seconds)})")

    def pronounced(self, line: str) -> None:
        self.line(line)

    def unchanged(self, record: StepRecord) -> None:
        words = f"not passed: {record.says}" if record.outcome == GATE_FAILED else record.says
        self.line(f"{record.name:<{_WIDTH}}unchanged: {words}")

    def closing(self, words: str) -> None:
        self.line(words)
