"""What a network is to a stepper: normalized fields in, normalized prediction out, for a task at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn

from ups.models.vocabulary import Channels
from ups.spec.task import TaskSpec


class Network(nn.Module, ABC):
    """Base of all networks.

    predicts_update: whether the output is an update of normalized fields, which the stepper scales to the size of a
    change, or already the scaled change.
    """

    predicts_update: ClassVar[bool] = False

    @abstractmethod
    def forward(
        self,
        fields: Tensor,
        channels: Channels,
        outputs: Sequence[str],
        task: TaskSpec,
        parameters: Tensor,
        dt: Tensor,
        coordinates: Sequence[Tensor],
    ) -> Tensor:
        """fields (B, F, *S), parameters (B, P) normalized, dt (B,) -> (B, C, *S), one channel per name in `outputs`."""

    @abstractmethod
    def shard_units(self) -> list[nn.Module]:
        """The modules to shard, recompute or compile one by one."""


class NetworkWithLatents(Network):
    """A network of three modules, for stages that train on latents; its config declares `has_latents`.

    encoder(fields, channels) -> latent; operator(latent, task, parameters, dt, coordinates) -> update of the latent;
    decoder(update, outputs) -> fields.
    """

    encoder: nn.Module
    operator: nn.Module
    decoder: nn.Module
