"""What every check shares: the assignment it reads and the verdict it prints.

A check prints one JSON object when it ends, as the last line of its output. Before that it may crash: the doctor, which
reads the output (`ups.doctor.examine`), then takes the first check without a verdict for the one that did. For the same
reason nothing heavy is imported before a check has begun.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ups.distributed.environment import RankEnvironment
from ups.errors import UpsError
from ups.record.causes import cause_of_error, is_cascade
from ups.record.failure import location_of_error
from ups.record.log import show_log, write_to_stderr
from ups.record.run_dir import RunDir
from ups.run.preflight import CheckFailed, Report

if TYPE_CHECKING:
    from ups.config.schema import Recipe

STATISTICS_NAME = RunDir.statistics.name
# Of a collective: a check that hangs must end before the user gives up.
TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """What is examined. `run_dir` is where the run would live; `work_dir` belongs to this examination alone.

    stack: what is closed when the process has done all its checks. shared: what a check leaves for those after it.
    """

    work_dir: Path
    run_dir: Path
    ranks: int
    recipe: Recipe | None
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    shared: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, work_dir: Path) -> Assignment:
        """What the doctor wrote for its checks."""
        document = json.loads((work_dir / "assignment.json").read_text())
        recipe = None
        if document.get("recipe"):
            from ups.config.recipe import resolve

            recipe = resolve(document["recipe"]).recipe
        run_dir = Path(document["run_dir"])
        return cls(work_dir, run_dir, int(document["ranks"]), recipe)

    @property
    def run(self) -> Recipe:
        """The recipe, for checks that need one: the doctor starts them only with one."""
        assert self.recipe is not None
        return self.recipe


def start(arguments: list[str]) -> tuple[str, Assignment]:
    """Begin a program: stacks on fatal signals and shortly before its deadline. Returns its name and assignment."""
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    seconds = float(os.environ.get("UPS_PROBE_SECONDS") or 0)
    if seconds > 0:
        faulthandler.dump_traceback_later(max(1.0, seconds - 5.0), exit=False)
    show_log(write_to_stderr, logging.INFO)
    return arguments[0], Assignment.read(Path(arguments[1]))


@contextlib.contextmanager
def begin_check(name: str) -> Iterator[Report]:
    """One check: says what it found. An error is its verdict, and the process leaves at once.

    At once, because destructors of a rank may wait for peers that are gone.
    """
    rank = RankEnvironment.read().rank
    report = Report(name)
    started = time.monotonic()
    try:
        yield report
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the check found
        traceback.print_exc()
        # What a check refuses it has compared over all ranks: no single one of them is the cause.
        blamed = None if isinstance(error, CheckFailed) else rank
        say_failed(report, blamed, time.monotonic_ns(), **_described(error))
        sys.stderr.flush()
        os._exit(1)
    if rank == 0:
        seconds = round(time.monotonic() - started, 3)
        facts = {"says": report.says, "facts": report.facts, "warnings": report.warnings, "seconds": seconds}
        _print({"rung": name, "ok": True, "time_ns": time.monotonic_ns(), **facts})


def say_failed(report: Report, rank: int | None, time_ns: int, **facts: Any) -> None:
    """The verdict of a check that failed; rank: None for what is compared over all ranks."""
    _print({"rung": report.name, "ok": False, "rank": rank, "time_ns": time_ns, "facts": report.facts, **facts})


def _described(error: Exception) -> dict[str, Any]:
    cause = {"cause": cause_of_error(error), "cascade": is_cascade(error)}
    if isinstance(error, UpsError):
        return {"says": error.message, "means": getattr(error, "means", ""), "try": error.hint, **cause}
    frame = location_of_error(error)
    location = f" at {frame.short()}" if frame else ""
    return {"says": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}{location}", **cause}


def _print(document: dict[str, Any]) -> None:
    # One write: lines of several ranks may share a file.
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()
