"""What modulates the blocks of the multiscale network: parameters, task, dt, boundaries and amplitude of each sample,
and the noise that makes it a member of an ensemble.

B samples of all tasks of a group, P parameters of a task, D width, M modulations of all blocks, K numbers of noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ups.models.conditioning import MAX_AXES
from ups.models.network import NetworkInput
from ups.models.task_tables import NamedTable, NamedVectors, RowName
from ups.models.unit_change import UnitChange
from ups.models.vocabulary import BOUNDARIES
from ups.spec.task import TaskSpec


class _Tasks(NamedVectors):
    def names_of(self, task: TaskSpec) -> list[RowName]:
        return [(task.name,)]


class _Boundaries(NamedVectors):
    """One row for each axis and kind, or for each end where the kinds of an axis differ; an unknown kind has none: it
    says nothing."""

    def names_of(self, task: TaskSpec) -> list[RowName]:
        names: list[RowName] = []
        for number, axis in enumerate(task.axes):
            if isinstance(axis.boundary, str):
                names += [("", str(number), axis.boundary)] if axis.boundary in BOUNDARIES else []
            else:
                ends = zip(axis.boundary, ("first", "last"), strict=True)
                names += [("", str(number), f"{kind} {end}") for kind, end in ends if kind in BOUNDARIES]
        return names + [("", str(number), "absent") for number in range(len(task.axes), MAX_AXES)]


class _Scalars(NamedVectors):
    """Slopes: of dt and amplitude, and of each parameter twice, as it is and normalized."""

    def names_of(self, task: TaskSpec) -> list[RowName]:
        names = [p.name for p in task.parameters]
        return [("", "log dt"), ("", "log amplitude"), *(("", n, "relative") for n in names), *(("", n) for n in names)]


class _Noise(nn.Module):
    """Noise of each sample -> modulations: weight (M, K), after a factor for each task.

    Both are 0 until a stage trains members: a task that no such stage had stays without.
    """

    def __init__(self, tasks: Sequence[TaskSpec], noise_size: int, num_modulations: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_modulations, noise_size))
        self.sizes = _Tasks(tasks, 1, std=0.0)

    def forward(self, group: Sequence[NetworkInput]) -> Tensor:
        """(B, M); zeros where no noise is given, so that every parameter is in every graph."""
        return F.linear(torch.cat([self._of(given) for given in group]), self.weight)

    def _of(self, given: NetworkInput) -> Tensor:
        samples = (given.dt.shape[0], self.weight.shape[1])
        noise = self.weight.new_zeros(samples) if given.noise is None else given.noise.to(self.weight.dtype)
        return noise * self.sizes.of(given.task)


class MultiscaleCondition(nn.Module):
    """Scalars and names of all samples -> scales and shifts of all blocks."""

    def __init__(self, tasks: Sequence[TaskSpec], width: int, num_modulations: int, noise_size: int = 0) -> None:
        super().__init__()
        self._specs = tuple(tasks)
        self.tasks = _Tasks(tasks, width, std=0.5)
        self.boundaries = _Boundaries(tasks, width, std=0.1)
        self.scalars = _Scalars(tasks, width, std=0.1)
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, num_modulations)
        nn.init.normal_(self.out.weight, std=0.02)
        nn.init.zeros_(self.out.bias)
        self.noise = _Noise(tasks, noise_size, num_modulations) if noise_size else None

    def forward(self, group: Sequence[NetworkInput], log_amplitudes: Sequence[Tensor]) -> Tensor:
        """log_amplitudes (B,) of each task -> (B, M) for the samples of the group, one task after the other."""
        entry = torch.cat([self._entry(g, a) for g, a in zip(group, log_amplitudes, strict=True)])
        modulations: Tensor = self.out(F.silu(self.hidden(F.silu(entry))))
        return modulations if self.noise is None else modulations + self.noise(group)

    def told(self) -> dict[str, NamedTable]:
        """The tables of what it is told about a sample, by name."""
        return {"tasks": self.tasks, "boundaries": self.boundaries, "scalars": self.scalars}

    def borrowed_rows(self, task: TaskSpec, like: TaskSpec) -> dict[str, dict[str, str | None]]:
        """Table -> row of a new task -> that of one that is like it; a new parameter says nothing at first."""
        pairs = [
            (mine, of_axis[number % len(of_axis)])
            for axis in {row[1]: None for row in self.boundaries.names_of(task)}
            if (of_axis := [row for row in self.boundaries.names_of(like) if row[1] == axis])
            for number, mine in enumerate(row for row in self.boundaries.names_of(task) if row[1] == axis)
        ]
        return {
            "tasks": {self.tasks.lasting_name((task.name,)): self.tasks.lasting_name((like.name,))},
            "boundaries": {self.boundaries.lasting_name(a): self.boundaries.lasting_name(b) for a, b in pairs},
            "scalars": {self.scalars.lasting_name(row): None for row in self.scalars.names_of(task)},
        }

    def change_units(self, changes: Mapping[str, UnitChange]) -> None:
        """Slopes over parameters in other units. Tasks share a slope: it is left alone where they ask for different
        ones. Without gradients."""
        for name in sorted({parameter for change in changes.values() for parameter in change.parameters}):
            users = [task.name for task in self._specs if any(p.name == name for p in task.parameters)]
            units = [changes[user].parameters.get(name) if user in changes else None for user in users]
            first = units[0]
            if first is None or any(other != first for other in units):
                continue
            slope, relative = (self.scalars.row(row) for row in (("", name), ("", name, "relative")))
            for user in users:
                self.tasks.row((user,)).add_(first.offset * slope)
            slope.mul_(first.normalized)
            relative.mul_(first.relative)

    def _entry(self, given: NetworkInput, log_amplitude: Tensor) -> Tensor:
        task = given.task
        fixed = self.tasks.of(task).sum(0) + self.boundaries.of(task).sum(0)  # (D,)
        # A task's own step is 0: its unit of time means nothing to other tasks.
        log_dt = torch.zeros_like(given.dt) if task.steady else torch.log(given.dt / task.dt)
        values = [log_dt[:, None], log_amplitude[:, None], given.relative_parameters, given.parameters]
        scalars = torch.cat([v.to(fixed.dtype) for v in values], dim=1)  # (B, 2 + 2 P)
        return torch.addmm(fixed, scalars, self.scalars.of(task))
