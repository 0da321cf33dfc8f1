"""What a network is to a stepper: normalized fields in, normalized prediction out, for one task or a group of tasks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ups.errors import ConfigError
from ups.models.vocabulary import Channels
from ups.spec.statistics import Statistics, safe
from ups.spec.task import TaskSpec


@dataclass(frozen=True, slots=True)
class NetworkInput:
    """Samples of one task as a network gets them.

    S is the grid of the data, or the next larger one that `grid_divisor` of the model divides (`ups.models.grid_fit`).
    fields (B, F, *S) and parameters (B, P) normalized, dt (B,) in the task's unit, coordinates one (n,) tensor per
    axis; channels says what the F channels are, outputs names the C channels that are asked for.
    relative_parameters (B, P): each in units of the largest magnitude of its range, for laws that are linear in it.
    change_gain (C,): normalized change -> scaled change, for a part of a network that works in normalized units.
    spans_sizes: whether frames of the task go through orders of magnitude (`Statistics.spans_sizes`).
    noise (B, K): of each sample as a member of an ensemble, for a network with `noise_size`; None means zeros.
    """

    task: TaskSpec
    fields: Tensor
    channels: Channels
    outputs: Sequence[str]
    parameters: Tensor
    relative_parameters: Tensor
    dt: Tensor
    coordinates: Sequence[Tensor]
    change_gain: Tensor
    spans_sizes: bool = False
    noise: Tensor | None = None


@dataclass(frozen=True, slots=True)
class NamedRows:
    """A dimension of a parameter whose entries belong to names."""

    dim: int
    names: tuple[str, ...]


class Network(nn.Module, ABC):
    """Base of all networks.

    predicts_update: whether the output is an update of normalized fields, which the stepper scales to the size of a
    change, or already the scaled change.
    """

    predicts_update: ClassVar[bool] = False

    @abstractmethod
    def forward(self, given: NetworkInput) -> Tensor:
        """(B, C, *S), one channel per name in `given.outputs`."""

    def forward_group(self, group: Sequence[NetworkInput]) -> list[Tensor]:
        """`forward` of each task of a group; a network that declares `groups_tasks` runs them as one graph.

        The tasks of a group have the same grid.
        """
        return [self(given) for given in group]

    def named_rows(self) -> dict[str, NamedRows]:
        """Parameters with rows that belong to names (of tasks, channels, parameters), by the name of the parameter."""
        return {}

    def fitted(self, source: Network, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of another network in the shapes of this one, as far as they mean the same here.

        By default those of a network of the same class as they are, and none of another.
        """
        return dict(weights) if type(source) is type(self) else {}

    def borrowed_rows(self, task: TaskSpec, like: TaskSpec) -> dict[str, dict[str, str | None]]:
        """How rows of a task that is new to taken weights begin: parameter -> row -> row of a task that they know, or
        None for zeros. By default as they were drawn.
        """
        return {}

    def scales_frames(self, task: TaskSpec, spans_sizes: bool) -> bool:
        """Whether frames of a task are divided by their size. spans_sizes: `Statistics.spans_sizes`."""
        return False

    def kernel_axes(self, dims: int) -> int:
        """How many axes the kernels have from which grids of `dims` dimensions take theirs: more if they share them."""
        return dims

    def change_units(self, changes: Mapping[str, UnitChange], taken: Collection[str]) -> bool:
        """Convert weights of these tasks to the units of this model in the tables that were taken, and say whether that
        was anything. By default not."""
        return False

    def matrices(self) -> list[nn.Parameter]:
        """Parameters whose updates Muon may orthogonalize, each seen as a matrix (first dimension, all others).

        By default the matrices in the shard units, which have more than one row and column: tables indexed by a name
        are outside of them, and rows of those that a step does not use must not move. Kernels of a convolution in
        groups are no matrix: channels do not meet in them.
        """
        grouped = {id(m.weight) for m in self.modules() if getattr(m, "groups", 1) != 1 and hasattr(m, "weight")}
        inside = {
            id(p): p for unit in self.shard_units() for p in unit.parameters() if p.ndim and 1 < p.shape[0] < p.numel()
        }
        return [p for p in self.parameters() if id(p) in inside and id(p) not in grouped]

    def noise_sizes(self) -> tuple[nn.Parameter, list[str]] | None:
        """How strongly noise acts on each task: a parameter with a row for each, and their names. None without noise.

        A row is 0 until a stage trains members of its task: noise then does nothing there.
        """
        return None

    def uses_noise(self, task: TaskSpec | None = None) -> bool:
        """Whether noise acts (on a task): a stage that trains members began. Collective if sharded."""
        return False

    def fix_weights(self, fixed: bool = True) -> None:
        """Whether weights stay as they are from now on, so that what follows from them may be kept. By default none is.

        A copy that is trained after all must be told: an optimizer can change weights without a trace.
        """

    @abstractmethod
    def shard_units(self) -> list[nn.Module]:
        """The modules to shard, recompute or compile one by one."""


class NetworkWithLinearPart(Network):
    """A network whose change has a linear part that can be fitted alone; its config declares `has_linear_part`.

    linear_part: the module of its parameters.
    """

    linear_part: nn.Module

    @abstractmethod
    def linear(self, given: NetworkInput) -> Tensor:
        """The linear part of the scaled change (B, C, *S) of a transient task."""

    @abstractmethod
    def linear_rows(self) -> list[tuple[nn.Parameter, list[str]]]:
        """The parameters of the linear part, each with the task that every row of it belongs to."""


class NetworkWithLatents(Network):
    """A network of three modules, for stages that train on latents; its config declares `has_latents`.

    encoder(fields, channels, task) -> latent; operator(latent, task, parameters, dt, coordinates) -> update of the
    latent; decoder(update, outputs, task) -> fields.
    patch_size: if latents (B, *N, Z) are tokens of so many points along each axis that commute with shifts by whole
    patches along periodic axes; 0 if not, and then latents of moved fields cannot be had from those that were kept.
    """

    patch_size: int = 0

    encoder: nn.Module
    operator: nn.Module
    decoder: nn.Module


@dataclass(frozen=True, slots=True)
class ParameterUnits:
    """relative, normalized: what slopes of the two forms of a parameter are multiplied by. offset: what of the slope of
    the normalized one, as it was, goes into the constant."""

    relative: float = 1.0
    normalized: float = 1.0
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class UnitChange:
    """From the units of a task in one model to those of the same task in another.

    step: new dt / old dt. lengths: old extent / new extent of each axis.
    """

    step: float
    lengths: tuple[float, ...]
    parameters: Mapping[str, ParameterUnits]

    @property
    def nothing(self) -> bool:
        """Whether all units are the same, to rounding."""
        others = [self.step, *self.lengths, *(f for p in self.parameters.values() for f in (p.relative, p.normalized))]
        offsets = [p.offset for p in self.parameters.values()]
        return all(math.isclose(f, 1, rel_tol=1e-12) for f in others) and all(abs(o) < 1e-12 for o in offsets)


def unit_change(old: TaskSpec, old_statistics: Statistics, new: TaskSpec, statistics: Statistics) -> UnitChange | None:
    """None if all units are the same, or the tasks have not the same number of axes."""
    if len(old.axes) != len(new.axes) or old.steady != new.steady:
        return None
    change = UnitChange(
        1.0 if new.steady or old.time_unit != new.time_unit else new.dt / old.dt,
        # Numbers in other units than before (km, m) are no other length; only where the units are the same they are.
        tuple(a.extent / b.extent if a.unit == b.unit else 1.0 for a, b in zip(old.axes, new.axes, strict=True)),
        _parameters(_units_of(old, old_statistics), _units_of(new, statistics)),
    )
    return None if change.nothing else change


# Unit of the relative form, scale, mean and deviation of a parameter.
_Units = tuple[float, str, float, float]


def _units_of(task: TaskSpec, statistics: Statistics) -> dict[str, _Units]:
    numbers = zip(task.parameters, statistics.parameter_mean, safe(statistics.parameter_std), strict=True)
    return {
        p.name: (max(abs(p.minimum), abs(p.maximum)) or math.hypot(mean, std), p.scale, mean, std)
        for p, mean, std in numbers
    }


def _parameters(old: Mapping[str, _Units], new: Mapping[str, _Units]) -> dict[str, ParameterUnits]:
    found = {}
    for name in (n for n in new if n in old):  # in the order of the task: sums must not depend on hashes of names
        (was, scale, old_mean, old_std), (now, new_scale, mean, std) = old[name], new[name]
        relative = now / was
        if scale != new_scale:
            # Normalized, a parameter and its logarithm grow alike over the data, and the slope stays. To convert it
            # to first order around the mean was worse on burgers1d, and to begin at 0 worse still.
            found[name] = ParameterUnits(relative)
        else:
            found[name] = ParameterUnits(relative, std / old_std, (mean - old_mean) / old_std)
    return found


def only_task(kind: str, tasks: Sequence[TaskSpec]) -> TaskSpec:
    """The one task of a network that cannot share weights between tasks."""
    if len(tasks) != 1:
        raise ConfigError(
            f"model type '{kind}' learns one task, and the recipe has {len(tasks)}",
            hint="use a recipe per task, or model.type latent_operator, which learns them together",
        )
    return tasks[0]


def num_inputs(task: TaskSpec, context_frames: int) -> int:
    """Channels of `with_parameters`."""
    return context_frames * task.num_channels("state") + task.num_channels("static") + len(task.parameters)


def num_outputs(task: TaskSpec) -> int:
    return task.num_channels(task.predicted)


def with_parameters(fields: Tensor, parameters: Tensor) -> Tensor:
    """fields (B, F, *S), parameters (B, P) normalized -> (B, F + P, *S)."""
    space = fields.shape[2:]
    constant = parameters.reshape(*parameters.shape, *[1] * len(space)).expand(-1, -1, *space)
    return torch.cat([fields, constant.to(fields.dtype)], dim=1)
