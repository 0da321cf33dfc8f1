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
from ups.record.text import path_text
from ups.record.untrusted_files import printable


class Output:
    """Keeps silent. `ups train` and `progress=True` put others in its place."""

    def scored(self, results: Sequence[Mapping[str, Any]], bundle: Path) -> None:
        """The scores of a completed run, and where its bundle is."""

    @contextlib.contextmanager
    def following(self, run_dir: Path, recipe: Recipe) -> Iterator[Callable[[str], None]]:
        """Show progress while entered; gives the function that takes whole lines (faults, the verdict)."""
        yield lambda line: None

    @contextlib.contextmanager
    def scoring(self) -> Iterator[Callable[[str, int, int], None] | None]:
        """Show progress while entered; gives the function that takes what is done, how much of it, of how much."""
        yield None


class Printed(Output):
    """Lines on standard output, progress on standard error."""

    def scored(self, results: Sequence[Mapping[str, Any]], bundle: Path) -> None:
        from ups.run.score_text import score_lines

        sys.stdout.write(f"{printable(score_lines(results), keep=chr(10))}\nwrote {printable(path_text(bundle))}\n")

    @contextlib.contextmanager
    def following(self, run_dir: Path, recipe: Recipe) -> Iterator[Callable[[str], None]]:
        from ups.run.follow_metrics import MetricsFollower
        from ups.run.progress_line import ProgressLine

        stages = [stage.type for stage in recipe.stages]
        with ProgressLine() as line, MetricsFollower(run_dir / "metrics.jsonl", stages, line) as rows:
            line.show("starting", in_log=False)  # a rank needs some seconds for its imports
            yield rows.say

    @contextlib.contextmanager
    def scoring(self) -> Iterator[Callable[[str, int, int], None] | None]:
        from ups.run.progress_line import ProgressLine

        with ProgressLine() as line:
            yield line.count


@contextlib.contextmanager
def messages_shown(progress: bool) -> Iterator[None]:
    """Show warnings on standard error to who asked for progress and has not configured logging."""
    with log_shown_by(_write_short) if progress else contextlib.nullcontext():
        yield


def _write_short(record: logging.LogRecord) -> None:
    sys.stderr.write(short_line(record) + "\n")
