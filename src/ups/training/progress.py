"""How far a run is: what a checkpoint must know in addition to tensors, and the time budget that sets a stage's length.

Here are also the requests from outside, as flags that the next agreement carries: stop (SIGTERM, SIGINT, time is up),
save (SIGUSR2). A handler only sets a number: saving inside a handler would run on one rank, in the middle of anything.
Randomness is keyed and the loader's position is the step, so a few numbers are the whole state.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from ups.config.stage import StageLength
from ups.errors import CheckpointError, ForeignCheckpointError
from ups.record.processes import read_process

# Parts of a time budget after which the number of steps is estimated again: the rate of a machine drifts. At the last
# one the stage ends.
MARKS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)
# Fewer steps than these show no rate.
_FEWEST_STEPS = 3
# Fields that checkpoints of earlier versions lack: their default is what held in those versions.
_ADDED = frozenset({"mean_norm", "mark_step", "mark_done", "mark_ppm", "earlier_seconds", "idle_seconds"})


@dataclass(slots=True)
class Progress:
    """Position in a run; equal on all ranks at the end of every step.

    stage_index: stage in work. stage_step: steps of it that are done, skipped ones included; also the loader's step.
    step: steps done over all stages; names the checkpoint. total_steps: length of this stage, 0 until a time budget
    has given one. updates: optimizer updates made in this stage. skipped: non-finite steps of the run, skipped_in_row
    the present series of them. budget_used_seconds: of a stage with a time budget. earlier_seconds:
    used of the time budgets of earlier stages. idle_seconds: of all budgets of wall time, those in which
    rank 0 did not compute. mean_norm: moving average of the gradient norm, where clipping is relative to it.
    mark_step, mark_done, mark_ppm: where a time budget last set the length: steps done, part of the stage done (what
    the learning rate follows), and part of the budget used before the last of those steps, in millionths.
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
    mark_step: int = 0
    mark_done: float = 0.0
    mark_ppm: int = 0
    earlier_seconds: float = 0.0
    idle_seconds: float = 0.0

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
        return Progress(
            stage_index=self.stage_index + 1,
            step=self.step,
            skipped=self.skipped,
            earlier_seconds=self.earlier_seconds + self.budget_used_seconds,
            idle_seconds=self.idle_seconds,
        )

    def lengthened(self, length: StageLength) -> Progress:
        """Where a finished stage stands that is given this length: in the middle of it, if that is longer, else as is.

        The learning rate follows the schedule of the longer stage from here on.
        """
        if not self.stage_finished:
            # A checkpoint from before the stage was lengthened, where a later one is damaged.
            return replace(self, total_steps=length.steps) if length.steps and self.total_steps else self
        if length.steps is not None:
            longer = length.steps > self.stage_step
            return replace(self, stage_finished=False, total_steps=length.steps) if longer else self
        budget = length.budget_seconds or 0.0
        # A stage may end a little before its time is used: that is no request for more.
        if self.budget_used_seconds >= 0.98 * budget:
            return self
        used = self.budget_used_seconds / budget
        return replace(
            self,
            stage_finished=False,
            total_steps=0,
            mark_step=self.stage_step,
            mark_done=used,
            mark_ppm=int(1e6 * used),
        )

    def count(self, finite: bool) -> None:
        """What became of one step."""
        self.updates += finite
        self.skipped += not finite
        self.skipped_in_row = 0 if finite else self.skipped_in_row + 1

    @property
    def done(self) -> float:
        """Part of the stage that is done after the step in work."""
        return self._done_after(self.stage_step + 1)

    def _done_after(self, steps: int) -> float:
        """From where the length was last set straight to 1; before that, the part of the budget that was used."""
        if not self.total_steps:
            return self.mark_done
        if steps >= self.total_steps:
            return 1.0
        left = self.total_steps - self.mark_step
        return self.mark_done + (1.0 - self.mark_done) * ((steps - self.mark_step) / left)

    def set_length(self, used_ppm: int, total_steps: int) -> None:
        """Take over what was agreed on about a time budget in the step that was just counted; 0: no new length.

        A new length changes how fast the rest goes by, and never the part that is done: the learning rate has no jumps.
        """
        if not self.total_steps:
            self.mark_done = used_ppm / 1e6
        if total_steps:
            self.mark_done = self._done_after(self.stage_step)
            self.mark_step, self.mark_ppm, self.total_steps = self.stage_step, used_ppm, total_steps


class Budget:
    """The clock of a stage: turns a time budget into a number of steps, again and again until it is used.

    Only rank 0's clock counts; its findings travel with the agreement of each step.
    """

    def __init__(self, length: StageLength, used_seconds: float = 0.0, idle_seconds: float = 0.0) -> None:
        self._budget = length.budget_seconds
        self._clock = cpu_seconds if length.budget_clock == "cpu" else time.monotonic
        self._start = self._clock() - used_seconds
        self._idle_before, self._idle_from = idle_seconds, time.monotonic() - time.process_time()
        self._first: tuple[int, float] | None = None

    @property
    def used_seconds(self) -> float:
        """Of the budget, by its own clock."""
        return self._clock() - self._start

    @property
    def idle_seconds(self) -> float:
        """Of a budget of wall time: without the CPU time of this process, which waited for a core or for data."""
        counted = self._budget is not None and self._clock is not cpu_seconds
        idle = time.monotonic() - time.process_time() - self._idle_from
        return self._idle_before + (max(0.0, idle) if counted else 0.0)

    def propose(self, progress: Progress) -> tuple[int, int]:
        """(part of the budget used in millionths, new number of steps of the stage or 0) between two steps."""
        step = progress.stage_step
        if self._budget is None:
            return 0, 0
        used = self.used_seconds
        ppm = min(int(1e6 * used / self._budget), 10**6)
        if step == 0:
            return ppm, 0
        if self._first is None:
            # The first step of a process warms caches up (and compiles): it does not show the rate.
            self._first = (step, used)
        if ppm >= 10**6:
            return ppm, step + 1  # the step in work when this is agreed on always counts
        last = progress.mark_ppm / 1e6
        if not any(last < mark <= used / self._budget for mark in MARKS):
            return ppm, 0
        # The rate since the last estimate, or in this process if that is younger.
        from_step, from_used = max(self._first, (progress.mark_step - 1, last * self._budget))
        if step - from_step < _FEWEST_STEPS:
            return ppm, 0
        seconds_per_step = (used - from_used) / (step - from_step)
        return ppm, max(step + 1, step + int((self._budget - used) / max(seconds_per_step, 1e-9)))


def cpu_seconds() -> float:
    """CPU time of this process and of its living children (loader workers)."""
    children = 0.0
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            pids = listing.read_text().split()
        except OSError:
            continue
        children += sum(child.cpu_seconds for pid in pids if (child := read_process(int(pid))) is not None)
    return time.process_time() + children


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAVE_SIGNAL = signal.SIGUSR2


class StopRequests:
    """Installs the handlers while it is entered (main thread only)."""

    def __init__(self, max_seconds: float | None = None) -> None:
        self._stop = 0
        self._save = False
        self._deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self._before: dict[signal.Signals, Any] = {}

    @property
    def stop(self) -> int:
        """The signal to leave with: the one that came, SIGTERM when the time is up, 0 while nobody asked."""
        if not self._stop and self._deadline is not None and time.monotonic() >= self._deadline:
            return int(signal.SIGTERM)
        return self._stop

    def ask_to_stop(self, number: int, frame: FrameType | None = None) -> None:
        """Request to stop; a second, larger signal wins."""
        self._stop = max(self._stop, number)

    def ask_to_save(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Request a checkpoint soon."""
        self._save = True

    def take_save(self) -> bool:
        """Whether a checkpoint is wanted; the request is then passed on and forgotten here."""
        wanted, self._save = self._save, False
        return wanted

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._before[number] = signal.signal(number, self.ask_to_stop)
            self._before[SAVE_SIGNAL] = signal.signal(SAVE_SIGNAL, self.ask_to_save)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # Once the ranks have agreed to leave, the launcher's second SIGTERM must not cut the teardown short.
            signal.signal(number, signal.SIG_IGN if self._stop else handler)
