"""Go on or stop after a fault: the one place that decides. Pure arithmetic on what happened so far.

- A fault that would come again (a wrong recipe, a missing package) is not tried again.
- At most `max_restarts` since the last new commit; a new commit is progress and starts the count again.
- The same fault (cause, place, step) three times without progress stops the run: it is a bug, not bad luck.
- Out of memory is a cause with a cure: half the micro-batch, the same global batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ups.record.causes import base_name
from ups.supervise.fault import Fault

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
    batch_size: int = 0
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
            return Decision(False, f"stop({name}_does_not_heal)")
        overrides: dict[str, int] = {}
        if name == "out_of_memory" and self.micro_batch_size:
            smaller = smaller_micro_batch(self.micro_batch_size, self.batch_size)
            if smaller is None:
                return Decision(False, "stop(smallest_micro_batch)")
            overrides = {MICRO_BATCH_SIZE: smaller}
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


def smaller_micro_batch(current: int, batch_size: int) -> int | None:
    """The largest size up to half of `current` that cuts a block evenly; None below one window."""
    for size in range(current // 2, 0, -1):
        if not batch_size or batch_size % size == 0:
            return size
    return None
