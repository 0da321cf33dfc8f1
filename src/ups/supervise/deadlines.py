"""How long a phase may take: learnt from the run, declared by the rank, or a floor. Slow is not dead.

Two levels. After `name` seconds without progress the slowest rank is named and every rank's stack is taken; nothing is
killed. After `kill` seconds the attempt ends. A phase that declares its own deadline (a save, an evaluation, a
compilation) is left alone until then; a phase that was never seen in this run has only its generous floor.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ups.record.blackbox import Phase, Record

_MEMORY = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds after which a rank is named, and after which the attempt is ended."""

    name: float
    kill: float
    declared: bool


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The rules. Times in seconds; factors multiply the 99th percentile of what the phase took so far."""

    # Who stands still is to be named within ten seconds: one of them goes to looking, and to taking stacks.
    name_floor_seconds: float = 9.0
    name_factor: float = 5.0
    kill_floor_seconds: float = 60.0
    kill_factor: float = 20.0
    # A phase of the loop that was not seen yet: the first step pays for caches, allocators and cold files.
    unseen_seconds: float = 600.0
    init_seconds: float = 900.0
    save_seconds: float = 1800.0
    evaluate_seconds: float = 3600.0
    teardown_seconds: float = 60.0
    # From the start of the launcher until every rank has opened its black box.
    start_seconds: float = 300.0
    # How long ranks get after SIGTERM to save and leave.
    grace_seconds: float = 60.0

    def own_floor(self, phase: Phase) -> float | None:
        """The deadline of a phase whose length says nothing about the next time; None for the loop's phases."""
        return {
            Phase.INIT: self.init_seconds,
            Phase.SAVE: self.save_seconds,
            Phase.EVALUATE: self.evaluate_seconds,
            Phase.TEARDOWN: self.teardown_seconds,
        }.get(phase)


@dataclass(slots=True)
class PhaseTimes:
    """What each phase took so far in this attempt, over all ranks of this host.

    For each stage of training anew: another stage reads other files and may unroll many steps.
    """

    rules: Deadlines
    _seen: dict[tuple[int, Phase], deque[float]] = field(default_factory=dict)

    def learn(self, phase: Phase, seconds: float, stage: int = 0) -> None:
        """Add one completed stay in a phase."""
        self._seen.setdefault((stage, phase), deque(maxlen=_MEMORY)).append(seconds)

    def p99(self, phase: Phase, stage: int = 0) -> float | None:
        """The 99th percentile in seconds (the longest, while there are few); None if the phase was never completed."""
        seen = self._seen.get((stage, phase))
        if not seen:
            return None
        ordered = sorted(seen)
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]

    def limits(self, record: Record) -> Limits:
        """Limits for the phase that `record` began."""
        rules = self.rules
        if record.deadline_seconds > 0:
            return Limits(record.deadline_seconds, record.deadline_seconds, True)
        floor = rules.own_floor(record.phase)
        if floor is not None:
            return Limits(floor, floor, True)
        p99 = self.p99(record.phase, record.stage)
        if p99 is None:
            return Limits(rules.unseen_seconds, rules.unseen_seconds, False)
        return Limits(
            max(rules.name_floor_seconds, rules.name_factor * p99),
            max(rules.kill_floor_seconds, rules.kill_factor * p99),
            False,
        )
