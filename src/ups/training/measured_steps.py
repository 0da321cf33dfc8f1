"""The steps that a stage wants to see before its first one, for our engine and for loops of others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import nn

from ups.spec.batch import Batch

# How often a stage may ask for more: a task that is in none of so many steps has hardly a part in the training.
_MOST_TIMES = 16


def pass_measured(
    stage: nn.Module, steps: Iterable[Iterable[tuple[Batch, ...]]], forward: Callable[[tuple[Batch, ...]], object]
) -> bool:
    """Pass the batches of the steps that a stage wants to measure through it; returns whether it wants some.

    steps: the batches of each step, from the first step on. Collective: all ranks, if `forward` is.
    """
    measured = int(getattr(stage, "measured_steps", 0))
    if not measured:
        return False
    stage.measure(True)  # type: ignore[operator]
    remaining = iter(steps)
    for _ in range(_MOST_TIMES):
        for batches in itertools.islice(remaining, measured):
            for batch in batches:
                with torch.no_grad():
                    forward(batch)
        if stage.measured_enough():  # type: ignore[operator]
            break
    return True
