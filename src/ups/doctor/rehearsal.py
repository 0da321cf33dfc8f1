"""Trials of a recipe for `ups doctor --bisect` and `--compare-python`: a few real steps, in processes of their own.

A trial is one or two check programs on one variant of the recipe, with a deadline. What it left is a verdict, and where
every rank was last. No torch.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ups.config.recipe import dump_recipe
from ups.config.schema import Recipe
from ups.doctor.checks import CHECK_PROGRAMS, Check, CheckProgram
from ups.doctor.examine import run_checks, write_assignment
from ups.doctor.judge import Verdict
from ups.doctor.processes import Examination
from ups.errors import DataError

SETTINGS_NAME = "rehearsal.json"
NUMBERS_NAME = "numbers.json"
STATISTICS_NAME = "statistics.json"
PLACE_NAME = "place_{}.json"
# Of a trial, unless less is left of the whole time.
TRIAL_SECONDS = 600.0

Kind = Literal["opened", "rehearsal", "parity"]

OPENED = CheckProgram(
    "opened",
    (Check("opened", "the data cannot be opened or measured", "look at it with `ups data validate`", DataError),),
)
REHEARSAL = CheckProgram(
    "rehearse",
    (Check("rehearsal", "the first steps of the run fail", "ups doctor RECIPE --bisect"),),
    ranks=True,
)
PROGRAMS: dict[Kind, tuple[CheckProgram, ...]] = {
    "opened": (OPENED,),
    "rehearsal": (REHEARSAL,),
    "parity": tuple(program for program in CHECK_PROGRAMS if program.module in ("model", "parity")),
}
# What a kind of trial proves, in words for the table.
TITLES: dict[Kind, str] = {
    "opened": "open and measure the data",
    "rehearsal": "train a few steps",
    "parity": "compare many ranks with one",
}


@dataclass(frozen=True)
class Variant:
    """What is tried: a recipe on so many ranks; `stage` is the only one that is rehearsed, None all of them."""

    recipe: Recipe
    ranks: int
    stage: int | None = None
    steps: int = 4


@dataclass(frozen=True)
class Outcome:
    """How a trial ended. `failed` is the first verdict that is not well; places: where each rank was last."""

    label: str
    failed: Verdict | None
    seconds: float
    folder: Path
    places: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.failed is None

    @property
    def cause(self) -> str:
        """The stable name of the failure; empty if there was none."""
        return self.failed.cause if self.failed else ""

    @property
    def facts(self) -> dict[str, Any]:
        return self.failed.facts if self.failed else {}

    def same_failure(self, other: Outcome) -> bool:
        """Whether both failed in the same way."""
        return not self.ok and not other.ok and self.cause == other.cause

    def to_json(self) -> dict[str, Any]:
        """One row of the table of trials."""
        found: dict[str, Any] = {"trial": self.label, "ok": self.ok, "seconds": round(self.seconds, 1)}
        if self.failed is not None:
            found |= {"cause": self.cause, "says": self.failed.says, "rank": self.failed.rank}
        return found


@dataclass(frozen=True)
class Trials:
    """Runs trials below one directory, which keeps what each of them left.

    still_seconds: a rank that enters no module for so long stands still. on_start: told the label of each trial.
    """

    root: Path
    run_dir: Path
    environment: dict[str, str] = field(default_factory=dict)
    still_seconds: float = 45.0
    on_start: Callable[[str], None] | None = None

    def run(
        self, kind: Kind, variant: Variant, label: str, seconds: float = TRIAL_SECONDS, python: str | None = None
    ) -> Outcome:
        """One trial, at most `seconds` for each of its programs."""
        if self.on_start is not None:
            self.on_start(label)
        number = len(list(self.root.iterdir())) if self.root.is_dir() else 0
        folder = self.root / f"{number:02d}_{kind}"
        folder.mkdir(parents=True)
        given = Examination(variant.ranks, self.run_dir, dump_recipe(variant.recipe), self.environment)
        if python is not None:
            given = replace(given, python=python)
        write_assignment(given, folder)
        settings = {"stage": variant.stage, "steps": variant.steps, "still_seconds": self.still_seconds}
        (folder / SETTINGS_NAME).write_text(json.dumps(settings))
        self._take_statistics(folder)
        started = time.monotonic()
        failed = None
        for program in PROGRAMS[kind]:
            limited = replace(program, seconds=min(seconds, program.seconds))
            failed = next((v for v in run_checks(limited, given, folder) if not v.ok), None)
            if failed is not None:
                break
        return Outcome(label, failed, time.monotonic() - started, folder, read_places(folder))

    def _take_statistics(self, folder: Path) -> None:
        """Of the first trial, which measured all tasks: no rank measures again."""
        known = next(iter(sorted(self.root.glob(f"*_opened/{STATISTICS_NAME}"))), None)
        if known is not None:
            shutil.copy(known, folder / STATISTICS_NAME)


def read_places(folder: Path) -> dict[int, dict[str, Any]]:
    """Where every rank was last, by what it wrote on its way."""
    found = {}
    for path in folder.glob(PLACE_NAME.format("*")):
        with contextlib.suppress(OSError, ValueError):
            found[int(path.stem.rpartition("_")[2])] = json.loads(path.read_text())
    return found
