"""Which rank failed first, and why. Consequences are kept as evidence and never become the cause.

On one host all times come from one clock (CLOCK_MONOTONIC), so the first by time is the first. A rank that only reports
that a peer is gone is a consequence whatever its time: its connection broke because another rank had left already.
Ranks on other hosts are not seen from here: each host finds its own first cause, and the head the first of them
(`head.py`). Two other witnesses are here: the named collectives of all ranks, and the kernel's counters of kills for
lack of memory.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ups.record import causes
from ups.record.blackbox import Phase, Record
from ups.record.processes import kernel_number
from ups.supervise.rank_view import RankView


@dataclass(frozen=True, slots=True)
class RankEnd:
    """What one rank's death looks like."""

    rank: int
    time_ns: int
    cause: str
    step: int
    phase: str
    at: str = "-"
    cascade: bool = False
    message: str = ""
    hint: str = ""

    def document(self) -> dict[str, Any]:
        """As evidence in the fault's record."""
        return {
            "rank": self.rank,
            "cause": self.cause,
            "at": self.at,
            "step": self.step,
            "phase": self.phase,
            "time_monotonic_ns": self.time_ns,
            "message": self.message[:500],
        }


def rank_ends(views: Sequence[RankView], *, out_of_memory_kill: bool, ended_ns: int | None) -> list[RankEnd]:
    """Every death that was not our own doing, first by time; `ended_ns` is when the supervisor began to end ranks."""
    ends = [s for view in views if (s := _rank_end(view, out_of_memory_kill, ended_ns)) is not None]
    return sorted(ends, key=lambda rank_end: rank_end.time_ns)


def first_cause(ends: Sequence[RankEnd]) -> RankEnd | None:
    """The first death that is no consequence. Where all are, they lost each other for an unknown reason."""
    if not ends:
        return None
    first = causes.causes_first(ends)[0]
    if not first.cascade:
        return first
    return RankEnd(first.rank, first.time_ns, "connection_lost", first.step, first.phase, first.at, True, first.message)


def position(view: RankView) -> tuple[int, str]:
    """Step and phase of a rank from its black box; init before it opened one."""
    return (0, Phase.INIT.label) if view.last is None else (view.last.step, view.last.phase.label)


def _rank_end(view: RankView, out_of_memory_kill: bool, ended_ns: int | None) -> RankEnd | None:
    failure, ended = view.failure(), view.exit
    step, phase = position(view)
    if failure is not None:
        cause, message = str(failure["cause"]), str(failure["message"])
        if cause == "worker_killed(SIGKILL)" and out_of_memory_kill:
            message += "; the kernel's oom_kill counter moved"
        return RankEnd(
            view.rank,
            int(failure["time_monotonic_ns"]),
            cause,
            int(failure["step"]),
            str(failure["phase"]),
            str(failure["at"]),
            bool(failure["cascade"]),
            message,
            str(failure["hint"]),
        )
    if ended is None or clean(view):
        return None
    time_ns, code = int(ended["time_monotonic_ns"]), int(ended["code"])
    if ended_ns is not None and time_ns > ended_ns and code < 0:
        return None
    cause, at, cascade, message = causes.cause_of_exit(code), "-", False, str(ended.get("message", ""))
    name = causes.base_name(cause)
    if cause == "killed(SIGKILL)" and out_of_memory_kill:
        what = ended.get("not_started") or ended.get("message")
        message = "the kernel's oom_kill counter moved while this rank was killed" + (f": {what}" if what else "")
        return RankEnd(view.rank, time_ns, "out_of_memory", step, phase, message=message)
    if ended.get("not_started") or ended.get("wrapper_failed"):
        text = str(ended.get("not_started") or ended["wrapper_failed"])
        return RankEnd(view.rank, time_ns, "launcher_failed", step, phase, message=text[:500])
    if name == "signal":
        frame = view.crash_location()
        at = frame.short() if frame else "-"
        log = view.log_tail()
        if causes.is_mismatch_text(log):
            cause = "collective_mismatch"
        elif code == -6 and causes.is_cascade_text(log):
            cascade = True  # a communication library gave up on a peer and aborted the process
        message = _last_words(log) or message
    return RankEnd(view.rank, time_ns, cause, step, phase, at, cascade, message)


def clean(view: RankView) -> bool:
    """Whether the rank left as it should: done, or asked to leave and saved. After that mark it has no duty left."""
    if view.exit is None:
        return False
    return view.left or (view.finished and int(view.exit["code"]) == 0)


def _last_words(log: str) -> str:
    """The line of a log that says what native code complained about, '' if there is none."""
    marks = ("terminate called", "what():", "Fatal Python error", "EnforceNotMet", "error:", "Error:")
    lines = [line.strip() for line in log.splitlines() if any(mark in line for mark in marks)]
    return lines[-1][:500] if lines else ""


_MEMORY = 512


@dataclass(frozen=True, slots=True)
class Mismatch:
    """`rank` issued `operation` at `record`, where its peers issued `expected` in their step `expected_step`."""

    rank: int
    record: Record
    operation: str
    expected: str
    expected_step: int


class _Issued(NamedTuple):
    record: Record
    operation: str

    @property
    def key(self) -> tuple[int, str]:
        return (self.record.step, self.operation)


@dataclass(slots=True)
class CollectiveLog:
    """The last named collectives of each rank."""

    _issued: dict[int, dict[int, _Issued]] = field(default_factory=dict)

    def add(self, rank: int, record: Record, operation: str) -> Mismatch | None:
        """Take note of a collective; the mismatch that it reveals, if any."""
        if not operation or not record.collective:
            return None
        own = self._issued.setdefault(rank, {})
        if record.collective in own:
            return None
        own[record.collective] = _Issued(record, operation)
        if len(own) > _MEMORY:
            del own[next(iter(own))]
        return self._compare(record.collective)

    def _compare(self, number: int) -> Mismatch | None:
        issued = {rank: log[number] for rank, log in self._issued.items() if number in log}
        counts = Counter(entry.key for entry in issued.values())
        if len(counts) < 2:
            return None
        (common, most), (_, second) = counts.most_common(2)
        if most > second:
            odd = [rank for rank, entry in issued.items() if entry.key != common]
        else:
            # No majority: the odd one is whose step from the collective before to this one was made least often.
            habit = {rank: self._times_made(rank, number) for rank in issued}
            least = min(habit.values())
            odd = [rank for rank in issued if habit[rank] == least]
            if len(odd) == len(issued):
                odd = [max(issued, key=lambda rank: issued[rank].record.step)]
        rank = min(odd)
        others = [entry for other, entry in issued.items() if other not in odd] or [
            entry for other, entry in issued.items() if other != rank
        ]
        wrong, expected = issued[rank], others[0]
        return Mismatch(rank, wrong.record, wrong.operation, expected.operation, expected.record.step)

    def _times_made(self, rank: int, number: int) -> int:
        """How often any rank went from the same collective to the same one before, in the same or the next step."""

        def move(log: dict[int, _Issued], at: int) -> tuple[str, str, int] | None:
            if at - 1 not in log or at not in log:
                return None
            before, after = log[at - 1], log[at]
            return (before.operation, after.operation, after.record.step - before.record.step)

        made = move(self._issued[rank], number)
        return sum(move(log, at) == made for log in self._issued.values() for at in log if at < number)


PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_SAMPLE_SECONDS = 5.0
# The kernel counts when it chooses; a process with much memory may need seconds to be gone.
_DYING_SECONDS = 30.0


@dataclass(slots=True)
class OomKills:
    """Remembers the counters of the last half minute, so that a kill of last week does not explain one of today."""

    _samples: deque[tuple[float, dict[str, int]]] = field(default_factory=deque)

    def look(self, seconds: float, counters: dict[str, int] | None = None) -> None:
        """Take a sample now and then; `seconds` is the time on a clock that never jumps."""
        if self._samples and seconds - self._samples[-1][0] < _SAMPLE_SECONDS:
            return
        self._samples.append((seconds, oom_kill_counters() if counters is None else counters))
        while len(self._samples) > 1 and seconds - self._samples[1][0] >= _DYING_SECONDS:
            self._samples.popleft()

    def happened(self, counters: dict[str, int] | None = None) -> bool:
        """Whether the kernel has killed for lack of memory lately."""
        return bool(self._samples) and moved(self._samples[0][1], oom_kill_counters() if counters is None else counters)


def oom_kill_counters(proc: Path = PROC, cgroups: Path = CGROUPS) -> dict[str, int]:
    """Kills for lack of memory so far in the control groups of this process, who ever ran out of it.

    Only where there are none those of the whole machine: there the processes of others count, too.
    """
    counters = {str(path): kernel_number(path, "oom_kill") for path in _counter_files(proc, cgroups)}
    if all(count is None for count in counters.values()):
        counters = {"machine": kernel_number(proc / "vmstat", "oom_kill")}
    return {name: count for name, count in counters.items() if count is not None}


def moved(before: dict[str, int], after: dict[str, int]) -> bool:
    """Whether any counter grew."""
    return any(count > before.get(name, count) for name, count in after.items())


def _counter_files(proc: Path, cgroups: Path) -> list[Path]:
    files = []
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            relative = group.lstrip("/")
            if controllers == "":
                roots = [cgroups / relative, cgroups / "unified" / relative]
                files += [root / "memory.events" for root in roots]
            elif "memory" in controllers.split(","):
                files.append(cgroups / "memory" / relative / "memory.oom_control")
    return files
