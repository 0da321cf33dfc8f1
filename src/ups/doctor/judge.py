"""What the processes of a check program left, as verdicts: own words, a crash, or a deadline; the first cause first.

No torch.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ups.doctor.checks import Check, CheckProgram
from ups.doctor.processes import Processes
from ups.record.causes import cause_of_exit, causes_first, is_cascade_text, signal_name
from ups.record.failure import location_of_dump

# How this process ends what is left.
_ENDINGS = (-signal.SIGKILL, -signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found. `log` is where its output is, kept only if it failed."""

    check: str
    ok: bool
    says: str
    means: str = ""
    advice: str = ""
    rank: int | None = None
    at: str = ""
    seconds: float = 0.0
    exit_code: int = 0
    log: str = ""
    warnings: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    # Of a failed check: a stable name, as of `ups why`.
    cause: str = ""

    def to_json(self) -> dict[str, Any]:
        """One object of `ups doctor --json`."""
        found: dict[str, Any] = {"rung": self.check, "ok": self.ok, "says": self.says, "seconds": self.seconds}
        if not self.ok:
            found |= {"means": self.means, "try": self.advice, "rank": self.rank, "at": self.at, "log": self.log}
            found["cause"] = self.cause
        return found | {"warnings": list(self.warnings), "facts": self.facts}


def judge(program: CheckProgram, left: Processes, seconds: float) -> Iterator[Verdict]:
    """The verdicts of the checks of a program, ending with the first that failed."""
    said = [line for rank, text in left.out.items() for line in _lines(text, rank)]
    passed = {line["rung"]: line for line in said if line.get("ok") is True}
    for check in program.checks:
        line = passed.get(check.name)
        if line is None:
            yield _failure(check, program, left, said, seconds)
            return
        yield Verdict(
            check.name,
            ok=True,
            says=str(line.get("says", "")),
            seconds=float(line.get("seconds", 0.0)),
            warnings=tuple(map(str, line.get("warnings", ()))),
            facts=dict(line.get("facts", {})),
        )
    if left.timed_out or any(exit_["code"] for exit_ in left.exits.values()):
        # Everything was proved, and then a process did not leave as it should.
        yield _failure(program.checks[-1], program, left, said, seconds)


@dataclass(frozen=True, slots=True)
class _Event:
    """Something that went wrong on a rank: a verdict of its own, or its death by a signal."""

    rank: int | None  # None: found by all ranks together
    time_ns: int
    # Only says that another rank is gone: a consequence, whatever its time.
    cascade: bool
    says: str = ""
    means: str = ""
    advice: str = ""
    signal: int = 0
    cause: str = ""


def _events(left: Processes, said: list[dict[str, Any]]) -> list[_Event]:
    """Everything that went wrong, causes before consequences, then by time."""
    events = []
    for line in said:
        if line.get("ok") is False:
            says, means, advice = (str(line.get(key) or "") for key in ("says", "means", "try"))
            lost = bool(line.get("cascade"))
            cause = str(line.get("cause") or "")
            events.append(_Event(line["rank"], int(line["time_ns"]), lost, says, means, advice, cause=cause))
    for rank, ended in left.exits.items():
        code = int(ended["code"])
        if code < 0 and not (code in _ENDINGS and ended.get("ended_by_us")):
            lost = code == -signal.SIGABRT and is_cascade_text(left.err.get(rank, ""))
            events.append(_Event(rank, int(ended["time_monotonic_ns"]), lost, signal=-code))
    return causes_first(events)


def _failure(
    check: Check, program: CheckProgram, left: Processes, said: list[dict[str, Any]], seconds: float
) -> Verdict:
    """The first thing that went wrong; what follows on other ranks is a consequence."""

    facts: dict[str, Any] = {}
    for line in sorted(said, key=lambda line: (bool(line.get("cascade")), int(line["time_ns"]))):
        facts = {**dict(line.get("facts") or {}), **facts} if line.get("ok") is False else facts

    def verdict(
        says: str, means: str = "", advice: str = "", rank: int | None = None, at: str = "", cause: str = ""
    ) -> Verdict:
        return Verdict(
            check.name,
            ok=False,
            says=says,
            means=means or check.means,
            advice=advice or check.advice,
            rank=rank if program.ranks else None,
            at=at,
            seconds=round(seconds, 3),
            exit_code=check.exit_code,
            log=str(left.log),
            facts=facts,
            cause=cause,
        )

    events = _events(left, said)
    if events and not events[0].signal:
        return verdict(events[0].says, events[0].means, events[0].advice, events[0].rank, cause=events[0].cause)
    if events:
        rank = events[0].rank
        place = location_of_dump(left.err.get(rank or 0, ""))
        at = place.short() if place else ""
        who = f"rank {rank}" if program.ranks else "its process"
        return verdict(
            f"{who} was ended by {signal_name(events[0].signal)}" + (f" at {at}" if at else " (no stack)"),
            f"{check.means}; a signal is a crash in native code or a kill, not an error of Python",
            f"{check.advice}; the stack, if there is one, is in the log",
            rank,
            at,
            cause_of_exit(-events[0].signal),
        )
    if left.timed_out:
        places = {rank: location_of_dump(text) for rank, text in left.err.items()}
        shown = ", ".join(f"rank {rank} at {place.short()}" for rank, place in sorted(places.items()) if place)
        says = f"not done after {program.seconds:.0f} s ({shown or 'no stack'})"
        return verdict(says, f"{check.means}; it hangs", cause="stalled")
    codes = {rank: ended["code"] for rank, ended in left.exits.items()}
    tail = (left.not_started or left.err.get(0, "")).strip().splitlines()
    last = tail[-1][:300] if tail else "no output"
    return verdict(f"it left without a verdict (exit codes {codes or 'unknown'}): {last}", cause="exit")


def _lines(text: str, rank: int) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and isinstance(found.get("rung"), str):
                yield {"rank": rank, "time_ns": 0, **found}
