"""The tracker `csv`: each number of each row as one line of a table in the run directory. No torch here."""

from __future__ import annotations

import csv
from typing import Literal

from ups.config.setting import setting
from ups.config.tracker import TrackerConfig
from ups.tracking.metrics_file import Row, numbers_of
from ups.tracking.tracker import Ending, TrackedRun, Tracker


class CsvTrackerConfig(TrackerConfig):
    """A table of metrics."""

    type: Literal["csv"] = setting("csv", "Which tracker this is.")
    file: str = setting("metrics.csv", "Name of the file in the run directory.")


class CsvTracker(Tracker):
    """Lives in a separate process, which reads metrics.jsonl: it may be slow, and it may raise."""

    def __init__(self, config: CsvTrackerConfig, run: TrackedRun) -> None:
        self.url = str(run.dir / config.file)
        self.stream = (run.dir / config.file).open("a", newline="")
        self.table = csv.writer(self.stream)

    def log(self, row: Row, number: int) -> None:
        self.table.writerows((row.get("step"), name, value) for name, value in numbers_of(row).items())

    def flush(self) -> None:
        self.stream.flush()

    def end(self, ending: Ending) -> None:
        self.table.writerow((None, "state", ending.state))

    def close(self) -> None:
        self.stream.close()
