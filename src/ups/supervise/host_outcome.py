"""How an attempt ended on each host, and what that makes of the whole attempt. Pure arithmetic, and its JSON.

Each host finds its own first cause. The first cause of the run is the first of these on the head's clock; a host that
only lost its peers reports a consequence, whatever its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ups.record.causes import causes_first
from ups.record.untrusted_files import is_whole, printable
from ups.supervise.attempt import Outcome
from ups.supervise.fault import Fault

_STATES = ("finished", "left", "failed", "ended")
_MAX_CONSEQUENCES = 16
# Of each text of a fault: a frame of the link is bounded, and a message or a hint may be of any length.
_MAX_TEXT = 4000
_MAX_RANK_DIGITS = 9


@dataclass(frozen=True, slots=True)
class HostOutcome:
    """What one host says about an attempt. `time_ns`: of its first cause, on the head's clock."""

    state: str
    fault: Fault | None = None
    cascade: bool = False
    time_ns: int = 0
    last_step: int = 0
    behind: int | None = None
    orphans: int = 0
    exits: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, outcome: Outcome, offset_ns: int = 0) -> HostOutcome:
        """The outcome of an attempt; `offset_ns` is the head's clock minus ours."""
        first = outcome.first
        return cls(
            outcome.state,
            outcome.fault,
            first is not None and first.cascade,
            first.time_ns + offset_ns if first is not None else 0,
            outcome.last_step,
            outcome.behind,
            outcome.orphans,
            {str(rank): code for rank, code in outcome.exits.items()},
        )

    def to_json(self) -> dict[str, Any]:
        fault = self.fault
        if fault is not None:
            fault = replace(fault, consequences=[_cut(one) for one in fault.consequences[:_MAX_CONSEQUENCES]])
        return {**asdict(replace(self, fault=None)), "fault": None if fault is None else _cut(fault.document())}

    @classmethod
    def from_json(cls, document: object) -> HostOutcome | None:
        """What `to_json` gave; None for anything else."""
        if not isinstance(document, dict) or document.get("state") not in _STATES:
            return None
        fault, exits, behind = document.get("fault"), document.get("exits"), document.get("behind")
        if (
            (fault is not None and not (Fault.is_document(fault) and _is_flat(fault.get("consequences", []))))
            or not all(is_whole(document.get(key)) for key in ("time_ns", "last_step", "orphans"))
            or not isinstance(exits, dict)
            or not all(_is_rank(key) and is_whole(value) for key, value in exits.items())
            or not (behind is None or is_whole(behind))
        ):
            return None
        return cls(
            document["state"],
            None if fault is None else Fault.from_document(_shown(fault)),
            document.get("cascade") is True,
            document["time_ns"],
            document["last_step"],
            behind,
            document["orphans"],
            exits,
        )


def _cut(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value[:_MAX_TEXT] if isinstance(value, str) else value for key, value in document.items()}


def _shown(fault: dict[str, Any]) -> dict[str, Any]:
    """With control characters escaped: a line break in a cause would print a second line, which may look like ours."""
    kept = {"message": "\n\t"}
    return {key: printable(v, kept.get(key, "")) if isinstance(v, str) else v for key, v in fault.items()}


def _is_flat(consequences: list[Any]) -> bool:
    """Whether each is an object of plain values: what a host says goes into run.json, which has a limit of depth."""
    plain = (str, int, float, type(None))
    return all(isinstance(one, dict) and all(isinstance(v, plain) for v in one.values()) for one in consequences)


def _is_rank(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) <= _MAX_RANK_DIGITS


def joined(outcomes: dict[int, HostOutcome], first_ranks: Sequence[int], training_wall: float | None) -> Outcome:
    """The outcome of the whole attempt. `outcomes`: by host; `first_ranks`: the first rank of each host."""
    last_step = max(outcome.last_step for outcome in outcomes.values())
    behind = next((outcome.behind for outcome in outcomes.values() if outcome.behind is not None), None)
    late = next((first_ranks[host] for host, one in sorted(outcomes.items()) if one.last_step < last_step), None)
    exits = {int(rank): code for one in outcomes.values() for rank, code in one.exits.items()}
    orphans = sum(one.orphans for one in outcomes.values())
    failed = causes_first(one for one in outcomes.values() if one.fault is not None)
    states = {one.state for one in outcomes.values()}
    if failed:
        state, fault = "failed", _with_consequences(failed)
    else:
        state, fault = ("finished" if states == {"finished"} else "left"), None
    return Outcome(state, fault, last_step, exits, orphans, late if behind is None else behind, training_wall)


def _with_consequences(failed: Sequence[HostOutcome]) -> Fault:
    """The first cause, with what other hosts saw as its consequences."""
    first = failed[0].fault
    assert first is not None
    others = [_as_consequence(one) for one in failed[1:]]
    return replace(first, consequences=[*first.consequences, *others])


def _as_consequence(one: HostOutcome) -> dict[str, Any]:
    assert one.fault is not None
    keys = ("rank", "host", "cause", "at", "step", "phase")
    known = {key: getattr(one.fault, key) for key in keys}
    return {**known, "time_monotonic_ns": one.time_ns, "message": one.fault.message[:500]}
