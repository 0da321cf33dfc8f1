"""How far a run is: what a checkpoint must know in addition to tensors, and the time budget that fixes a stage's
length.

Randomness is keyed and the loader's position is the step, so a few numbers are the whole state.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ups.config.stage import StageLength
from ups.errors import CheckpointError, ForeignCheckpointError

MEASURED_FRACTION = 0.05
# Fields that checkpoints of earlier versions lack: their default is what held in those versions.
_ADDED = frozenset({"mean_norm"})


@dataclass(slots=True)
class Progress:
    """Position in a run; equal on all ranks at the end of every step.

    stage_index: stage in work. stage_step: steps of it that are done, skipped ones included; also the loader's step.
    step: steps done over all stages; names the checkpoint. total_steps: length of this stage, 0 until a time budget
    has fixed it. updates: optimizer updates made in this stage. skipped: non-finite steps of the run, skipped_in_row
    the present series of them. budget_used_seconds: of a stage with a time budget. mean_norm: moving average of the
    gradient norm, where clipping is relative to it.
    """

    stage_index: int = 0
    stage_step: int = 0
    step: int = 0
    total_steps: int = 0
    updates: int = 0
    skipped: int = 0
    skipped_in_row: int = 0
    budget_used_seconds: float = 0.0
    stage_finished: bool = False
    mean_norm: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Progress:
        """Reads what `to_json` wrote, now or in an earlier version. Raises CheckpointError for anything else."""
        kinds = {f.name: type(f.default) for f in fields(cls)}
        if not isinstance(data, dict) or not kinds.keys() - _ADDED <= data.keys() <= kinds.keys():
            raise CheckpointError("the progress in this checkpoint is malformed: not the expected JSON object")
        data = cls().to_json() | data
        for name, kind in kinds.items():
            if type(data[name]) is not kind or data[name] < 0:
                raise CheckpointError(f"the progress in this checkpoint is malformed: '{name}' is {data[name]!r}")
        return cls(**data)

    def check(self, lengths: Sequence[int | None]) -> None:
        """Raise ForeignCheckpointError if a run with stages of these lengths (None: by time) cannot stand here."""
        problem = ""
        if self.stage_index >= len(lengths):
            problem = f"stage {self.stage_index} of {len(lengths)}"
        else:
            before, length = lengths[: self.stage_index], lengths[self.stage_index] or self.total_steps
            if None not in before and self.step != sum(n or 0 for n in before) + self.stage_step:
                problem = f"step {self.step}, but {self.stage_step} steps into stage {self.stage_index}"
            elif (length and self.stage_step > length) or (self.stage_finished and self.stage_step != length):
                problem = f"{self.stage_step} of {length} steps, finished: {self.stage_finished}"
            elif self.updates > self.stage_step:
                problem = f"{self.updates} updates in {self.stage_step} steps"
        if problem:
            raise ForeignCheckpointError(
                f"the progress in this checkpoint is not that of a run of this recipe: {problem}",
                hint="remove the checkpoint, and the run continues from the one before it",
            )

    def next_stage(self) -> Progress:
        """The start of the stage after this one."""
        return Progress(stage_index=self.stage_index + 1, step=self.step, skipped=self.skipped)

    @property
    def done(self) -> float:
        """Part of the stage that is done after the step in work, 0 where the length is not fixed yet."""
        return (self.stage_step + 1) / self.total_steps if self.total_steps else 0.0


class Budget:
    """The clock of a stage: turns a time budget into a number of steps once 5 % of it are used.

    Only rank 0's clock counts; its findings travel with the agreement of each step.
    """

    def __init__(self, length: StageLength, used_seconds: float = 0.0) -> None:
        self._budget = length.budget_seconds
        self._clock = cpu_seconds if length.budget_clock == "cpu" else time.monotonic
        self._start = self._clock() - used_seconds
        self._first: tuple[int, float] | None = None

    @property
    def used_seconds(self) -> float:
        """Of the budget, by its own clock."""
        return self._clock() - self._start

    def propose(self, stage_step: int, total_steps: int) -> tuple[int, int]:
        """(part of the budget used in millionths, proposed number of steps or 0) when `stage_step` steps are done."""
        if self._budget is None or total_steps:
            return 0, total_steps
        used = self.used_seconds
        ppm = min(int(1e6 * used / self._budget), 10**6)
        if stage_step == 0:
            return ppm, 0
        if self._first is None:
            # The first step of a process warms caches up (and compiles): it does not show the rate.
            self._first = (stage_step, used)
        if used < MEASURED_FRACTION * self._budget:
            return ppm, 0
        first_step, first_used = self._first
        seconds_per_step = (
            (used - first_used) / (stage_step - first_step) if stage_step > first_step else used / stage_step
        )
        left = max(self._budget - used, 0.0)
        # The step in work when this is agreed on always counts.
        return ppm, max(stage_step + 1, stage_step + int(left / max(seconds_per_step, 1e-9)))


def cpu_seconds() -> float:
    """CPU time of this process and of its living children (loader workers)."""
    ticks = os.sysconf("SC_CLK_TCK")
    children = 0.0
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            pids = listing.read_text().split()
        except OSError:
            continue
        for pid in pids:
            try:
                fields_after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children += (int(fields_after_name[11]) + int(fields_after_name[12])) / ticks
    return time.process_time() + children
