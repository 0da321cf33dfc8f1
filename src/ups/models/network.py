"""What a network is to a stepper: normalized fields in, normalized prediction out, for one task or a group of tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from ups.errors import ConfigError
from ups.models.vocabulary import Channels
from ups.models.warm_start import WarmStart
from ups.spec.batch import Memo
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
    memo: of what does not follow from the state (`ups.spec.batch.Memo`); it lasts as long as a rollout.
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
    memo: Memo = field(default_factory=Memo)


class Network(WarmStart, ABC):
    """Base of all networks: `forward` and `shard_units` are what one needs; the rest has defaults.

    Weights as the start of another model: `WarmStart`, for networks with tables of names.

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

    def fix_weights(self, fixed: bool = True) -> None:
        """Whether weights stay as they are from now on, so that what follows from them may be kept. By default none is.

        A copy that is trained after all must be told: an optimizer can change weights without a trace.
        """

    def feature_module(self) -> nn.Module | None:
        """The module whose output (B, *grid, D) says what the network makes of a frame; None if there is none."""
        return None

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


def only_task(kind: str, tasks: Sequence[TaskSpec]) -> TaskSpec:
    """The one task of a network that cannot share weights between tasks."""
    if len(tasks) != 1:
        raise ConfigError(
            f"model type '{kind}' learns one task, and the recipe has {len(tasks)}",
            hint="use a recipe per task, or model.type multiscale, which learns them together",
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
