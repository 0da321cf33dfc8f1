"""How long a phase may take: learned from the run, declared by the rank, or a floor. Slow is not dead.

Two levels. After `name` seconds without progress the slowest rank is named and every rank's stack is taken; nothing is
killed. After `kill` seconds the attempt ends. Saves and evaluations are learned like the phases of the loop, with
higher floors: their lengths differ more. The deadline that they declare is the most that they get, and all that counts
before the first one is done. Other phases with a deadline (start, compilation) happen once and teach nothing; they are
named after a part of it. A phase that was never seen in this run has only its generous floor.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ups.record.blackbox import Phase, Record

_MEMORY = 512
# Phases between steps that come again and again: long, declared, and learned nevertheless.
SECTIONS = (Phase.SAVE, Phase.EVALUATE)


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds after which a rank is named, and after which the attempt is ended.

    `declared`: the others may have to wait for all of `kill` and are excused. `learned`: `kill` is a multiple of what
    the phase took before, not the deadline.
    """

    name: float
    kill: float
    declared: bool
    learned: bool = False


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The rules. Times in seconds; factors multiply the 99th percentile of what the phase took so far."""

    # Who stands still is to be named within ten seconds: one of them goes to looking, and to taking stacks.
    name_floor_seconds: float = 9.0
    name_factor: float = 5.0
    kill_floor_seconds: float = 60.0
    kill_factor: float = 20.0
    # Saves and evaluations. A shared file system that fails over is silent for a minute or two, which is no reason to
    # end a run; nor is a first evaluation that takes its time.
    section_name_floor_seconds: float = 30.0
    section_first_name_seconds: float = 120.0
    section_kill_floor_seconds: float = 600.0
    # Part of its deadline after which any other phase is named, but not before the seconds above.
    deadline_name_part: float = 1 / 3
    # A phase of the loop that was not seen yet: the first step pays for caches, allocators and cold files.
    unseen_seconds: float = 600.0
    init_seconds: float = 900.0
    save_seconds: float = 1800.0
    evaluate_seconds: float = 3600.0
    teardown_seconds: float = 60.0
    # The same after a request to leave: who gives a notice of half a minute does not wait for destructors.
    asked_teardown_seconds: float = 5.0
    # From the start of the launcher until every rank has opened its black box.
    start_seconds: float = 300.0
    # How long ranks get after SIGTERM to save and leave. A save or an evaluation that is known to take longer gets
    # `name_factor` times that, at most `leave_seconds`: whoever asked does not wait forever, and a save that is stuck
    # must not hold up the end. Where nothing is known: half as much again as the grace.
    grace_seconds: float = 60.0
    leave_seconds: float = 600.0
    # Several hosts: until all of them have come, how long one may be silent before it counts as lost, and how long it
    # may then stay away before the run ends without it.
    host_join_seconds: float = 600.0
    host_lost_seconds: float = 20.0
    host_return_seconds: float = 60.0

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

    Separately for each stage of training: another stage reads other files and may unroll many steps.
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

    def usual(self, record: Record) -> float | None:
        """What the phase of `record` takes, in seconds; None before the first time.

        A save goes on in the background after its phase, so only its rank knows.
        """
        return float(record.usual_seconds) or (
            None if record.phase is Phase.SAVE else self.p99(record.phase, record.stage)
        )

    def leave_seconds(self, record: Record) -> float:
        """How long after the request to leave a rank may stay in the phase of `record`."""
        rules = self.rules
        if record.phase not in SECTIONS:
            return rules.grace_seconds
        usual = self.usual(record)
        if usual is None:
            return 1.5 * rules.grace_seconds
        return max(rules.grace_seconds, min(rules.name_factor * usual, rules.leave_seconds))

    def limits(self, record: Record) -> Limits:
        """Limits for the phase that `record` began."""
        rules = self.rules
        deadline = record.deadline_seconds or rules.own_floor(record.phase)
        if deadline is not None:
            return self._within(deadline, record)
        p99 = self.p99(record.phase, record.stage)
        if p99 is None:
            return Limits(rules.unseen_seconds, rules.unseen_seconds, False)
        return Limits(
            max(rules.name_floor_seconds, rules.name_factor * p99),
            max(rules.kill_floor_seconds, rules.kill_factor * p99),
            False,
        )

    def _within(self, deadline: float, record: Record) -> Limits:
        """Limits of a phase that may take `deadline` seconds at most."""
        rules = self.rules
        if record.phase not in SECTIONS:
            name = max(rules.section_first_name_seconds, rules.deadline_name_part * deadline)
            return Limits(min(name, deadline), deadline, True)
        usual = self.usual(record)
        if usual is None:
            return Limits(min(rules.section_first_name_seconds, deadline), deadline, True)
        name = max(rules.section_name_floor_seconds, rules.name_factor * usual)
        kill = max(rules.section_kill_floor_seconds, rules.kill_factor * usual)
        return Limits(min(name, deadline), min(kill, deadline), True, kill < deadline)
