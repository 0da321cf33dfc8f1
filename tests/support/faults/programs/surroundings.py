"""Bad surroundings for the real rank program: files that show up late, NaN, an early end.

Put around the product from outside, before a rank begins to train; the product has no special case for any of it.
"""

from __future__ import annotations

import builtins
import functools
import io
import os
import time
from pathlib import Path
from typing import Any

from tests.support.faults.programs.faults_to_plant import FAULT, FLAGS


class LateFiles:
    """What others put into a folder shows up here only after some seconds, as on a shared file system that caches."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder = f"{folder}/"
        self._seconds = seconds
        self._since: dict[str, float] = {}
        self._lstat = os.lstat

    def hides(self, path: Any) -> bool:
        """Whether this host does not know of `path` yet, although it is there."""
        text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
        if not isinstance(text, str) or not text.startswith(self._folder):
            return False
        entry = text.removeprefix(self._folder).split("/")[0]
        try:
            self._lstat(self._folder + entry)
        except OSError:
            return False
        return time.monotonic() - self._since.setdefault(entry, time.monotonic()) < self._seconds

    def install(self) -> None:
        """Stand before the calls by which Python looks at files."""
        for module, name in [(os, n) for n in ("stat", "lstat", "open", "listdir", "scandir")] + [(io, "open")]:
            setattr(module, name, self._before(getattr(module, name)))
        builtins.open = io.open

    def _before(self, call: Any) -> Any:
        @functools.wraps(call)
        def checked(path: Any = ".", *arguments: Any, **named: Any) -> Any:
            if self.hides(path):
                raise FileNotFoundError(2, "No such file or directory (late)", os.fspath(path))
            return call(path, *arguments, **named)

        return checked


def surround(run_dir: Path, rank: int) -> None:
    """Set up what the environment of the test asks for."""
    late = float(os.environ.get("TOY_LATE_SECONDS", "0"))
    if late and rank:
        LateFiles(run_dir / "checkpoints", late).install()
    if FAULT.get("kind", "").startswith("worker_"):
        _plant_reader()
    _poison()
    _end_early()


def _plant_reader() -> None:
    import ups.data.open as module
    from tests.support.faults.programs.planted_reader import PlantedReader

    real = module.open_task

    def open_planted(config: Any) -> Any:
        reader = real(config)
        reader.__class__ = PlantedReader
        return reader

    module.open_task = open_planted


def _poison() -> None:
    """The next loss after the flag `nan` is not a number."""
    from ups.training import stages

    real = stages.Losses

    def losses(total: Any, metrics: Any) -> Any:
        if "nan" in FLAGS:
            FLAGS.discard("nan")
            total = total * float("nan")
        return real(total, metrics)

    stages.Losses = losses  # type: ignore[assignment, misc]


def _end_early() -> None:
    """After the flag `end_of_data` the loader of this rank has no batch left."""
    from ups.data.loader import Loader

    real = Loader.__next__

    def deliver(loader: Any) -> Any:
        if "end_of_data" in FLAGS:
            raise StopIteration
        return real(loader)

    Loader.__next__ = deliver
