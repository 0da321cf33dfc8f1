"""Averages of losses: `TaskAverages` weighs the losses of tasks against each other, from what each has reached so far;
`Meters` gives the means between two rows of the log.

A sum of plain losses is ruled by the task with the largest one; a sum of logarithms (each loss divided by its own
average) by whichever is nearly solved. Between the two lies (L / P) (P / average)^alpha, where P is the loss of a
prediction of nothing.

The averages come from steps before the present one, reduced over all ranks: they are the same everywhere, whatever the
cut into micro-batches, and a checkpoint holds them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# The largest loss that counts, relative to that of a prediction of nothing.
_MOST = 10.0


class TaskAverages:
    """Moving averages of the loss of each task, float64. Not a module: no strategy must see its tensor."""

    def __init__(self, start: Mapping[str, float], memory: float) -> None:
        """start: task -> the loss of a prediction of nothing."""
        self.tasks = tuple(start)
        self.start = torch.tensor(list(start.values()), dtype=torch.float64)
        self.values = self.start.clone()
        self.memory = memory

    def move_to(self, device: torch.device) -> None:
        """To where the losses are, so that weighing them waits for nothing."""
        self.start, self.values = self.start.to(device), self.values.to(device)

    @torch.no_grad()
    def update(self, sums: Tensor) -> None:
        """sums (tasks, 2): summed loss and number of samples of one step, over all ranks. An absent task stays."""
        means = sums[:, 0] / sums[:, 1].clamp_min(1)
        # One sample that blew up must not silence its task for good: what is no number does not count, and what is
        # far above a prediction of nothing counts as such.
        seen = (sums[:, 1] > 0) & means.isfinite()
        means = torch.minimum(means, _MOST * self.start)
        followed = self.values + (1 - self.memory) * (means - self.values)
        torch.where(seen, followed, self.values, out=self.values)

    def factor(self, task: str, alpha: float) -> Tensor:
        """What the loss of a task is multiplied by, (): P^(alpha - 1) / average^alpha."""
        at = self.tasks.index(task)
        factor: Tensor = self.start[at] ** (alpha - 1.0) / self.values[at].clamp_min(1e-12) ** alpha
        return factor

    def was_seen(self, task: str) -> bool:
        """Whether a step had samples of a task."""
        at = self.tasks.index(task)
        return bool(self.values[at] != self.start[at])

    def fraction(self, task: str) -> float:
        """The average relative to the loss of a prediction of nothing."""
        at = self.tasks.index(task)
        return float(self.values[at] / self.start[at])


def counted(metrics: Mapping[str, Tensor], counts: Tensor) -> dict[str, Tensor]:
    """Metrics of a micro-batch if `counts` () holds, else those of no sample."""
    pairs = torch.where(counts, torch.stack([pair.double() for pair in metrics.values()]), 0.0)
    return dict(zip(metrics, pairs.unbind(), strict=True))


def follow(averages: TaskAverages | None, seen: Sequence[Mapping[str, Tensor]], distributed: bool) -> None:
    """Bring the averages up to date with the metrics of one step's micro-batches. Collective then: all ranks."""
    if averages is None:
        return
    sums = averages.values.new_zeros(len(averages.tasks), 2)
    for at, task in enumerate(averages.tasks):
        for metrics in seen:
            if (pair := metrics.get(f"train/{task}/loss")) is not None:
                sums[at] += pair
    if distributed:
        dist.all_reduce(sums)
    averages.update(sums)


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
        """Means over all samples of all ranks since the last call. Collective: all ranks.

        What no sample was counted for has no mean.
        """
        names = self._all_names()
        if not names:
            return {}
        nothing = torch.zeros(2, dtype=torch.float64)
        packed = torch.stack([self._sums.get(n, nothing).to(self._device) for n in names])
        if self._distributed:
            dist.all_reduce(packed)
        self._sums.clear()
        return {name: total / number for name, (total, number) in zip(names, packed.tolist(), strict=True) if number}

    def _all_names(self) -> list[str]:
        """The names that any rank has counted: where tasks are few, not all ranks see all of them."""
        names = sorted(self._sums)
        if not self._distributed:
            return names
        digest = int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:7])
        extremes = torch.tensor([digest, -digest], device=self._device)
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        if extremes.sum() == 0:
            return names
        everyone: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, names)
        return sorted({name for each in everyone for name in each})
