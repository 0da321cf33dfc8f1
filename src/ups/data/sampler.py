"""Which windows form the global batch of a step: a function of (seed, step), whatever the world size.

Each task is an endless stream of window numbers: pass after pass over all its windows, each pass in its own keyed
order (`ups.data.permutation`). The global batch of a step is `blocks_per_step` blocks, each of one task and of that
task's number of windows; `Mixture` says whose turn it is. Ranks and micro-batches only cut a block (`Cut`), so
the position of a run is one integer, the step, and any other world size continues with exactly the next windows.

Shares of tasks become whole numbers of blocks in a cycle that repeats forever, so the number of earlier blocks of a
task, and with it the position in that task's stream, is one multiplication away from any step.

Pure arithmetic: no files, no torch, memory that does not grow with the number of windows, ranks or steps. Reading is
left to `ups.data.loader`.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ups.data.permutation import MAX_SIZE, Permutation
from ups.errors import ConfigError, DataError
from ups.spec.keyed import key_of

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
        # (cycle,) each: the task of a position, and how many earlier positions of the cycle have the same task.
        self._tasks, self._earlier = _spread(self.quotas)

    def locate(self, block: int) -> tuple[int, int]:
        """(task, number of earlier blocks of that task) of a block of the endless sequence."""
        cycles, position = divmod(block, self.cycle)
        task = int(self._tasks[position])
        return task, cycles * self.quotas[task] + int(self._earlier[position])


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
    """Order inside a cycle, earliest deadline first: task of each position, and its earlier positions in the cycle.

    Block j of a task with quota q may be at position floor(j L / q) or later, and is before ceil((j + 1) L / q). These
    intervals always admit an order, earliest deadline first finds it, and no prefix is then off by a whole block.
    Equal quotas give plain round-robin.
    """
    length = sum(quotas)
    tasks, earlier = np.empty(length, np.uint16), np.empty(length, np.uint32)
    ready: list[tuple[int, int, int]] = []  # (deadline, task, j)
    coming = [(0, task, 0) for task in range(len(quotas))]  # (release, task, j)
    for position in range(length):
        while coming and coming[0][0] <= position:
            _, task, j = heapq.heappop(coming)
            heapq.heappush(ready, (-(-(j + 1) * length // quotas[task]), task, j))
            if j + 1 < quotas[task]:
                heapq.heappush(coming, ((j + 1) * length // quotas[task], task, j + 1))
        _, tasks[position], earlier[position] = heapq.heappop(ready)
    return tasks, earlier


Int64 = npt.NDArray[np.int64]


class TaskStream:
    """The endless stream of window numbers of one task: position p is in pass p // size.

    The order depends on the seed and the name of the task, not on its position in the recipe: adding a task leaves the
    order within the others as it was.
    """

    __slots__ = ("_permutation", "size")

    def __init__(self, name: str, size: int, seed: int) -> None:
        self.size = size
        self._permutation = Permutation(size, key_of(seed, "window order", name))

    def numbers(self, start: int, stop: int) -> Int64:
        """Window numbers (stop - start,) at positions start..stop-1 of the stream."""
        first_pass, first = divmod(start, self.size)
        positions = np.arange(first, first + (stop - start), dtype=np.int64)
        if first + (stop - start) <= self.size:
            return self._permutation.forward(positions, first_pass)
        return self._permutation.forward(positions % self.size, first_pass + positions // self.size)

    def next_positions(self, numbers: Int64, after: int) -> Int64:
        """The first position behind `after` at which each of the windows (n,) is seen."""
        current = after // self.size
        here, later = (n * self.size + self._permutation.inverse(numbers, n) for n in (current, current + 1))
        return np.where(here > after, here, later)


@dataclass(frozen=True, slots=True)
class Block:
    """Window numbers (n,) int64 of one task: a block, or the rows of it that were asked for."""

    task: int
    numbers: Int64


class Sampler:
    """(step, slot) -> task and window numbers, for the whole world or for any rows of a block."""

    __slots__ = ("_streams", "batch_sizes", "blocks_per_step", "fingerprint", "mixture")

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        *,
        seed: int,
        batch_sizes: Sequence[int],
        blocks_per_step: int,
        shares: Sequence[float] | npt.NDArray[np.float64] | None = None,
    ) -> None:
        if len(names) != len(sizes) or len(set(names)) != len(names):
            raise ConfigError(f"a sampler needs one size for each of its tasks, and distinct names: {list(names)}")
        if len(batch_sizes) != len(sizes) or min(batch_sizes) < 1 or blocks_per_step < 1:
            raise ConfigError("a sampler needs a block size for each task and blocks_per_step, all 1 or more")
        for name, size in zip(names, sizes, strict=True):
            if not 1 <= size <= MAX_SIZE:
                raise DataError(
                    f"task '{name}' has {size} windows to train on; it needs at least 1",
                    hint="check its train split, or shorten the windows (context_frames, unroll_steps, time_stride)",
                )
        self.batch_sizes = tuple(batch_sizes)
        self.blocks_per_step = blocks_per_step
        self.mixture = Mixture([1.0] * len(sizes) if shares is None else shares)
        self._streams = tuple(TaskStream(n, s, seed) for n, s in zip(names, sizes, strict=True))
        # What decides the order of windows; a run that resumes under another fingerprint sees another order.
        equal = len(set(batch_sizes)) == 1
        block = batch_sizes[0] if equal else self.batch_sizes  # one number where one number says it
        text = repr((seed, tuple(names), tuple(sizes), block, blocks_per_step, self.mixture.quotas))
        self.fingerprint: str = hashlib.sha256(text.encode()).hexdigest()

    def locate(self, step: int, slot: int) -> tuple[int, int]:
        """(task, position of the block's first window in the stream of that task)."""
        task, earlier = self.mixture.locate(step * self.blocks_per_step + slot)
        return task, earlier * self.batch_sizes[task]

    def block(self, step: int, slot: int, start: int = 0, stop: int | None = None) -> Block:
        """Rows start..stop-1 of a block (default all): what one rank or micro-batch takes."""
        task, position = self.locate(step, slot)
        rows = self.batch_sizes[task] if stop is None else stop
        return Block(task, self.windows(task, position + start, position + rows))

    def windows(self, task: int, start: int, stop: int) -> Int64:
        """Window numbers (stop - start,) at positions start..stop-1 of the stream of a task."""
        return self._streams[task].numbers(start, stop)

    def next_positions(self, task: int, numbers: Int64, after: int) -> Int64:
        """The first position behind `after` in the stream of a task at which each of the windows (n,) is seen."""
        return self._streams[task].next_positions(numbers, after)

    def positions_per_step(self, task: int) -> float:
        """How far the stream of a task advances in a step, on average."""
        return self.blocks_per_step * self.batch_sizes[task] * self.mixture.quotas[task] / self.mixture.cycle

    def tasks_of_step(self, step: int) -> tuple[int, ...]:
        """The task of each slot."""
        return tuple(self.locate(step, slot)[0] for slot in range(self.blocks_per_step))


def build_sampler(data: DataConfig, names: Sequence[str], sizes: Sequence[int], *, seed: int) -> Sampler:
    """The sampler of a recipe; names and sizes (windows to train on) of its tasks, in the order of `data.tasks`."""
    return Sampler(
        names,
        sizes,
        seed=seed,
        batch_sizes=data.batch_sizes,
        blocks_per_step=data.blocks_per_step,
        shares=shares_of(data, sizes),
    )


@dataclass(frozen=True, slots=True)
class Cut:
    """Which rows of the blocks of a step one rank takes, and in which parts: its micro-batches.

    Windows go to the rank with the least work so far, the costly ones first. A rank may have no row of a block.
    batch_sizes, costs: of each task; what a window costs, in any unit. micro_batch_size: the most windows in a part.
    together: all ranks go through all parts of all blocks, because each pass exchanges weights (fsdp). Each block is
    then balanced by itself.
    """

    rank: int
    world_size: int
    batch_sizes: tuple[int, ...]
    costs: tuple[int, ...]
    micro_batch_size: int | None = None
    together: bool = False

    def bounds(self, tasks: Sequence[int]) -> Int64:
        """(slots, ranks + 1): the first row of each rank in the blocks of these tasks, and the end of the last."""
        bounds = np.zeros((len(tasks), self.world_size + 1), np.int64)
        loads = np.zeros(self.world_size, np.int64)
        for slot in sorted(range(len(tasks)), key=lambda slot: -self.costs[tasks[slot]]):
            cost = self.costs[tasks[slot]]
            counts = _shared(self.batch_sizes[tasks[slot]], cost, loads)
            bounds[slot, 1:] = counts.cumsum()
            if not self.together:
                loads += cost * counts
        return bounds

    def parts(self, tasks: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For the block of each task the first and one past the last row of each part of this rank.

        A part without rows keeps the rank in step with others: its pass counts for nothing.
        """
        return _parts(self, tasks)


@functools.lru_cache(maxsize=64)
def _parts(cut: Cut, tasks: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
    shares = [cut.batch_sizes[task] // cut.world_size for task in tasks]
    if even := not any(cut.batch_sizes[task] % cut.world_size for task in tasks):  # without work for each rank
        ends = [(cut.rank * share, (cut.rank + 1) * share) for share in shares]
    else:
        bounds = cut.bounds(tasks)
        ends, shares = bounds[:, cut.rank : cut.rank + 2].tolist(), np.diff(bounds).max(1).tolist()
    blocks = []
    for (first, stop), most in zip(ends, shares, strict=True):
        rows, limit = stop - first, min(cut.micro_batch_size or most, most)
        if even:  # equal parts
            number = most // next(size for size in range(limit, 0, -1) if most % size == 0)
        else:
            number = -(-(most if cut.together else rows) // limit)
        blocks.append(tuple((first + rows * n // number, first + rows * (n + 1) // number) for n in range(number)))
    if not any(blocks):  # gradients are reduced in a pass, so each rank needs one
        blocks[min(range(len(tasks)), key=lambda slot: cut.costs[tasks[slot]])] = ((0, 0),)
    return tuple(blocks)


def _shared(size: int, cost: int, loads: Int64) -> Int64:
    """(ranks,): how many of `size` windows each rank takes if each goes to the rank with the least load so far."""

    def begun(level: int) -> Int64:
        """Windows of each rank that are begun at a load of `level` or less."""
        return np.maximum((level - loads) // cost + 1, 0)

    levels = range(int(loads.max()) + cost * (size // len(loads) + 1) + 1)
    level = bisect.bisect_left(levels, size, key=lambda level: int(begun(level).sum()))
    counts = begun(level - 1)
    counts[np.flatnonzero(begun(level) > counts)[: size - int(counts.sum())]] += 1
    return counts
