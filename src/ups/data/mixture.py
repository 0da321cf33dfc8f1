"""Which task each block of the endless sequence of blocks belongs to. Pure arithmetic, no state.

Shares become whole numbers of blocks in a cycle that repeats forever, so the number of earlier blocks of a task, and
with it the place in that task's stream, is one multiplication away from any position. Reading order inside a task is
the business of `ups.data.sampler`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ups.errors import ConfigError

if TYPE_CHECKING:
    from ups.config.schema import DataConfig

Float64 = npt.NDArray[np.float64]

MAX_TASKS = 1000
# A cycle is as long as it takes to hit the shares exactly, if that is at most _MIN_CYCLE blocks. Otherwise it has
# _BLOCKS_PER_TASK blocks for each task and at least _MIN_CYCLE: every share is then right to 1 / cycle, and a task of
# average share to 1 part in 64. 1000 tasks make a table of 64,000 entries of 6 bytes.
_MIN_CYCLE = 4096
_BLOCKS_PER_TASK = 64


def shares_of(data: DataConfig, sizes: Sequence[int]) -> Float64:
    """Share of each task in the blocks, by `data.mixture`; sums to 1. sizes: windows of each task."""
    if data.mixture == "uniform":
        raw = np.ones(len(sizes))
    elif data.mixture == "weights":
        raw = np.array([task.weight for task in data.tasks], np.float64)
    else:
        exponent = 1.0 if data.mixture == "proportional" else 1.0 / data.temperature
        raw = np.array(sizes, np.float64) ** exponent
    # Rounded, so that two machines whose `pow` differ in the last bit still make the same cycle.
    shares: Float64 = np.round(raw / raw.sum(), 12)
    return shares


class Mixture:
    """A cycle of blocks that gives each task its share, evenly spread.

    At every position the number of blocks of a task differs from position x share by less than one. Every task has at
    least one block in a cycle, however small its share.
    """

    __slots__ = ("_earlier", "_tasks", "cycle", "quotas")

    def __init__(self, shares: Sequence[float] | Float64) -> None:
        wanted = np.asarray(shares, np.float64)
        if not 1 <= wanted.size <= MAX_TASKS:
            raise ConfigError(f"a mixture has 1 to {MAX_TASKS} tasks, not {wanted.size}")
        if not (np.isfinite(wanted).all() and (wanted >= 0).all() and wanted.sum() > 0):
            raise ConfigError("shares of a mixture must be numbers of 0 or more, not all of them 0")
        wanted = wanted / wanted.sum()
        self.quotas: tuple[int, ...] = _quotas(wanted)
        self.cycle: int = sum(self.quotas)
        # (cycle,) each: the task of a place, and how many earlier places of the cycle have the same task.
        self._tasks, self._earlier = _spread(self.quotas)

    @property
    def shares(self) -> Float64:
        """The shares that the cycle really has."""
        return np.array(self.quotas, np.float64) / self.cycle

    def locate(self, block: int) -> tuple[int, int]:
        """(task, number of earlier blocks of that task) of a block of the endless sequence."""
        cycles, place = divmod(block, self.cycle)
        task = int(self._tasks[place])
        return task, cycles * self.quotas[task] + int(self._earlier[place])

    def task_at(self, block: int) -> int:
        """The task of a block."""
        return int(self._tasks[block % self.cycle])


def _quotas(shares: Float64) -> tuple[int, ...]:
    """Blocks of each task in a cycle: exact in the shortest cycle that can be, else by largest remainder."""
    for cycle in range(shares.size, _MIN_CYCLE + 1):
        blocks = shares * cycle
        whole = np.rint(blocks)
        if np.abs(blocks - whole).max() < 1e-9 * cycle and whole.min() >= 1:
            return tuple(int(q) for q in whole)
    cycle = max(_MIN_CYCLE, _BLOCKS_PER_TASK * shares.size)
    blocks = shares * cycle
    quotas = np.maximum(np.floor(blocks), 1).astype(np.int64)
    missing = cycle - int(quotas.sum())
    if missing > 0:
        quotas[np.argsort(quotas - blocks, kind="stable")[:missing]] += 1
    for _ in range(-missing):
        quotas[int(np.argmax(quotas))] -= 1
    return tuple(int(q) for q in quotas)


def _spread(quotas: Sequence[int]) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint32]]:
    """Order inside a cycle, earliest deadline first: task of each place, and its earlier places in the cycle.

    Block j of a task with quota q may stand from place floor(j L / q) and must stand before ceil((j + 1) L / q). These
    intervals always admit an order, earliest deadline first finds it, and no prefix is then off by a whole block.
    Equal quotas give plain round-robin.
    """
    length = sum(quotas)
    tasks, earlier = np.empty(length, np.uint16), np.empty(length, np.uint32)
    ready: list[tuple[int, int, int]] = []  # (deadline, task, j)
    coming = [(0, task, 0) for task in range(len(quotas))]  # (release, task, j)
    for place in range(length):
        while coming and coming[0][0] <= place:
            _, task, j = heapq.heappop(coming)
            heapq.heappush(ready, (-(-(j + 1) * length // quotas[task]), task, j))
            if j + 1 < quotas[task]:
                heapq.heappush(coming, ((j + 1) * length // quotas[task], task, j + 1))
        _, tasks[place], earlier[place] = heapq.heappop(ready)
    return tasks, earlier
