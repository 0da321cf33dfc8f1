"""From the trackers that a recipe names to trackers: each is built by its own queue's thread, with its first row.

A service that hangs or refuses a login then costs rows on that tracker, and no time at the start of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ups.config.tracker import TrackerConfig
from ups.registry import TRACKERS
from ups.tracking.tracker import Row, Tracker


def build_trackers(configs: Sequence[TrackerConfig], run_dir: Path) -> list[Tracker]:
    """The trackers of a recipe. Raises PluginError at once if the code of one cannot be imported."""
    return [_Late(config, run_dir, TRACKERS.factory(config.type)) for config in configs]


class _Late:
    """A tracker that is built when its first row comes."""

    def __init__(self, config: TrackerConfig, run_dir: Path, factory: Callable[[TrackerConfig, Path], Tracker]) -> None:
        self.name = config.type
        self._config, self._run_dir, self._factory = config, run_dir, factory
        self._tracker: Tracker | None = None

    def log(self, row: Row) -> None:
        if self._tracker is None:
            self._tracker = self._factory(self._config, self._run_dir)
        self._tracker.log(row)

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()
