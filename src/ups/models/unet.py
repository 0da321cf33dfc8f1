"""A U-Net of ConvNeXt blocks with kernel 7 in 1D, 2D and 3D: the strongest cheap baseline on grids.

Padding follows the boundary of each axis: around for periodic axes, the edge value repeated for all others.
B samples, F input channels, D channels of a level, S space.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ups.config.model import UnetConfig
from ups.models.network import Network, NetworkInput, num_inputs, num_outputs, only_task, with_parameters
from ups.spec.task import TaskSpec

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
KERNEL = 7


def pad(x: Tensor, width: int, periodic: Sequence[bool]) -> Tensor:
    """x (B, D, *S) with `width` more points at both ends of every axis."""
    dims = len(periodic)
    for axis, wraps in enumerate(periodic):
        sizes = [0] * (2 * dims)
        last = dims - 1 - axis  # F.pad counts axes from the last
        sizes[2 * last] = sizes[2 * last + 1] = width
        x = F.pad(x, sizes, mode="circular" if wraps else "replicate")
    return x


def channels_last(x: Tensor) -> Tensor:
    """x with the channels of a point side by side in memory: more than twice the speed of convolutions on a CPU."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats.get(x.ndim, torch.contiguous_format))


class ChannelNorm(nn.Module):
    """Layer norm over the channels of each point: no statistics over samples, so ranks do not matter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        normalized: Tensor = self.norm(x.movedim(1, -1))
        return normalized.movedim(-1, 1)


class ConvNextBlock(nn.Module):
    """Depthwise kernel 7, norm, four times wider and back, added to the input with a learned scale per channel."""

    def __init__(self, width: int, periodic: Sequence[bool]) -> None:
        super().__init__()
        convolution = CONVOLUTIONS[len(periodic)]
        self.periodic = tuple(periodic)
        self.depthwise = convolution(width, width, KERNEL, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(channels_last(pad(x, KERNEL // 2, self.periodic)))
        y = self.norm(y.movedim(1, -1))
        y = self.scale * self.narrow(F.gelu(self.wide(y)))
        result: Tensor = x + y.movedim(-1, 1)
        return result


class UnetNetwork(Network):
    """ConvNeXt U-Net for one task; every level halves the grid and doubles the channels."""

    def __init__(self, config: UnetConfig, task: TaskSpec, context_frames: int) -> None:
        super().__init__()
        dims = task.num_spatial_dims
        convolution = CONVOLUTIONS[dims]
        periodic = [axis.periodic for axis in task.axes]
        widths = [config.width * 2**level for level in range(config.levels)]
        self.levels = config.levels
        self.lift = convolution(num_inputs(task, context_frames), widths[0], 1)
        self.down = nn.ModuleList(_blocks(w, config.blocks, periodic) for w in widths)
        self.shrink = nn.ModuleList(convolution(a, b, 2, stride=2) for a, b in itertools.pairwise(widths))
        self.grow = nn.ModuleList(convolution(b, a, 1) for a, b in itertools.pairwise(widths))
        self.merge = nn.ModuleList(convolution(2 * w, w, 1) for w in widths[:-1])
        self.up = nn.ModuleList(_blocks(w, config.blocks, periodic) for w in widths[:-1])
        self.norm = ChannelNorm(widths[0])
        self.project = convolution(widths[0], num_outputs(task), 1)

    def forward(self, given: NetworkInput) -> Tensor:
        """fields (B, F, *S) -> (B, C, *S), on a grid that can be halved for each level."""
        x = self.lift(channels_last(with_parameters(given.fields, given.parameters)))
        passed = []
        for level, blocks in enumerate(self.down):
            x = blocks(x)
            if level < self.levels - 1:
                passed.append(x)
                x = self.shrink[level](x)
        for level in reversed(range(self.levels - 1)):
            x = F.interpolate(self.grow[level](x), scale_factor=2, mode="nearest")
            x = self.up[level](self.merge[level](torch.cat([x, passed[level]], dim=1)))
        predicted: Tensor = self.project(self.norm(x))
        return predicted

    def shard_units(self) -> list[nn.Module]:
        """The modules to shard, recompute or compile one by one."""
        return [*self.down, *self.up]

    def matrices(self) -> list[nn.Parameter]:
        """Those of the blocks, and the convolutions between levels."""
        between = [m.weight for m in self.modules() if isinstance(m, tuple(CONVOLUTIONS.values())) and m.groups == 1]
        chosen = {id(p) for p in [*super().matrices(), *between]} - {id(self.lift.weight), id(self.project.weight)}
        return [p for p in self.parameters() if id(p) in chosen]


def build(config: UnetConfig, tasks: Sequence[TaskSpec], context_frames: int) -> UnetNetwork:
    """The network for the one task of a recipe."""
    return UnetNetwork(config, only_task("unet", tasks), context_frames)


def _blocks(width: int, count: int, periodic: Sequence[bool]) -> nn.Sequential:
    return nn.Sequential(*(ConvNextBlock(width, periodic) for _ in range(count)))
