"""Which rank failed first, and why. Consequences are kept as evidence and never become the cause.

On one host all times come from one clock (CLOCK_MONOTONIC), so the first by time is the first. A rank that only reports
that a peer is gone is a consequence whatever its time: its connection broke because somebody else had left already.
Ranks on other hosts are not seen from here: each host finds its own first cause, and the head the first of them
(`host_outcome.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ups.errors import exit_code_of_cause
from ups.record import causes
from ups.record.blackbox import Phase
from ups.supervise.rank_view import RankView


@dataclass(frozen=True, slots=True)
class RankEnd:
    """What one rank's death looks like. `exit_code` is what `ups train` returns for this cause."""

    rank: int
    time_ns: int
    cause: str
    step: int
    phase: str
    at: str = "-"
    cascade: bool = False
    message: str = ""
    hint: str = ""
    exit_code: int = 6

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
    found = [s for view in views if (s := _rank_end(view, out_of_memory_kill, ended_ns)) is not None]
    return sorted(found, key=lambda rank_end: rank_end.time_ns)


def first_cause(found: Sequence[RankEnd]) -> RankEnd | None:
    """The first death that is no consequence. Where all are, they lost each other for a reason nobody saw."""
    if not found:
        return None
    first = causes.causes_first(found)[0]
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
            exit_code_for(cause),
        )
    if ended is None or clean(view):
        return None
    time_ns, code = int(ended["time_monotonic_ns"]), int(ended["code"])
    if ended_ns is not None and time_ns > ended_ns and code < 0:
        return None
    cause, at, cascade, message = causes.cause_of_exit(code), "-", False, str(ended.get("message", ""))
    name = causes.base_name(cause)
    if cause == "killed(SIGKILL)" and out_of_memory_kill:
        return _killed_for_memory(view, ended)
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
    return RankEnd(view.rank, time_ns, cause, step, phase, at, cascade, message, "", exit_code_for(cause))


def _killed_for_memory(view: RankView, ended: dict[str, Any]) -> RankEnd:
    what = ended.get("not_started") or ended.get("message")
    message = "the kernel's oom_kill counter moved while this rank was killed" + (f": {what}" if what else "")
    step, phase = position(view)
    time_ns, code = int(ended["time_monotonic_ns"]), exit_code_for("out_of_memory")
    return RankEnd(view.rank, time_ns, "out_of_memory", step, phase, message=message, exit_code=code)


def clean(view: RankView) -> bool:
    """Whether the rank left as it should: done, or asked to leave and saved. After that mark it has no duty left."""
    if view.exit is None:
        return False
    return view.left or (view.finished and int(view.exit["code"]) == 0)


def exit_code_for(cause: str) -> int:
    """The exit code of a run that ends with this cause, as `ups.errors` has it."""
    return exit_code_of_cause(causes.base_name(cause))


def _last_words(log: str) -> str:
    """The line of a log that says what native code complained about, '' if there is none."""
    marks = ("terminate called", "what():", "Fatal Python error", "EnforceNotMet", "error:", "Error:")
    lines = [line.strip() for line in log.splitlines() if any(mark in line for mark in marks)]
    return lines[-1][:500] if lines else ""
