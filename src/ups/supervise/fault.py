"""A fault: which rank, where, why, what was lost, what is done about it; and its one line.

The words are stable: `ups why --json`, `run.json` and the printed line all come from here.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from ups.record.untrusted_files import is_number, is_whole, printable

# The keys of `ups why --json`, in this order; the rest of a fault is evidence.
KEYS = (
    "attempt",
    "rank",
    "world",
    "host",
    "step",
    "phase",
    "cause",
    "at",
    "checkpoint",
    "lost_steps",
    "action",
    "log",
)


MAX_REASON = 240


@dataclass(frozen=True, slots=True)
class Fault:
    """The first cause of one failed attempt. `checkpoint` is the step of the last commit, None if there is none."""

    attempt: int
    rank: int
    world: int
    host: str
    step: int
    phase: str
    cause: str
    at: str = "-"
    checkpoint: int | None = None
    lost_steps: int = 0
    action: str = ""
    log: str = ""
    message: str = ""
    hint: str = ""
    exit_code: int = 6
    time_wall: float = 0.0
    # From the death, or for a standstill from the last sign of life, to the moment at which the supervisor knew.
    noticed_after_seconds: float = 0.0
    down_after_seconds: float = 0.0
    evidence: str = ""
    consequences: list[dict[str, Any]] = field(default_factory=list)

    def one_line(self) -> str:
        """The line that is printed once per fault."""
        checkpoint = "-" if self.checkpoint is None else str(self.checkpoint)
        parts = {
            "rank": f"{self.rank}/{self.world}",
            "step": str(self.step),
            "phase": self.phase,
            "host": self.host,
            "cause": self.cause,
            "at": self.at,
            "ckpt": checkpoint,
            "lost": str(self.lost_steps),
            "action": self.action,
            "log": self.log,
        }
        # Escaped: what another host, a file or a library said must not look like a line of ours.
        line = "FAILED " + " ".join(f"{key}={printable(value)}" for key, value in parts.items())
        reason = " ".join(self.message.split())
        if len(reason) > MAX_REASON:
            reason = reason[: MAX_REASON - 3] + "..."
        # JSON keeps quotes and control characters of somebody's message apart from the rest of the line.
        return f"{line} reason={json.dumps(reason)}" if reason else line

    def fingerprint(self) -> tuple[str, str, int]:
        """What makes two faults the same one: cause, place and step."""
        return (self.cause, self.at, self.step)

    def with_action(self, action: str) -> Fault:
        """The same fault with what is done about it."""
        return replace(self, action=action)

    def document(self) -> dict[str, Any]:
        """As JSON: the documented keys first."""
        return asdict(self)

    @staticmethod
    def is_document(value: object) -> bool:
        """Whether `value` has the documented keys, each of its kind: it may come from an untrusted file."""
        whole = ("attempt", "rank", "world", "step", "lost_steps")
        numbers = ("time_wall", "noticed_after_seconds", "down_after_seconds")
        texts = ("host", "phase", "cause", "at", "action", "log", "message", "hint", "evidence")
        return (
            isinstance(value, dict)
            and all(key in value for key in KEYS)
            and all(is_whole(value[key]) for key in whole)
            and is_whole(value.get("exit_code", 0))
            and all(isinstance(value.get(key, ""), str) for key in texts)
            and (value["checkpoint"] is None or is_whole(value["checkpoint"]))
            and all(is_number(value.get(key, 0.0)) for key in numbers)
            and isinstance(value.get("consequences", []), list)
        )

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Fault:
        """Read back what `document` gave; unknown keys of a newer version are left out."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in document.items() if key in known})
