"""The tracker `csv`: each number of each row as one line of a table in the run directory. No torch here."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Literal

from ups.config.setting import setting
from ups.config.tracker import TrackerConfig
from ups.tracking.tracker import Row


class CsvTrackerConfig(TrackerConfig):
    """A table of metrics."""

    type: Literal["csv"] = setting("csv", "Which tracker this is.")
    file: str = setting("metrics.csv", "Name of the file in the run directory.")


class CsvTracker:
    """Called by a thread of its own, on the first rank only: it may be slow, and it may raise."""

    name = "csv"

    def __init__(self, config: CsvTrackerConfig, run_dir: Path) -> None:
        self.stream = (run_dir / config.file).open("a", newline="")
        self.table = csv.writer(self.stream)

    def log(self, row: Row) -> None:
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        self.table.writerows((row.get("step"), name, value) for name, value in numbers.items())
        self.stream.flush()

    def close(self) -> None:
        self.stream.close()
