"""The Fourier neural operator of the neuraloperator project, its own code, behind our interface of a network.

A baseline: whatever it scores here, it was trained by the same engine on the same batches as every other model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ups.config.model import FnoConfig
from ups.errors import MissingExtraError
from ups.models.network import Network, NetworkInput, num_inputs, num_outputs, only_task, with_parameters
from ups.spec.task import TaskSpec


class _ComplexWeight(nn.Module):
    """Complex weights kept as pairs of real numbers (..., 2), in the place of the library's own container.

    A cast of a module to float32 drops imaginary parts silently, and neither fused optimizers nor every backend
    of collectives takes complex numbers: nothing outside this file sees one.
    """

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.view_as_real(values.detach()).clone())

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        return torch.view_as_complex(self.pairs)[part]


class FnoNetwork(Network):
    """FNO for one task. Parameters enter as constant channels, position as the library's own grid embedding."""

    def __init__(self, config: FnoConfig, task: TaskSpec, context_frames: int) -> None:
        super().__init__()
        try:
            from neuralop.models import FNO
        except ImportError as error:
            raise MissingExtraError.of("baselines", "neuraloperator", "model type 'fno'") from error
        self.fno = FNO(
            n_modes=(config.modes,) * task.num_spatial_dims,
            in_channels=num_inputs(task, context_frames),
            out_channels=num_outputs(task),
            hidden_channels=config.width,
            n_layers=config.depth,
        )
        for convolution in self.fno.fno_blocks.convs:
            convolution.weight = _ComplexWeight(convolution.weight.to_tensor())
        # The library puts its constructor's arguments, which are not tensors, among the weights.
        self.register_state_dict_post_hook(_only_tensors)  # type: ignore[no-untyped-call]

    def forward(self, given: NetworkInput) -> Tensor:
        """fields (B, F, *S) -> (B, C, *S)."""
        predicted: Tensor = self.fno(with_parameters(given.fields, given.parameters))
        return predicted

    def shard_units(self) -> list[nn.Module]:
        """The library applies all layers inside one module: it is one unit."""
        return [self.fno.fno_blocks]

    def matrices(self) -> list[nn.Parameter]:
        """Not the spectral weights: each is a stack of one complex matrix per mode, not one matrix."""
        spectral = {id(c.weight.pairs) for c in self.fno.fno_blocks.convs}
        return [p for p in super().matrices() if id(p) not in spectral]


def build(config: FnoConfig, tasks: Sequence[TaskSpec], context_frames: int) -> FnoNetwork:
    """The network for the one task of a recipe."""
    return FnoNetwork(config, only_task("fno", tasks), context_frames)


def _only_tensors(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    state.pop("_metadata", None)
