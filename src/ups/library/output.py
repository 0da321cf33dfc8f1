"""What a run says while it goes on: nothing, or lines on the terminal or in the notebook."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ups.config.schema import Recipe
from ups.record.untrusted_files import printable


class Output:
    """Keeps silent. `ups train` and `progress=True` put others in its place."""

    def warn(self, text: str) -> None:
        """Something to know before the run starts."""

    def scored(self, results: Sequence[Mapping[str, Any]], bundle: Path) -> None:
        """The scores of a completed run, and where its bundle is."""

    @contextlib.contextmanager
    def following(self, run_dir: Path, recipe: Recipe) -> Iterator[Callable[[str], None]]:
        """Show progress while entered; gives the function that takes whole lines (faults, the verdict)."""
        yield lambda line: None


class Printed(Output):
    """Lines on standard output, progress and warnings on standard error."""

    def warn(self, text: str) -> None:
        sys.stderr.write(f"warning: {printable(text)}\n")

    def scored(self, results: Sequence[Mapping[str, Any]], bundle: Path) -> None:
        from ups.run.score_text import score_lines

        sys.stdout.write(f"{printable(score_lines(results), keep=chr(10))}\nwrote {printable(str(bundle))}\n")

    @contextlib.contextmanager
    def following(self, run_dir: Path, recipe: Recipe) -> Iterator[Callable[[str], None]]:
        from ups.run.progress_line import ProgressLine

        with ProgressLine(run_dir / "metrics.jsonl", [stage.type for stage in recipe.stages]) as line:
            yield line.say
