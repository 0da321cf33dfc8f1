"""Means of losses between two log rows: summed on the device, reduced over ranks only when a row is written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor


class Meters:
    """Sample-weighted sums by name: `loss` over all tasks, and the metrics as the stage names them."""

    def __init__(self, device: torch.device, distributed: bool) -> None:
        self._device = device
        self._distributed = distributed
        self._sums: dict[str, Tensor] = {}
        self._samples: dict[str, int] = {}

    @torch.no_grad()
    def add(self, total: Tensor, metrics: Mapping[str, Tensor], num_samples: int) -> None:
        """Count one micro-batch: means over `num_samples` samples, left on the device."""
        for name, value in {"loss": total, **metrics}.items():
            weighted = value.detach().double() * num_samples
            if name in self._sums:
                self._sums[name] += weighted
            else:
                self._sums[name] = weighted
            self._samples[name] = self._samples.get(name, 0) + num_samples

    def reduce(self) -> dict[str, float]:
        """Means over all samples of all ranks since the last call. Collective: all ranks, once.

        Every rank has counted the same names, because a micro-batch holds the same task on all ranks.
        """
        names = sorted(self._sums)
        if not names:
            return {}
        counts = torch.tensor([float(self._samples[n]) for n in names], dtype=torch.float64, device=self._device)
        packed = torch.stack([torch.stack([self._sums[n].to(self._device) for n in names]), counts])
        if self._distributed:
            dist.all_reduce(packed)
        means = (packed[0] / packed[1]).tolist()
        self._sums.clear()
        self._samples.clear()
        return dict(zip(names, means, strict=True))
