"""A fault: which rank, where, why, what was lost; its one line; and whether the run is started again.

The words are stable: `ups why --json`, `run.json` and the printed line all come from here. The decision is arithmetic
on what happened so far:

- A fault that would come again (a wrong recipe, a missing package) is not retried.
- At most `max_restarts` since the last new commit; a new commit is progress and starts the count again.
- The same fault (cause, location, step) three times without progress stops the run: it is a bug, not bad luck.
- Out of memory is a cause with a cure: half the micro-batch, the same global batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field, StrictStr, TypeAdapter

from ups.record.causes import base_name
from ups.record.text import printable

# The keys of `ups why --json`, in this order; the rest of a fault is evidence.
KEYS = ("attempt", "rank", "world", "host", "step", "phase", "cause", "at", "checkpoint", "lost_steps", "action", "log")
MAX_REASON = 240
# Of each fault: with them an attempt of run.json has at most 20 kB, so that hundreds of attempts stay readable. What
# all ranks saw is in `failures/`.
MAX_CONSEQUENCES = 16
# Values of JSON documents: a whole number of 64 bits that is not true or false, and a finite number.
Whole = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Fault:
    """The first cause of one failed attempt. `checkpoint` is the step of the last commit, None if there is none."""

    attempt: Whole
    rank: Whole
    world: Whole
    host: StrictStr
    step: Whole
    phase: StrictStr
    cause: StrictStr
    at: StrictStr = "-"
    checkpoint: Whole | None = None
    lost_steps: Whole = 0
    action: StrictStr = ""
    log: StrictStr = ""
    message: StrictStr = ""
    hint: StrictStr = ""
    exit_code: Whole = 6
    time_wall: Number = 0.0
    # From the death, or for a standstill from the last sign of life, to the moment at which the supervisor knew.
    noticed_after_seconds: Number = 0.0
    down_after_seconds: Number = 0.0
    evidence: StrictStr = ""
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
        # JSON keeps quotes and control characters of a message apart from the rest of the line.
        return f"{line} reason={json.dumps(reason)}" if reason else line

    def fingerprint(self) -> tuple[str, str, int]:
        """What makes two faults the same one: cause, location and step."""
        return (self.cause, self.at, self.step)

    def with_action(self, action: str) -> Fault:
        """The same fault with what is done about it."""
        return replace(self, action=action)

    def continued_from(self, commit: int | None) -> Fault:
        """The same fault with the checkpoint from which a restart goes on, and what that loses."""
        return replace(self, checkpoint=commit, lost_steps=max(0, self.step - (commit or 0)))

    def document(self) -> dict[str, Any]:
        """As JSON: the documented keys first."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: object) -> Fault:
        """Read back what `document` gave; keys of a newer version are left out. Raises ValueError."""
        return _FAULTS.validate_python(document)


# Frames of peers and run.json hold faults: every value is checked before it is printed or computed with.
_FAULTS = TypeAdapter(Fault)


REPEATS_TO_STOP = 3
# These do not heal by trying again.
NOT_RETRIED = frozenset(
    {
        "config",
        "plugin",
        "recipe_changed",
        "data_changed",
        "statistics_changed",
        "foreign_checkpoint",
        "disk_full",
        "store_refused",
        "run_directory_lost",
        "missing_extra",
        "environment",
        "gate",
        "bundle",
        "training",
    }
)
MICRO_BATCH_SIZE = "engine.micro_batch_size"
_FORMER_MICRO_BATCH_SIZE = "engine.micro_batch"  # in run.json of version 0.1


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about a fault, in the words of the one line; `overrides` for the next attempt."""

    restart: bool
    action: str
    overrides: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class RestartPolicy:
    """The memory of the run. `micro_batch_size` is what a rank forwards at once now; 0 where it is not known."""

    max_restarts: int = 3
    micro_batch_size: int = 0
    _since_commit: int = 0
    _commit: int | None = None
    _fingerprints: list[tuple[str, str, int]] = field(default_factory=list)

    def decide(self, fault: Fault) -> Decision:
        """Judge one fault; call it once per fault, in order."""
        if fault.checkpoint is not None and (self._commit is None or fault.checkpoint > self._commit):
            self._commit = fault.checkpoint
            self._since_commit = 0
            self._fingerprints.clear()
        self._fingerprints.append(fault.fingerprint())
        name = base_name(fault.cause)
        if name in NOT_RETRIED:
            return Decision(False, f"stop(not_retryable: {name})")
        overrides: dict[str, int] = {}
        if name == "out_of_memory" and self.micro_batch_size:
            if self.micro_batch_size == 1:
                return Decision(False, "stop(smallest_micro_batch)")
            overrides = {MICRO_BATCH_SIZE: self.micro_batch_size // 2}
        elif self._fingerprints.count(fault.fingerprint()) >= REPEATS_TO_STOP:
            return Decision(False, f"stop(same_fault_{REPEATS_TO_STOP}_times)")
        if self._since_commit >= self.max_restarts:
            return Decision(False, "stop(no_restarts_left)" if self.max_restarts else "stop(restarts_off)")
        self._since_commit += 1
        if overrides:
            self.micro_batch_size = overrides[MICRO_BATCH_SIZE]
        cure = "".join(f"({key}={value})" for key, value in overrides.items())
        return Decision(True, f"restart {self._since_commit}/{self.max_restarts}{cure}", overrides)


def stored_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides as a run.json has them, of this or an earlier version, under present names."""
    return {MICRO_BATCH_SIZE if name == _FORMER_MICRO_BATCH_SIZE else name: v for name, v in overrides.items()}
