"""What the sampler and the keyed draws promise, looked at from outside: order by pass, draws by window.

Used by the check `samples`. No processes, no files.
"""

from __future__ import annotations

import numpy as np
import torch

from ups.data.sampler import Sampler
from ups.spec import keyed
from ups.spec.batch import Batch
from ups.spec.task import TaskSpec
from ups.training import stages

# Shifts are read on a grid of so many points: a prime, so that every draw shows about ten of its bits.
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
    """The random shift of each window (B,) as training draws it, or the draw behind it where a task is not shifted."""
    axes = [axis for axis, spec in enumerate(task.axes) if spec.boundary == "periodic"]
    if not axes or "translation" not in task.symmetries:
        values = keyed.keyed_uniform(keyed.key_of(seed, "jitter", task.name, step), numbers, 1)
        return [int(v) for v in np.floor(values[:, 0] * POINTS)]
    space = [POINTS if axis == axes[0] else 1 for axis in range(task.num_spatial_dims)]
    ramp = torch.arange(POINTS, dtype=torch.float32).reshape(space)
    count = len(numbers)
    batch = Batch(
        task=task,
        state=ramp.expand(count, 1, 1, *space).contiguous(),
        static=torch.zeros(count, 0, *space),
        target=torch.zeros(count, 0, *space),
        parameters=torch.zeros(count, len(task.parameters)),
        dt=torch.zeros(count),
        coordinates=tuple(torch.arange(float(n)) for n in space),
        numbers=torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64)),
        stage_step=step,
    )
    shifted = stages.jitter(batch, seed).state.flatten(1)[:, 0]  # what stands at the origin after the roll
    return [int(-value) % POINTS for value in shifted.tolist()]
