"""Is anybody standing still, and who is it? Judges progress, not heartbeats.

Training is synchronous: when one rank stands still, the others soon wait for it in a collective. So a standstill is a
standstill of all: as long as any rank moves, or is inside a phase with a declared deadline, nobody is ended (unless it
is ahead of the others and can only be waiting, too). The rank to judge is the one that is furthest behind, by what its
phase usually takes; where several are level, the one that computes instead of waiting. A rank whose declared phase
takes far longer than usual is named, and left alone until its time is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ups.record import process_tree
from ups.record.blackbox import Record
from ups.supervise.deadlines import PhaseTimes
from ups.supervise.rank_view import RankView, least_advanced

# Part of the time that a rank must have computed to count as busy; low, because cores may be shared.
_BUSY = 0.1
# Who did not look for so long was frozen itself, and its ranks most likely with it.
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
            if any(p.state == "T" for p in process_tree.descendants(candidate.pid)):
                return self._standstill(candidate, now_ns, "stopped(SIGSTOP)", True, level)
        assert view.last is not None
        limits = self.times.limits(view.last)
        cause = f"deadline({view.last.phase.label})" if limits.declared and not limits.learned else "stalled"
        return self._standstill(view, now_ns, cause, self._seconds(view, now_ns) > limits.kill, level)

    def _observe(self, view: RankView, now_ns: int) -> None:
        watched = self._watched.setdefault(view.rank, _Watched())
        process = process_tree.read_process(view.pid)
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
