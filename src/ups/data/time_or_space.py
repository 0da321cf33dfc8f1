"""Which of several smooth dimensions is time: the one that leaves space with ends that look like those of a domain.

Along space a field is periodic, fixed or flat at the ends, and its mean over space often does not change; along time
neither is usual. Where the values do not decide, time stands before space, as in most files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ups.config.description import CHANNEL, COMPONENT, TRAJECTORY
from ups.data.guess_physics import Sample, guess_boundary, guess_conserved
from ups.formats.container import Container, Variable

MAX_TRAJECTORIES = 6
MAX_FRAMES = 12
MAX_VALUES = 1 << 23


def find_time(
    container: Container, variable: Variable, role: Sequence[str], open_dims: Sequence[int]
) -> tuple[int, str]:
    """The dimension among those that are still open, and what shows it; no words where only its place speaks for it."""
    first = open_dims[0]
    if len(open_dims) < 2:
        return first, ""
    scores = {i: _score(container, variable, role, i) for i in open_dims}
    best = max(open_dims, key=lambda i: scores[i])  # the first of equal ones
    if scores[best] <= scores[first]:
        return first, ""
    return best, "the others have ends like those of space"


def _score(container: Container, variable: Variable, role: Sequence[str], time: int) -> tuple[int, int]:
    """(axes at whose ends something is seen, whether a mean stays) if this dimension were time."""
    fixed = [i for i, name in enumerate(role) if name == TRAJECTORY]
    fields = [i for i, name in enumerate(role) if name in (CHANNEL, COMPONENT)]
    space = [i for i in range(len(role)) if i not in (time, *fixed, *fields)]
    wanted = {**dict.fromkeys(fixed, MAX_TRAJECTORIES), time: MAX_FRAMES}
    region = tuple(slice(0, n, -(-n // wanted[i]) if i in wanted else 1) for i, n in enumerate(variable.shape))
    shape = [len(range(n)[part]) for n, part in zip(variable.shape, region, strict=True)]
    if not space or int(np.prod(shape, dtype=np.int64)) > MAX_VALUES:
        return 0, 0
    values = container.decoded(variable.name, region, np.float64)
    values = values.transpose(*fixed, time, *fields, *space)
    rows = shape[fixed[0]] if fixed else 1
    sample = Sample(values.reshape(rows, shape[time], -1, *(shape[i] for i in space)))
    guesses = [guess_boundary(sample, axis) for axis in range(len(space))]
    seen = sum(guess.boundary != "unknown" and (guess.repeated_end or not guess.unsure) for guess in guesses)
    return seen, int(bool(guess_conserved(sample)))
