"""What the sampler and the keyed draws promise, looked at from outside: order by pass, draws by window.

Used by the check `samples`. No processes, no files.
"""

from __future__ import annotations

import numpy as np

from ups.data.sampler import Sampler
from ups.spec.task import TaskSpec
from ups.training import augment

# A draw is read as one of so many numbers: about ten of its bits.
POINTS = 1009
_MAX_STEPS = 20_000


def windows_at(sampler: Sampler, task: int, size: int, place: int, count: int) -> list[int]:
    """Window numbers at places place..place+count-1 of a task's stream, found through blocks as a rank gets them.

    Shorter than asked if the task is so rare that they are not found within many steps.
    """
    low, high = 0, 1
    while sampler.num_passes(high)[task] * size <= place:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sampler.num_passes(middle)[task] * size <= place else (low, middle)
    found: dict[int, int] = {}
    first = max(0, low - 1)  # counts of passes are rounded
    for step in range(first, first + _MAX_STEPS):
        for slot in range(sampler.blocks_per_step):
            owner, start = sampler.locate(step, slot)
            if owner == task:
                numbers = sampler.block(step, slot).numbers
                inside = range(max(place, start), min(place + count, start + len(numbers)))
                found |= {p: int(numbers[p - start]) for p in inside}
        if len(found) == count:
            break
    return [found[p] for p in sorted(found)]


def same_in_every_pass(sampler: Sampler, task: int, size: int, passes: int = 3, count: int = 64) -> bool:
    """Whether the first windows of several passes come in the same order; never for so few that chance could do it."""
    count = min(count, size)
    if count < 5:
        return False
    orders = [windows_at(sampler, task, size, number * size, count) for number in range(passes)]
    return all(order == orders[0] for order in orders)


def draws(task: TaskSpec, numbers: np.ndarray[tuple[int], np.dtype[np.int64]], step: int, seed: int) -> list[int]:
    """The first draw of the augmentation for each window (B,), as training makes it, in about ten bits."""
    values = augment.draws_of(task, numbers, step, seed)
    return [int(v) for v in np.floor(values[:, 0] * POINTS)]
