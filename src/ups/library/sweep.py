"""The runs of `ups sweep`: each is `ups train` in a separate process, several at a time. No torch.

A sweep keeps no state: run directories say what is finished, and where a killed run continues.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from shlex import quote
from types import FrameType
from typing import IO, Any

from ups.config.recipe import recipe_file, resolve
from ups.config.sweep import Axis, Cell, cells
from ups.errors import exit_code_of_signal
from ups.record import processes
from ups.record.text import path_text
from ups.run.directory import check_ranks, run_dir_of
from ups.run.overview import scores_of
from ups.run.progress_line import ProgressLine
from ups.supervise.run_file import read_run, was_started

POLL_SECONDS = 0.1


class Sweep:
    """The runs of a recipe over `axes`; all of them are checked here, before the first one starts."""

    def __init__(
        self,
        recipe: str,
        changes: Sequence[str],
        axes: Sequence[Axis],
        ranks: int = 1,
        *,
        scripts: Sequence[str] = (),
    ) -> None:
        resolved = resolve(recipe_file(recipe), changes)
        self.recipe, self.ranks = resolved.recipe, ranks
        self.run_dir = run_dir_of(resolved, recipe, changes)
        mirror = self.recipe.checkpoint.mirror
        self.cells = cells(axes, self.recipe.run.name, self.run_dir, mirror)
        for cell in self.cells:
            check_ranks(resolve(recipe_file(recipe), [*changes, *cell.changes]).recipe, ranks)
        options = [("--set", change) for change in changes] + [("--plugin", script) for script in scripts]
        shared = [word for option in options for word in option]
        self._command = processes.module_command("ups", "train", recipe, "--ranks", str(ranks), *shared)
        self._working: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
        self._rows: dict[str, dict[str, Any]] = {}

    def run(self, jobs: int, line: ProgressLine) -> int:
        """Train what is not finished, `jobs` runs at a time; returns the exit code. A failed run stops no other.

        A signal asks the runs in work to save and leave; a second one kills them.
        """
        before, code = signal.signal(signal.SIGTERM, _leave), 0
        try:
            try:
                self._train(list(self.cells), jobs, line)
            except (KeyboardInterrupt, SystemExit) as error:
                code = exit_code_of_signal(signal.SIGTERM if isinstance(error, SystemExit) else signal.SIGINT)
                line.note(f"asking {len(self._working)} runs to save and leave; a second signal kills them")
                for process, _ in self._working.values():
                    process.terminate()
                self._train([], jobs, line)
        except (KeyboardInterrupt, SystemExit):
            line.note("killed: these runs continue from their last checkpoints")
        finally:
            for process, _ in self._working.values():
                process.kill()
            signal.signal(signal.SIGTERM, before)
        return code or (0 if all(row["state"] == "completed" for row in self.rows()) else 6)

    def rows(self) -> list[dict[str, Any]]:
        """What became of each run: name, path, values, state, exit code, scores, and why it is not completed."""
        return [self._rows.get(cell.name) or _row(cell, _state(cell)) for cell in self.cells]

    def _train(self, waiting: list[Cell], jobs: int, line: ProgressLine) -> None:
        while waiting or self._working:
            while waiting and len(self._working) < jobs:
                self._start(waiting.pop(0), jobs)
            line.show(f"{len(self._rows)}/{len(self.cells)} runs, now {', '.join(self._working)}", in_log=False)
            time.sleep(POLL_SECONDS)
            for cell in self.cells:
                if cell.name in self._working and self._working[cell.name][0].poll() is not None:
                    self._rows[cell.name] = row = _outcome(cell, *self._working.pop(cell.name))
                    line.note(f"{len(self._rows)}/{len(self.cells)}  {cell.name}: {row['state']}")

    def _start(self, cell: Cell, jobs: int) -> None:
        environment = dict(os.environ)
        if jobs > 1 and not self.recipe.engine.threads:
            cores = processes.usable_cores()
            environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // (jobs * self.ranks))))
        messages = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe would be full before it is read
        process = subprocess.Popen(
            [*self._command, *cell.words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=messages,
            start_new_session=True,  # Ctrl-C reaches it once, through us
            preexec_fn=processes.bound_to(os.getpid()),
        )
        self._working[cell.name] = process, messages


def _state(cell: Cell) -> str:
    return str(read_run(cell.run_dir)["state"]) if was_started(cell.run_dir) else "not started"


def _outcome(cell: Cell, process: subprocess.Popen[bytes], messages: IO[bytes]) -> dict[str, Any]:
    with messages:
        messages.seek(0)
        lines = messages.read().decode(errors="replace").splitlines()
    if process.returncode == 0:
        return _row(cell, "completed", 0)
    errors = [line for line in lines if line.startswith("error:")]  # it could not be started: its record is an old one
    why = errors[-1] if errors else f"ups why {quote(path_text(cell.run_dir))}"
    return _row(cell, "failed" if errors else _state(cell), process.returncode, why)


def _row(cell: Cell, state: str, code: int | None = None, why: str = "") -> dict[str, Any]:
    keys = ("task", "score", "model", "reference", "reference_name")
    scores = [row for row in scores_of(cell.run_dir) if row.score != "one step"] if state == "completed" else []
    plain = {"name": cell.name, "path": str(cell.run_dir), "values": cell.values, "state": state, "exit_code": code}
    return plain | {"why": why, "scores": [{key: getattr(row, key) for key in keys} for row in scores]}


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(exit_code_of_signal(number))
