"""What a run says while it goes on: nothing, or lines on the terminal or in the notebook."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ups.config.schema import Recipe
from ups.record.log import log_shown_by, short_line
from ups.record.run_dir import RunDir
from ups.record.text import path_text, printable


class Output:
    """Keeps silent. `ups train` and `progress=True` put others in its place."""

    def completed_before(self, run_dir: Path, step: int) -> None:
        """There is nothing to do: the run was completed by an earlier start."""

    def scored(self, results: Sequence[Mapping[str, Any]], bundle: Path) -> None:
        """The scores of a completed run, and where its bundle is."""

    @contextlib.contextmanager
    def following(self, run_dir: Path, recipe: Recipe) -> Iterator[Callable[[str], None]]:
        """Show progress while entered; gives the function that takes whole lines (faults, the verdict)."""
        yield lambda line: None

    @contextlib.contextmanager
    def following_host(self) -> Iterator[Callable[[str], None]]:
        """The same on a host that follows another one: lines about its own ranks, and the verdict of the run."""
        yield lambda line: None

    @contextlib.contextmanager
    def scoring(self) -> Iterator[Callable[[str, int, int], None] | None]:
        """Show progress while entered; gives the function that takes what is done, how much of it, of how much."""
        yield None


class Printed(Output):
    """Lines on standard output, progress on standard error."""

    # How a person gives a stage that many more steps.
    more_steps = "stages__{}__{}=MORE"

    def completed_before(self, run_dir: Path, step: int) -> None:
        sys.stdout.write(printable(completed_words(run_dir, step, self.more_steps), keep=chr(10)) + "\n")

    def scored(self, results: Sequence[Mapping[str, Any]], bundle: Path) -> None:
        from ups.inference.stored_scores import written_words
        from ups.run.scoring import score_lines

        sys.stdout.write(printable(f"{score_lines(results)}\n{written_words(bundle)}", keep=chr(10)) + "\n")

    @contextlib.contextmanager
    def following(self, run_dir: Path, recipe: Recipe) -> Iterator[Callable[[str], None]]:
        from ups.run.progress_line import MetricsFollower, ProgressLine

        stages = [stage.type for stage in recipe.stages]
        with ProgressLine() as line, MetricsFollower(RunDir(run_dir).metrics, stages, line) as rows:
            line.show("starting", in_log=False)  # a rank needs some seconds for its imports
            yield rows.say

    @contextlib.contextmanager
    def following_host(self) -> Iterator[Callable[[str], None]]:
        yield _write_line

    @contextlib.contextmanager
    def scoring(self) -> Iterator[Callable[[str, int, int], None] | None]:
        from ups.run.progress_line import ProgressLine

        with ProgressLine() as line:
            yield line.count


def completed_words(run_dir: Path, step: int, more_steps: str) -> str:
    """What is said about a run that is completed already, with the way to go on."""
    from ups.inference.stored_scores import stored_warnings
    from ups.run.directory import read_run_recipe

    stages = read_run_recipe(run_dir).recipe.stages
    length = "steps" if stages[-1].steps is not None else "budget_seconds"
    way = more_steps.format(len(stages) - 1, length)
    bundle = RunDir(run_dir).bundle
    head = f"{path_text(run_dir)} is completed: step {step}, verified; its bundle is {path_text(bundle)}"
    warnings = [f"WARNING: {text}" for text in stored_warnings(bundle)[1]]
    return "\n".join([head, f"to train it longer: {way}", *warnings])


@contextlib.contextmanager
def messages_shown(progress: bool) -> Iterator[None]:
    """Show warnings on standard error to who asked for progress and has not configured logging."""
    with log_shown_by(_write_short) if progress else contextlib.nullcontext():
        yield


def _write_line(line: str) -> None:
    sys.stdout.write(printable(line) + "\n")
    sys.stdout.flush()


def _write_short(record: logging.LogRecord) -> None:
    sys.stderr.write(short_line(record) + "\n")
