"""Decisions that all ranks take together, from flags that travel on the host while the device computes.

A request (stop, save) and what only rank 0 knows (elapsed budget, number of steps) go into one small integer tensor; a
MAX all-reduce over the control group is issued at the start of a step and read at its end, so that no accelerator waits
and every rank reads the same answer at the same step. Errors are never agreed on: a rank that fails leaves alone.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ups.errors import DistributedError

# Ranks on unequal processors may round a sum otherwise; a rank that trains alone differs by far more.
NORM_TOLERANCE = 1e-6
OPERATION = "all_reduce(status, int64[8])"


@dataclass(frozen=True, slots=True)
class Status:
    """What one rank requests or knows at the start of a step, and, after `read`, what all ranks agreed on.

    stop: signal number that asks to leave, 0 for none (the largest wins). save: a checkpoint is wanted after this step.
    elapsed_ppm: part of the time budget used so far, in millionths; total_steps: a new length of the stage, 0 for
    none. Only rank 0 sets these two. gradient_norm: of the step before; reduced, so it must be equal on all ranks.
    """

    stop: int = 0
    save: int = 0
    elapsed_ppm: int = 0
    total_steps: int = 0
    gradient_norm: float = 0.0


class Agreement:
    """One status per step. Collective: all ranks call `issue` and `read` in turn."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._flags = torch.zeros(8, dtype=torch.int64)
        self._work: Any = None
        self._open = False

    def issue(self, step: int, status: Status) -> None:
        """Start the reduction for `step`; returns at once. Collective: all ranks."""
        if self._open:
            raise DistributedError(f"the agreement of step {step} was issued before the last one was read")
        self._open = True
        # What must be equal travels with both signs: after MAX, a difference between any two ranks shows as max > min.
        norm = _order_preserving(status.gradient_norm)
        values = [status.stop, status.save, status.elapsed_ppm, status.total_steps, step, -step, norm, -norm]
        self._flags = torch.tensor(values, dtype=torch.int64)
        if self._group is not None:
            self._work = dist.all_reduce(self._flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def read(self) -> Status:
        """Wait for the reduction and return what all ranks agreed on. Raises DistributedError if ranks lost step."""
        if not self._open:
            raise DistributedError("the agreement was read before it was issued")
        self._open = False
        if self._work is not None:
            self._work.wait()
            self._work = None
        stop, save, elapsed, total, last_step, first_step, largest, smallest = self._flags.tolist()
        if last_step != -first_step:
            raise DistributedError(
                f"ranks are at different steps: {-first_step} to {last_step}",
                hint="a rank skipped or repeated a step; this is a bug: please report it with the logs of all ranks",
            )
        high, low = _from_order(largest), _from_order(-smallest)
        if high - low > NORM_TOLERANCE * high or math.isfinite(high) != math.isfinite(low):
            raise DistributedError(
                f"ranks have different gradients after the reduction of step {last_step - 1}: norms {low} to {high}",
                hint="they train apart: something calls the stage without its strategy, or changes gradients after it",
            )
        return Status(stop, save, elapsed, total, high)


def _order_preserving(value: float) -> int:
    """A norm as an integer of the same order: the bits of a non-negative float; what is not finite is the largest."""
    return int(struct.unpack("<q", struct.pack("<d", value if math.isfinite(value) else math.inf))[0])


def _from_order(number: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", number))[0])


def from_first(value: object, group: dist.ProcessGroup | None) -> Any:
    """What rank 0 passed as `value`, on every rank. Collective: all ranks of `group` (pickled: own ranks only)."""
    if group is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]


def from_all(value: object, group: dist.ProcessGroup | None) -> list[Any]:
    """The values of all ranks, by rank. Collective: all ranks of `group` (pickled: own ranks only)."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
