"""The tracker `tensorboard`: event files in RUN/tensorboard. No package is needed to write them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from ups.config.tracker import TensorBoardConfig
from ups.record.run_dir import RunDir
from ups.tracking.event_file import EventFile
from ups.tracking.metrics_file import Row, all_rows, numbers_of
from ups.tracking.tracker import Ending, TrackedRun, Tracker


class TensorBoardTracker(Tracker):
    """Each process writes a file of its own: what an earlier one left may end in the middle of a record."""

    def __init__(self, config: TensorBoardConfig, run: TrackedRun) -> None:
        self._folder = RunDir(run.dir).tensorboard
        self._file = EventFile(self._folder)
        self._metrics = RunDir(run.dir).metrics
        self._step: int | None = None
        self._file.text("run/facts", _table(run.facts), 0)
        self.id, self.url = run.id, str(self._folder)

    def log(self, row: Row, number: int) -> None:
        step, wall_time = row.get("step"), row.get("time")
        if not isinstance(step, int) or not isinstance(wall_time, int | float):
            return
        if self._step is None:
            self._step = self._step_before(number)
        if step < self._step:
            self._file.restarted(step)
        self._step = step
        self._file.numbers(numbers_of(row), step, wall_time)

    def _step_before(self, number: int) -> int:
        """The step of the row that an earlier process has written last."""
        last = 0
        for row in itertools.islice(all_rows(self._metrics), number):
            last = row["step"] if row is not None and isinstance(row.get("step"), int) else last
        return last

    def flush(self) -> None:
        self._file.flush()

    def attach(self, path: Path, name: str) -> None:
        if path.suffix == ".png":
            self._file.picture(name, path.read_bytes(), self._step or 0)
        else:
            self._file.text(f"files/{name}", str(path), self._step or 0)

    def end(self, ending: Ending) -> None:
        self._file.text("run/ending", _table(ending.texts), self._step or 0)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _table(values: Mapping[str, str]) -> str:
    """Names and values as a Markdown table."""
    rows = [f"| {name} | {value.replace('|', '/')} |" for name, value in values.items()]
    return "\n".join(["| name | value |", "|---|---|", *rows])
