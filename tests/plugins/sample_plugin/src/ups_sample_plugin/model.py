"""The model `ring`: single-device code from normalized fields to a normalized prediction.

B samples, F input channels, C output channels, X points.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ups.models.network import Network, NetworkInput, num_inputs, num_outputs, only_task, with_parameters
from ups.spec.task import TaskSpec
from ups_sample_plugin.model_config import RingConfig


class RingNetwork(Network):
    """Circular convolutions with a gelu between them."""

    def __init__(self, config: RingConfig, task: TaskSpec, context_frames: int) -> None:
        super().__init__()
        widths = [num_inputs(task, context_frames), *[config.width] * (config.depth - 1)]
        self.hidden = nn.ModuleList(
            nn.Conv1d(width, config.width, 5, padding=2, padding_mode="circular") for width in widths
        )
        self.last = nn.Conv1d(config.width, num_outputs(task), 1)

    def forward(self, given: NetworkInput) -> Tensor:
        """fields (B, F, X), parameters (B, P) -> the scaled change (B, C, X)."""
        x = with_parameters(given.fields, given.parameters)
        for layer in self.hidden:
            x = nn.functional.gelu(layer(x))
        return self.last(x)

    def shard_units(self) -> list[nn.Module]:
        """The modules to shard, recompute or compile one by one."""
        return list(self.hidden)


def build(config: RingConfig, tasks: Sequence[TaskSpec], context_frames: int) -> RingNetwork:
    """What the entry point names. Weights are drawn from torch's generator, which the caller has seeded."""
    return RingNetwork(config, only_task("ring", tasks), context_frames)
