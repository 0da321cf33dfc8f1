"""How long a phase may take, and which rank stands still. Judges progress, not heartbeats. Slow is not dead.

Times are learned from the run, declared by the rank, or a floor. After `name` seconds without progress the slowest rank
is named and every rank's stack is taken; nothing is killed. After `kill` seconds the attempt ends. Saves and
evaluations are learned like the phases of the loop, with higher floors: their lengths differ more. The deadline that
they declare is the most that they get, and all that counts before the first one is done. Other phases with a deadline
(start, compilation) happen once and teach nothing; they are named after a part of it. A phase that was never seen in
this run has only its generous floor.

Training is synchronous: when one rank stands still, the others soon wait for it in a collective. So a standstill is a
standstill of all: as long as any rank moves, or is inside a phase with a declared deadline, none is ended (unless it is
ahead of the others and can only be waiting, too). The rank to judge is the one that is furthest behind, by what its
phase usually takes; where several are level, the one that computes instead of waiting. A rank whose declared phase
takes far longer than usual is named, and left alone until its time is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ups.record import processes
from ups.record.blackbox import Phase, Record
from ups.supervise.rank_view import RankView, least_advanced

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

        A save continues in the background after its phase, so only its rank knows.
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


# Part of the time that a rank must have computed to count as busy; low, because cores may be shared.
_BUSY = 0.1
# If the supervisor did not look for this long, it was suspended, and probably its ranks too.
_FROZEN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Standstill:
    """The rank that holds up the run. `kill` says whether to end the attempt now; `cause` is then its name."""

    view: RankView
    record: Record
    seconds: float
    usual_seconds: float | None
    kill_after_seconds: float
    cause: str
    kill: bool
    level: tuple[int, ...]


@dataclass(slots=True)
class _Watched:
    number: int = -1
    cpu_at_record: float = 0.0
    cpu_now: float = 0.0
    stopped_since_ns: int = 0


@dataclass(slots=True)
class StandstillWatch:
    """Remembers how each rank looked the last time."""

    times: PhaseTimes
    _watched: dict[int, _Watched] = field(default_factory=dict)
    _looked_ns: int = 0
    _awake_since_ns: int = 0

    def busy_until(self, now_ns: int) -> None:
        """Say that the watcher itself was busy until now, so that this is not taken for a frozen machine."""
        self._looked_ns = now_ns

    def look(self, views: Sequence[RankView], now_ns: int) -> Standstill | None:
        """The rank that stands still, if one does; None is the usual answer.

        After a pause of the whole job (a frozen container, a suspended allocation) time begins again for all.
        """
        if self._looked_ns and now_ns - self._looked_ns > _FROZEN_SECONDS * 1e9:
            self._awake_since_ns = now_ns
        self._looked_ns = now_ns
        living = [view for view in views if view.alive and view.last is not None]
        for view in living:
            self._observe(view, now_ns)
        for view in living:
            stopped = self._stopped(view, now_ns)
            if stopped is not None:
                return stopped
        level = least_advanced(living)
        if not level:
            return None
        issued = min(view.last.collective for view in living if view.last is not None)
        moving = [view for view in living if self._moves(view, issued, now_ns)]
        if moving:
            return self._slow_section(moving, now_ns)
        view = self._busiest(level, now_ns)
        if not self._over(view, now_ns):
            return None
        for candidate in sorted(living, key=lambda v: v is not view):
            if any(p.state == "T" for p in processes.descendants(candidate.pid)):
                return self._standstill(candidate, now_ns, "stopped(SIGSTOP)", True, level)
        assert view.last is not None
        limits = self.times.limits(view.last)
        cause = f"deadline({view.last.phase.label})" if limits.declared and not limits.learned else "stalled"
        return self._standstill(view, now_ns, cause, self._seconds(view, now_ns) > limits.kill, level)

    def _observe(self, view: RankView, now_ns: int) -> None:
        watched = self._watched.setdefault(view.rank, _Watched())
        process = processes.read_process(view.pid)
        if process is None or view.last is None:
            return
        watched.cpu_now = process.cpu_seconds
        if watched.number != view.last.number:
            watched.number, watched.cpu_at_record = view.last.number, process.cpu_seconds
        if process.state != "T":
            watched.stopped_since_ns = 0
        elif not watched.stopped_since_ns:
            watched.stopped_since_ns = now_ns

    def _stopped(self, view: RankView, now_ns: int) -> Standstill | None:
        """A rank that a signal halted will not go on by itself; it is ended as soon as it would be named."""
        since = self._watched[view.rank].stopped_since_ns
        if not since or view.last is None:
            return None
        limits = self.times.limits(view.last)
        patience = self.times.rules.name_floor_seconds if limits.declared else limits.name
        if limits.name == self.times.rules.unseen_seconds:
            patience = self.times.rules.name_floor_seconds
        if (now_ns - since) / 1e9 < patience:
            return None
        return self._standstill(view, now_ns, "stopped(SIGSTOP)", True, [view])

    def _moves(self, view: RankView, issued: int, now_ns: int) -> bool:
        """Whether a rank has written a record lately, or is busy with something whose time is not over.

        A declared time excuses only who may be waited for. A rank that has issued more collectives than another
        (`issued` is the least of all) has done its part in all that the other can wait for: it waits itself, be it in
        an evaluation. What those who wait have learned about their waiting does not count: one long save would excuse
        every later standstill.
        """
        if view.last is None:
            return False
        limits = self.times.limits(view.last)
        excused = limits.declared and view.last.collective <= issued
        patience = limits.kill if excused else self.times.rules.name_floor_seconds
        return self._seconds(view, now_ns) <= patience

    def _slow_section(self, moving: Sequence[RankView], now_ns: int) -> Standstill | None:
        """The rank to name where all who are waited for are in declared phases, and longer than is usual; not to end.

        `moving` holds no rank then that has written a record lately: the limits for naming are never below that floor.
        """
        if not all(self._over(view, now_ns) for view in moving):
            return None
        level = least_advanced(moving)
        view = self._busiest(level, now_ns)
        assert view.last is not None
        return self._standstill(view, now_ns, f"deadline({view.last.phase.label})", False, level)

    def _over(self, view: RankView, now_ns: int) -> bool:
        return view.last is not None and self._seconds(view, now_ns) > self.times.limits(view.last).name

    def _seconds(self, view: RankView, now_ns: int) -> float:
        return 0.0 if view.last is None else (now_ns - max(view.last.time_ns, self._awake_since_ns)) / 1e9

    def _busiest(self, level: Sequence[RankView], now_ns: int) -> RankView:
        """Of level ranks the one that computes while the others wait; the first where that is not clear."""
        used = {v.rank: self._watched[v.rank].cpu_now - self._watched[v.rank].cpu_at_record for v in level}
        first = max(level, key=lambda v: used[v.rank])
        others = [used[v.rank] for v in level if v is not first]
        clearly = used[first.rank] > max([_BUSY * self._seconds(first, now_ns), *(3 * other for other in others)])
        return first if clearly else level[0]

    def _standstill(self, view: RankView, now_ns: int, cause: str, kill: bool, level: Sequence[RankView]) -> Standstill:
        assert view.last is not None
        return Standstill(
            view,
            view.last,
            self._seconds(view, now_ns),
            self.times.usual(view.last),
            self.times.limits(view.last).kill,
            cause,
            kill,
            tuple(v.rank for v in level),
        )
