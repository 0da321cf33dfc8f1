"""The transformer block of the latent operator: AdaLN-zero, attention within windows or over all tokens, gated MLP.

Which tokens see each other is a `Partition`: the token grid cut into windows, possibly shifted. One window that covers
the grid is global attention. On periodic axes a shift wraps around and needs no mask, because the tokens that meet are
neighbors; on other axes tokens from the two ends are masked from each other.

B samples, L tokens, W windows, M tokens of a window, H heads, D width. A grid always has three axes, absent ones of
size 1, so that one code path serves 1D, 2D and 3D.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Partition:
    """Windows of a token grid. grid, window and shift are in tokens; periodic says which axes wrap."""

    grid: tuple[int, ...]
    periodic: tuple[bool, ...]
    window: tuple[int, ...]
    shift: tuple[int, ...] = (0, 0, 0)

    @property
    def num_windows(self) -> int:
        return math.prod(self.grid) // math.prod(self.window)

    @property
    def tokens_per_window(self) -> int:
        return math.prod(self.window)


def _fitting_window(tokens: int, wanted: int) -> int:
    """The largest divisor of `tokens` up to `wanted`; the whole axis where that would leave a token alone."""
    window = max(w for w in range(1, min(tokens, wanted) + 1) if tokens % w == 0)
    return window if window > 1 else tokens


def global_partition(grid: tuple[int, ...], periodic: tuple[bool, ...]) -> Partition:
    """One window: every token sees every token."""
    return Partition(grid, periodic, window=grid)


def windowed_partition(
    grid: tuple[int, ...], periodic: tuple[bool, ...], window_tokens: int, shifted: bool
) -> Partition:
    """Windows of about `window_tokens` along each axis (a divisor of the grid), shifted by half a window if asked."""
    window = tuple(_fitting_window(n, window_tokens) for n in grid)
    shift = tuple(w // 2 if shifted and w < n else 0 for w, n in zip(window, grid, strict=True))
    return Partition(grid, periodic, window, shift)


def split_windows(x: Tensor, partition: Partition) -> Tensor:
    """(B, L, D) -> (B * W, M, D)."""
    if partition.num_windows == 1:
        return x
    (a, b, c), (u, v, w) = partition.grid, partition.window
    x = x.reshape(x.shape[0], a, b, c, x.shape[-1])
    if any(partition.shift):
        x = x.roll([-s for s in partition.shift], (1, 2, 3))
    x = x.reshape(x.shape[0], a // u, u, b // v, v, c // w, w, x.shape[-1])
    return x.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(-1, u * v * w, x.shape[-1])


def join_windows(x: Tensor, partition: Partition) -> Tensor:
    """(B * W, M, D) -> (B, L, D): inverse of `split_windows`."""
    if partition.num_windows == 1:
        return x
    (a, b, c), (u, v, w) = partition.grid, partition.window
    x = x.reshape(-1, a // u, b // v, c // w, u, v, w, x.shape[-1])
    x = x.permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(-1, a, b, c, x.shape[-1])
    if any(partition.shift):
        x = x.roll(list(partition.shift), (1, 2, 3))
    return x.reshape(-1, a * b * c, x.shape[-1])


def window_mask(partition: Partition, device: torch.device) -> Tensor | None:
    """(W, M, M) True where two tokens of a window may see each other; None if all may."""
    cut = [s > 0 and not p for s, p in zip(partition.shift, partition.periodic, strict=True)]
    if not any(cut):
        return None
    side = torch.zeros(partition.grid, dtype=torch.int64, device=device)
    for axis, (size, shift) in enumerate(zip(partition.grid, partition.shift, strict=True)):
        if cut[axis]:
            index = torch.arange(size, device=device)
            shape = [1, 1, 1]
            shape[axis] = size
            # The first `shift` tokens are rolled behind the last ones: they share a window, but not the domain.
            side = side + (index < shift).reshape(shape).long() * 2**axis
    groups = split_windows(side.reshape(1, -1, 1), partition)[:, :, 0]  # (W, M)
    return groups[:, :, None] == groups[:, None, :]


def neighbor(x: Tensor, axis: int, step: int, periodic: bool) -> Tensor:
    """Grid x (B, *N, D) -> at each token the one `step` (1 or -1) further along `axis`; 0 behind an end."""
    dim = axis + 1
    size = x.shape[dim]
    first, rest = (0, 1) if step > 0 else (size - 1, 0)
    edge, inner = x.narrow(dim, first, 1), x.narrow(dim, rest, size - 1)
    edge = edge if periodic else torch.zeros_like(edge)
    return torch.cat([inner, edge] if step > 0 else [edge, inner], dim)


class NeighborMixing(nn.Module):
    """Adds to each token a linear map of its nearest neighbors: a patch sees what stands around it at once.

    weight (axes, sides, D, D): sliced by the number of axes in use.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 2, width, width) * (2 * width) ** -0.5)

    def forward(self, x: Tensor, periodic: Sequence[bool]) -> Tensor:
        """x (B, *N, D), periodic for each axis -> (B, *N, D)."""
        axes = range(len(periodic))
        there = [neighbor(x, axis, step, periodic[axis]) for axis in axes for step in (-1, 1)]
        weight = self.weight[: len(periodic)].flatten(0, 2)  # (axes * sides * D, D)
        mixed: Tensor = x + torch.cat(there, dim=-1).to(weight.dtype) @ weight * len(periodic) ** -0.5
        return mixed


class RelativeBias(nn.Module):
    """Attention bias from log-spaced relative offsets, for all blocks at once.

    A small network maps the signed logarithm of the three offsets (in tokens) to one number per block and head. On a
    periodic axis that a window covers, the offset is the shortest way around.
    """

    def __init__(self, num_outputs: int, hidden: int = 64) -> None:
        super().__init__()
        self.inner = nn.Linear(3, hidden)
        self.outer = nn.Linear(hidden, num_outputs)
        nn.init.normal_(self.inner.weight, std=1.0)
        nn.init.normal_(self.inner.bias, std=1.0)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, partition: Partition) -> Tensor:
        """-> (outputs, M, M): bias[:, i, j] for query i and key j of a window."""
        device, dtype = self.inner.weight.device, self.inner.weight.dtype
        reach = [torch.arange(1 - w, w, device=device) for w in partition.window]  # offsets that can occur
        offsets = torch.cartesian_prod(*reach).to(dtype)  # ((2u-1)(2v-1)(2w-1), 3)
        features = offsets.sign() * torch.log2(1 + offsets.abs())
        values = self.outer(F.silu(self.inner(features)))  # (offsets, outputs)
        tokens = torch.cartesian_prod(*(torch.arange(w, device=device) for w in partition.window))  # (M, 3)
        index = torch.zeros((), dtype=torch.int64, device=device)
        for axis, (size, window) in enumerate(zip(partition.grid, partition.window, strict=True)):
            delta = tokens[None, :, axis] - tokens[:, None, axis]  # (M, M)
            if partition.periodic[axis] and window == size:
                delta = (delta + (size - 1) // 2) % size - (size - 1) // 2
            index = index * (2 * window - 1) + delta + window - 1
        picked = values.index_select(0, index.flatten())  # (M * M, outputs)
        m = partition.tokens_per_window
        out: Tensor = picked.T.reshape(-1, m, m)
        return out


def attention_bias(bias: Tensor, mask: Tensor | None) -> Tensor:
    """(H, M, M) and a mask (W, M, M) -> what is added to the logits: (1, H, M, M), or (W, H, M, M) if masked."""
    if mask is None:
        return bias[None]
    # Finite, so that a masked logit has a zero gradient instead of NaN.
    return bias[None].masked_fill(~mask[:, None], -1e4)


class Block(nn.Module):
    """One pre-norm transformer block, modulated per sample; the identity when new (AdaLN-zero)."""

    def __init__(self, width: int, num_heads: int, mlp: Literal["swiglu", "gelu"], mlp_ratio: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.gated = mlp == "swiglu"
        # A gated MLP has three matrices: two thirds of the hidden width make it as large as a plain one.
        hidden = max(8, round(width * mlp_ratio * (2 / 3 if self.gated else 1.0) / 8) * 8)
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.query_gain = nn.Parameter(torch.ones(width // num_heads))
        self.key_gain = nn.Parameter(torch.ones(width // num_heads))
        self.attention_out = nn.Linear(width, width)
        self.mlp_in = nn.Linear(width, 2 * hidden if self.gated else hidden)
        self.mlp_out = nn.Linear(hidden, width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor, bias: Tensor, partition: Partition) -> Tensor:
        """x (B, L, D), condition (B, D), bias from `attention_bias` -> (B, L, D)."""
        modulation = self.modulation(F.silu(condition))[:, None]  # (B, 1, 6D)
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = modulation.chunk(6, dim=-1)
        x = torch.addcmul(x, gate_1, self.attend(modulated_norm(x, shift_1, scale_1), bias, partition))
        return torch.addcmul(x, gate_2, self.feed_forward(modulated_norm(x, shift_2, scale_2)))

    def attend(self, x: Tensor, bias: Tensor, partition: Partition) -> Tensor:
        """(B, L, D) -> (B, L, D): attention within each window."""
        w = split_windows(x, partition)  # (B * W, M, D)
        q, k, v = self.qkv(w).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # each (B * W, H, M, D/H)
        q = F.rms_norm(q, (q.shape[-1],), self.query_gain.to(q.dtype), eps=1e-6)
        k = F.rms_norm(k, (k.shape[-1],), self.key_gain.to(k.dtype), eps=1e-6)
        if bias.shape[0] > 1:
            bias = bias.repeat(q.shape[0] // bias.shape[0], 1, 1, 1)  # windows are the fast index of B * W
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=bias.to(v.dtype))
        out: Tensor = self.attention_out(y.transpose(1, 2).flatten(2))
        return join_windows(out, partition)

    def feed_forward(self, x: Tensor) -> Tensor:
        """(B, L, D) -> (B, L, D), token by token."""
        hidden = self.mlp_in(x)
        if self.gated:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * value
        else:
            hidden = F.gelu(hidden)
        out: Tensor = self.mlp_out(hidden)
        return out


def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """RMS norm of x (B, L, D) whose gain and offset come from the condition: shift and scale are (B, 1, D)."""
    return torch.addcmul(shift, F.rms_norm(x, (x.shape[-1],), eps=1e-6), 1 + scale)
