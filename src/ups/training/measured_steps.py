"""The steps that a stage wants to see before its first one, for our engine and for loops of others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from ups.spec.batch import Batch


def pass_measured(
    stage: nn.Module, steps: Iterable[Iterable[tuple[Batch, ...]]], forward: Callable[[tuple[Batch, ...]], object]
) -> bool:
    """Pass the batches of the steps that a stage wants to measure through it; returns whether it wants some.

    steps: the batches of each step, from the first step on. Collective: all ranks, if `forward` is.
    """
    measured = int(getattr(stage, "measured_steps", 0))
    if measured:
        stage.measure(True)  # type: ignore[operator]
        for _, batches in zip(range(measured), steps, strict=False):
            for batch in batches:
                with torch.no_grad():
                    forward(batch)
    return bool(measured)
