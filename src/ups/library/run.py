"""`ups.Run`: what a run directory tells. Reads files, each time it is asked; runs of other processes may go on."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ups.config.schema import Recipe
from ups.errors import BundleError
from ups.record.run_dir import RunDir, is_bundle
from ups.record.text import html_table, path_text
from ups.run.directory import read_run_recipe
from ups.run.progress_line import read_rows
from ups.supervise.checkpoints import committed_steps
from ups.supervise.run_file import find_run, read_run
from ups.supervise.why import explain, faults_as_json

if TYPE_CHECKING:
    import pandas

    from ups.inference.simulator import Simulator


class Run:
    """A run by its directory, or by its name under runs/. `train` and `fit` return one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = find_run(os.fspath(path))

    @property
    def name(self) -> str:
        """The name of the run's directory."""
        return self.path.name

    @property
    def document(self) -> dict[str, Any]:
        """run.json: attempts, faults, notices and all that follows."""
        return dict(read_run(self.path))

    @property
    def state(self) -> str:
        """'running', 'completed', 'gate_failed', 'failed', 'preempted', 'stopped' or 'died'."""
        return str(self.document["state"])

    @property
    def verdict(self) -> str:
        """The line of the verdict; '' while the run is going."""
        return str(self.document["verdict"])

    @property
    def cause(self) -> str:
        """Why it ended, in one word; '' if it is completed or running."""
        return str(self.document["cause"])

    @property
    def exit_code(self) -> int | None:
        """What `ups train` returned for it; None while it runs."""
        code = self.document["exit_code"]
        return None if code is None else int(code)

    @property
    def faults(self) -> list[dict[str, Any]]:
        """Each fault in the order of time: rank, step, phase, cause, place, what was done."""
        return faults_as_json(read_run(self.path))

    def why(self, fault: int | None = None) -> str:
        """Why the run stopped, and what to do: the text of `ups why`. fault: which one, default the last."""
        return explain(self.path, read_run(self.path), number=fault)

    @property
    def recipe(self) -> Recipe:
        """The recipe that the run is made with."""
        return read_run_recipe(self.path).recipe

    def metrics(self) -> pandas.DataFrame:
        """Losses, rates and validation scores: one row for each step that was logged, in the order of steps.

        Steps that were repeated after a restart appear once, as they were computed last.
        """
        import pandas

        rows: dict[int, dict[str, Any]] = {}
        for row in self.rows():
            step = row.pop("step", None)
            if isinstance(step, int):
                rows.setdefault(step, {}).update(row)
        ordered = dict(sorted(rows.items()))
        return pandas.DataFrame(list(ordered.values()), index=pandas.Index(list(ordered), name="step"))

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl as they were written."""
        return read_rows(self.path)

    @property
    def checkpoints(self) -> list[int]:
        """Steps of the committed checkpoints, oldest first."""
        return sorted(committed_steps(self.path))

    @property
    def bundle(self) -> Path | None:
        """The bundle that a completed run leaves; None if there is none."""
        path = RunDir(self.path).bundle
        return path if is_bundle(path) else None

    def simulator(self, device: str = "auto") -> Simulator:
        """The simulator of the run's bundle."""
        from ups.inference.simulator import Simulator

        if self.bundle is None:
            raise BundleError(f"{self.path} has no bundle: its state is '{self.state}'", hint="finish the run first")
        return Simulator.load(self.bundle, device)

    def report(self, *, split: str = "test") -> Path:
        """Score the newest checkpoint and write the report of `ups eval`; returns its page."""
        from ups.run.scoring import report_folder, score, write_scores
        from ups.run.trained import load_trained

        trained, began = load_trained(str(self.path)), time.monotonic()
        results = score(trained, split=split)
        seconds = time.monotonic() - began
        return write_scores(report_folder(self.path), trained, results, page=True, scoring_seconds=seconds)[-1]

    def _repr_html_(self) -> str:
        facts = {"state": self.state, "verdict": self.verdict, "checkpoints": self.checkpoints, "bundle": self.bundle}
        rows = [[name, value] for name, value in facts.items() if value]
        return html_table(f"Run {self.name}", ("", path_text(self.path)), rows)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, state={self.state!r})"
