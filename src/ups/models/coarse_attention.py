"""Attention between all points of a coarse grid, with rotary positions, in parallel with a gated MLP.

Queries and keys are turned by angles that grow along each axis, so that their products depend on the offset between two
points: whole turns around a periodic axis, which commute with shifts, and half turns along others. The modulation comes
before, so that a parameter can re-aim a head.

B samples, L points of the coarse grid, D width, P pairs of components of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ups.models.normalization import wide


class CoarseAttention(nn.Module):
    """x + O [attention, gated MLP] of the modulated norm of x; one matrix in, one out. The identity when new."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.width, self.num_heads = width, num_heads
        self.inner = nn.Linear(width, 5 * width, bias=False)
        self.outer = nn.Linear(2 * width, width, bias=False)
        nn.init.normal_(self.inner.weight, std=width**-0.5)
        nn.init.zeros_(self.outer.weight)
        self.num_modulations = 2 * width

    def forward(self, x: Tensor, modulation: Tensor, turns: Tensor) -> Tensor:
        """x (B, D, *grid), modulation (B, 2 D), turns (B or 1, L, D) from `rotary_turns` -> (B, D, *grid)."""
        z = x.flatten(2).transpose(1, 2)  # (B, L, D)
        scale, shift = modulation[:, None].chunk(2, dim=-1)  # each (B, 1, D)
        y = torch.addcmul(shift, F.layer_norm(wide(z), (self.width,)).to(shift.dtype), 1 + scale)
        y = self.inner(y.to(self.inner.weight.dtype))
        pairs, v, value, gate = torch.split(y, [2 * self.width, *[self.width] * 3], dim=-1)
        # Scores in float32: differences of large products decide, and half precision is slower here on a CPU.
        with torch.autocast(x.device.type, enabled=False):
            heads = (*y.shape[:2], self.num_heads, -1)
            q, k = torch.split(turned(wide(pairs), turns), self.width, dim=-1)
            q, k, v = (part.reshape(heads).transpose(1, 2) for part in (q, k, wide(v)))  # each (B, H, L, D/H)
            seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)  # (B, L, D)
        mixed = torch.cat([seen.to(y.dtype), F.silu(gate) * value], dim=-1)
        added: Tensor = z + self.outer(mixed)
        return added.transpose(1, 2).reshape(x.shape)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """x (B, L, 2 D): each pair of neighboring components turned by its angle.

    A product of complex numbers is one pass over memory; with cosines and sines it is six, on runs of a few numbers.
    """
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2)


def rotary_turns(angles: Tensor, num_heads: int) -> Tensor:
    """angles (L, P) -> (L, 2 H P) unit complex numbers, for the queries and then the keys of all heads."""
    return torch.polar(torch.ones_like(angles), angles).repeat(1, 2 * num_heads)


def rotary_angles(grid: Sequence[int], wraps: Sequence[bool], num_pairs: int) -> Tensor:
    """(L, P) angles in float64. The last two axes have half of the pairs each, with frequencies 1, 2, 3, ...

    A third axis takes the pairs with the highest frequencies from both: weights of a plane keep their meaning in space.
    """
    half = num_pairs // 2
    kept = half if len(grid) < 3 else max(1, min(-(-num_pairs // 3), half - 1))
    columns = {len(grid) - 2: [*range(kept)], len(grid) - 1: [*range(half, half + kept)]}
    if len(grid) == 3:
        columns[0] = [*range(kept, half), *range(half + kept, num_pairs)]
    angles = torch.zeros(*grid, num_pairs, dtype=torch.float64)
    for axis, pairs in columns.items():
        points = grid[axis]
        frequencies = torch.arange(1, len(pairs) + 1, dtype=torch.float64) * (1.0 if wraps[axis] else 0.5)
        turn = 2 * math.pi * torch.arange(points, dtype=torch.float64)[:, None] * frequencies / points
        shape = [1] * len(grid)
        shape[axis] = points
        angles[..., pairs] += turn.reshape(*shape, -1)
    return angles.flatten(0, -2)
