"""The split `calibration`: trajectories that are set aside before training, for error bars alone.

An error bar holds only for data that chose nothing: no weights, no early stop, no gate, no setting. So a reader refuses
the split, and does not name it among its splits, until `open_calibration`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ups.errors import DataError
from ups.formats.base import Int64, Reader
from ups.formats.held_out import TRAIN, HeldOutElsewhere

CALIBRATION = "calibration"
# The fewest trajectories that a statement at 90 % can be made of; taken where enough are left to train on.
LEAST_CALIBRATION = 9
LEAST_TO_SET_ASIDE = 36


class SetAside(HeldOutElsewhere):
    """A reader of any format, whose split `train` has given a part of its trajectories to `calibration`.

    Trajectories are taken at equal distances, so that they are like the others however a file is ordered; pieces of one
    simulation stay together.
    """

    def __init__(self, inner: Reader, fraction: float) -> None:
        super().__init__(inner, inner)
        self._opened, self._rows = False, _divided(inner, fraction)
        self._splits |= {name: len(rows) for name, rows in self._rows.items()}

    @property
    def splits(self) -> Mapping[str, int]:
        """Trajectories of each split, with `calibration` only where the reader was opened for it."""
        return {name: count for name, count in self._splits.items() if self._opened or name != CALIBRATION}

    @property
    def remote(self) -> bool:
        return self.own.remote

    def frames_of(self, split: str) -> Int64 | None:
        known = self.own.frames_of(TRAIN if split in self._rows else split)
        return known if known is None or split not in self._rows else known[self._rows[split]]

    def identity(self) -> str:
        return Reader.identity(self)

    def _check_request(self, split: str, *request: Any) -> None:
        if split == CALIBRATION and not self._opened:
            raise DataError(
                f"task '{self.task.name}': the split 'calibration' is for error bars, and another reader asked for it",
                hint="score and choose on 'test' or 'valid'; `ups calibrate` reads this split",
            )
        super()._check_request(split, *request)

    def _place(self, split: str, trajectory: int) -> tuple[Reader, str, int]:
        rows = self._rows.get(split)
        return (self.own, split, trajectory) if rows is None else (self.own, TRAIN, int(rows[trajectory]))


def _divided(inner: Reader, fraction: float) -> dict[str, Int64]:
    """The trajectories of `train` that train keeps, and those that go to calibration."""
    total = inner.splits.get(TRAIN, 0)
    _, members = np.unique([inner.simulation_of(TRAIN, n) for n in range(total)], return_inverse=True)
    groups = int(members.max(initial=-1)) + 1
    wanted = math.ceil(groups * fraction - 1e-9)
    if groups >= LEAST_TO_SET_ASIDE:
        wanted = max(wanted, LEAST_CALIBRATION)
    wanted = max(0, min(wanted, groups - 1))
    chosen = np.isin(members, ((np.arange(wanted) + 0.5) * groups / max(wanted, 1)).astype(np.int64))
    return {TRAIN: np.flatnonzero(~chosen), CALIBRATION: np.flatnonzero(chosen)}


def open_calibration(reader: Reader) -> Reader:
    """The same reader, which may read the split `calibration`, for `ups calibrate` alone."""
    opened = copy.copy(reader)
    if isinstance(opened, SetAside):
        opened._opened = True
    elif isinstance(opened, HeldOutElsewhere):
        opened = HeldOutElsewhere(opened.own, open_calibration(opened.other), opened.task, opened.coordinates)
    return opened


def level_words(count: int) -> str:
    """What can be stated with so many calibration trajectories, for people: n of them resolve 1/(n+1)."""
    if not count:
        return "none set aside for error bars: n trajectories allow levels up to n/(n+1) (calibration_fraction)"
    return f"{count} for calibration: error bars up to a level of {count / (count + 1):.1%}"
