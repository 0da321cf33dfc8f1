"""Parts of the multiscale network that were tried and are not in it, for `ablations.py` alone.

Each function puts a part in the place of one of the network's own, in this process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ups.config.model import MultiscaleConfig
from ups.models import multiscale
from ups.models.grid_convolution import Layout, ResidualBlock
from ups.models.multiscale import CoarseAttention, rotated
from ups.models.network import NetworkInput
from ups.models.normalization import wide
from ups.spec.task import TaskSpec

WINDOW = 4  # points along each axis
GROUPS = 4  # of channels
RANK = 8


class WindowedAttention(CoarseAttention):
    """Attention within windows of 4 points along each axis, which every second block shifts by half a window.

    A shifted window at a wall holds points of both ends: without a mask, which would make it slower.
    """

    count = 0

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.shift = WINDOW // 2 if WindowedAttention.count % 2 else 0
        WindowedAttention.count += 1

    def forward(self, x: Tensor, modulation: Tensor, turns: Tensor) -> Tensor:
        grid = x.shape[2:]
        axes = [axis + 2 for axis, points in enumerate(grid) if points > WINDOW]
        whole = turns.expand(x.shape[0], -1, -1).reshape(x.shape[0], *grid, -1).movedim(-1, 1)  # (B, D, *grid)
        moved, angles = (torch.roll(t, [-self.shift] * len(axes), axes) for t in (x, whole))
        cells = [min(WINDOW, points) for points in grid]
        counts = [points // cell for points, cell in zip(grid, cells, strict=True)]

        def windows(t: Tensor) -> Tensor:  # (B, D, *grid) -> (B x windows, D, *cells)
            split = [n for pair in zip(counts, cells, strict=True) for n in pair]
            t = t.reshape(*t.shape[:2], *split)
            order = [0, *range(2, t.ndim, 2), 1, *range(3, t.ndim, 2)]
            return t.permute(order).flatten(0, len(grid))

        number = windows(moved).shape[0] // x.shape[0]
        each = modulation.repeat_interleave(number, 0)
        out = super().forward(windows(moved), each, windows(angles).flatten(2).transpose(1, 2))
        out = out.reshape(x.shape[0], *counts, x.shape[1], *cells)
        rank = len(grid)
        order = [0, rank + 1, *(n for axis in range(rank) for n in (1 + axis, rank + 2 + axis))]
        return torch.roll(out.permute(order).reshape(x.shape), [self.shift] * len(axes), axes)


class ChannelSeparatedAttention(CoarseAttention):
    """Attention between points for each of 4 groups of channels, with the same matrices; then between groups."""

    def __init__(self, width: int, num_heads: int) -> None:
        nn.Module.__init__(self)
        self.width, self.num_heads = width, num_heads
        self.part = width // GROUPS
        self.inner = nn.Linear(self.part, 5 * self.part, bias=False)
        self.between = nn.Linear(self.part, 3 * self.part, bias=False)
        self.outer = nn.Linear(2 * self.part, self.part, bias=False)
        self.joined = nn.Linear(width, width, bias=False)
        nn.init.normal_(self.inner.weight, std=self.part**-0.5)
        nn.init.normal_(self.between.weight, std=self.part**-0.5)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.joined.weight)
        self.num_modulations = 2 * width

    def forward(self, x: Tensor, modulation: Tensor, turns: Tensor) -> Tensor:
        z = x.flatten(2).transpose(1, 2)
        batch, points, _ = z.shape
        scale, shift = modulation[:, None].chunk(2, dim=-1)
        y = torch.addcmul(shift, F.layer_norm(wide(z), (self.width,)), 1 + scale)
        groups = y.reshape(batch, points, GROUPS, self.part).transpose(1, 2).flatten(0, 1)  # (B G, L, D/G)
        pairs, v, value, gate = torch.split(self.inner(groups), [2 * self.part, *[self.part] * 3], dim=-1)
        few = turns.shape[-1] // GROUPS
        angles = turns[..., :few].expand(batch, -1, -1).repeat_interleave(GROUPS, 0)
        q, k = torch.split(rotated(pairs, angles), self.part, dim=-1)
        seen = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        mixed = self.outer(torch.cat([seen, F.silu(gate) * value], dim=-1))
        z = z + mixed.reshape(batch, GROUPS, points, -1).transpose(1, 2).flatten(2)
        q, k, v = self.between(z.reshape(batch, points, GROUPS, self.part)).chunk(3, dim=-1)  # each (B, L, G, D/G)
        z = z + self.joined(F.scaled_dot_product_attention(q, k, v).flatten(2))
        separated: Tensor = z.transpose(1, 2).reshape(x.shape)
        return separated


class AdaptedBlock(ResidualBlock):
    """A residual block whose first convolution has a matrix of rank 8 more, of each task's own."""

    num_tasks = 0
    # The task of each sample of the forward pass that runs, as an index (B,); set by AdaptedNetwork.
    rows: Tensor | None = None

    def __init__(self, width: int, size: int, dims: Sequence[int]) -> None:
        super().__init__(width, size, dims)
        self.low = nn.Parameter(torch.randn(self.num_tasks, width, RANK) * width**-0.5)
        self.high = nn.Parameter(torch.zeros(self.num_tasks, RANK, width))

    def forward(self, x: Tensor, modulation: Tensor, layout: Layout, *sources: Tensor) -> Tensor:
        points = x.movedim(1, -1).flatten(1, -2)  # (B, points, C)
        more = (points @ self.low[AdaptedBlock.rows]) @ self.high[AdaptedBlock.rows]
        y = self.inner(x, layout, sources) + more.reshape(x.shape[0], *x.shape[2:], x.shape[1]).movedim(-1, 1)
        scale, shift = modulation.reshape(*modulation.shape, *[1] * (x.ndim - 2)).chunk(2, dim=1)
        added: Tensor = x + self.outer(F.gelu(torch.addcmul(shift, y, 1 + scale)), layout, sources)
        return added


class AdaptedNetwork(multiscale.MultiscaleNetwork):
    """Tells its blocks which task each sample is of."""

    def __init__(self, config: MultiscaleConfig, tasks: Sequence[TaskSpec], context_frames: int) -> None:
        AdaptedBlock.num_tasks = len(tasks)
        self.numbers = {task.name: number for number, task in enumerate(tasks)}
        super().__init__(config, tasks, context_frames)

    def forward_group(self, group: Sequence[NetworkInput]) -> list[Tensor]:
        # In the order in which the network puts the samples one behind the other.
        ordered = sorted(group, key=lambda given: multiscale._wraps(given.task))
        rows = [self.numbers[g.task.name] for g in ordered for _ in range(g.fields.shape[0])]
        AdaptedBlock.rows = torch.tensor(rows, device=group[0].fields.device)
        return super().forward_group(group)

    def matrices(self) -> list[nn.Parameter]:
        """Without the adapters: they are indexed by task."""
        own = {id(p) for m in self.modules() if isinstance(m, AdaptedBlock) for p in (m.low, m.high)}
        return [p for p in super().matrices() if id(p) not in own]


def windowed_attention() -> None:
    vars(multiscale)["CoarseAttention"] = WindowedAttention


def channel_separated_attention() -> None:
    vars(multiscale)["CoarseAttention"] = ChannelSeparatedAttention


def adapters() -> None:
    vars(multiscale)["ResidualBlock"] = AdaptedBlock
    vars(multiscale)["MultiscaleNetwork"] = AdaptedNetwork
