"""Exponential moving average of the weights, shard by shard: each rank averages what it holds.

Frozen parameters need no average: theirs is the parameter. At the end of a stage the average becomes the weights, which
the next stage, the evaluation and the bundle then use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ups.config.schema import EmaConfig
from ups.distributed.strategies import locals_of


class Ema:
    """Average of named parameters. Not a module: DDP and fully_shard must not see its tensors."""

    def __init__(self, config: EmaConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        self.decay = config.decay
        self.tensors: dict[str, Tensor] = {name: p.detach().clone() for name, p in parameters.items()}
        self._averages = locals_of(self.tensors.values())
        self._parameters = list(parameters.values())

    @torch.no_grad()
    def update(self, num_updates: int) -> None:
        """Move the average toward the weights, after the `num_updates`-th optimizer step (from 1).

        The memory is short at first, so that the initial weights are forgotten quickly.
        """
        decay = min(self.decay, (1 + num_updates) / (10 + num_updates))
        torch._foreach_lerp_(self._averages, locals_of(self._parameters), 1.0 - decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Forget the past: the average is the weights."""
        torch._foreach_copy_(self._averages, locals_of(self._parameters))

    @torch.no_grad()
    def become_weights(self) -> None:
        """Write the average into the weights."""
        torch._foreach_copy_(locals_of(self._parameters), self._averages)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The weights are the average inside, and bitwise what they were after."""
        weights = locals_of(self._parameters)
        with torch.no_grad():
            kept = [w.clone() for w in weights]
            torch._foreach_copy_(weights, self._averages)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(weights, kept)
