"""Means of losses between two log rows: summed on the device, reduced over ranks only when a row is written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


class Meters:
    """Sums and what to divide them by, by name as the stage names them."""

    def __init__(self, device: torch.device, distributed: bool) -> None:
        self._device = device
        self._distributed = distributed
        self._sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, metrics: Mapping[str, Tensor]) -> None:
        """Count one micro-batch: (2,) tensors, left on the device."""
        for name, pair in metrics.items():
            # A new tensor each time: the stage's own must not change under whoever else reads it.
            self._sums[name] = self._sums[name] + pair.double() if name in self._sums else pair.double()

    def reduce(self) -> dict[str, float]:
        """Means over all samples of all ranks since the last call. Collective: all ranks, once.

        Every rank has counted the same names, because a micro-batch holds the same tasks on all ranks.
        """
        names = sorted(self._sums)
        if not names:
            return {}
        packed = torch.stack([self._sums[n].to(self._device) for n in names])
        if self._distributed:
            dist.all_reduce(packed)
        means = (packed[:, 0] / packed[:, 1]).tolist()
        self._sums.clear()
        return dict(zip(names, means, strict=True))
