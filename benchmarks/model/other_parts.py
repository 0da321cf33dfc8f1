"""Parts of the multiscale network and of its training that are only tried, for `ablations.py` alone.

Each function puts a part in the place of one of the product's own, in this process. A part that wins moves into the
product; one that loses leaves this file, and docs/ablations.md keeps its figures.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ups.models import multiscale
from ups.models.grid_convolution import Grow, Layout, Shrink
from ups.models.multiscale import CoarseAttention
from ups.models.normalization import wide
from ups.models.propagator import analysis_matrix, synthesis_matrix
from ups.training import augment

MODES = 16


@functools.lru_cache
def blurring(points: int, periodic: bool) -> Tensor:
    """(points, points): averages of a point and its neighbors by 1/2 and 1/4 each; ends that do not wrap repeat."""
    with torch.inference_mode(False):
        index = torch.arange(points)
        matrix = 0.5 * torch.eye(points)
        for step in (-1, 1):
            neighbors = (index + step) % points if periodic else (index + step).clamp(0, points - 1)
            matrix[index, neighbors] += 0.25
        return matrix


def blurred(x: Tensor, layout: Layout) -> Tensor:
    """x (B, *grid, C) averaged with its neighbors along each axis."""
    parts = []
    for first, stop, wraps in layout.ranges:
        part = x[first:stop]
        for axis in [2] if layout.dims == 1 else range(1, 1 + layout.dims):
            matrix = blurring(x.shape[axis], wraps[axis - 1])
            flat = part.reshape(part.shape[:axis].numel(), x.shape[axis], -1)
            part = torch.matmul(matrix, flat).view(part.shape)
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class BlurredShrink(Shrink):
    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        return super().forward(blurred(x, layout), layout)


class BlurredGrow(Grow):
    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        return blurred(super().forward(x, layout), layout)


class FourierMixing(CoarseAttention):
    """The attention's place and gated MLP, with products of the lowest waves along each axis instead of the scores.

    One complex matrix for each wave and head, shared by all axes; other ones where an axis does not wrap.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        nn.Module.__init__(self)
        self.width, self.num_heads = width, num_heads
        self.inner = nn.Linear(width, 3 * width, bias=False)
        self.outer = nn.Linear(2 * width, width, bias=False)
        nn.init.normal_(self.inner.weight, std=width**-0.5)
        nn.init.zeros_(self.outer.weight)
        part = width // num_heads
        self.waves = nn.Parameter(torch.randn(2, 2, MODES, num_heads, part, part) * part**-0.5)
        self.num_modulations = 2 * width

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor, phases: Any) -> Tensor:
        y = torch.addcmul(shift, F.layer_norm(wide(x), (self.width,)).to(shift.dtype), scale)
        u, value, gate = self.inner(y).chunk(3, dim=-1)
        layout: Layout = phases
        mixed = torch.cat([self._mixed(u[a:b], wraps, layout.dims) for a, b, wraps in layout.ranges])
        added: Tensor = x + self.outer(torch.cat([mixed, F.silu(gate) * value], dim=-1))
        return added

    def _mixed(self, u: Tensor, wraps: Sequence[bool], dims: int) -> Tensor:
        out: Tensor | None = None
        for axis in [2] if dims == 1 else range(1, 1 + dims):
            along = self._along(u.movedim(axis, -1), wraps[axis - 1]).movedim(-1, axis)
            out = along if out is None else out + along
        assert out is not None
        return out + 0.0 * self.waves.flatten()[0]

    def _along(self, u: Tensor, periodic: bool) -> Tensor:
        """u (B, .., C, points)."""
        analysis, synthesis = matrices(u.shape[-1], periodic)
        count = min(MODES, synthesis.shape[0] // 2)
        waves = u @ analysis
        c, s = waves.chunk(2, dim=-1) if periodic else (waves, torch.zeros_like(waves))
        rows = synthesis.shape[0] // 2
        real, imaginary = self.waves[int(periodic)][:, :count]  # each (K, H, P, P)

        def product(matrix: Tensor, z: Tensor) -> Tensor:
            heads = z[..., :count].reshape(*z.shape[:-2], self.num_heads, -1, count)  # (B, .., H, P, K)
            return torch.einsum("khpq,...hqk->...hpk", matrix, heads).flatten(-3, -2)

        a = product(real, c) + product(imaginary, s)
        b = product(real, s) - product(imaginary, c)
        return a @ synthesis[:count] + b @ synthesis[rows : rows + count]


@functools.lru_cache
def matrices(points: int, periodic: bool) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return analysis_matrix(points, periodic).float(), synthesis_matrix(points, periodic).float()


class DiagonalMixing(FourierMixing):
    """One complex number for each wave and channel: a convolution of each channel with a kernel as long as the axis."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.waves = nn.Parameter(torch.randn(2, 2, MODES, width) * 0.5)

    def _along(self, u: Tensor, periodic: bool) -> Tensor:
        analysis, synthesis = matrices(u.shape[-1], periodic)
        rows = synthesis.shape[0] // 2
        count = min(MODES, rows)
        real, imaginary = self.waves[int(periodic), :, :count].transpose(1, 2)  # each (C, K)
        if periodic:
            c, s = u @ analysis[:, :count], u @ analysis[:, rows : rows + count]
            a, b = c * real + s * imaginary, s * real - c * imaginary
        else:
            c = u @ analysis[:, :count]
            a, b = c * real, -c * imaginary
        return torch.cat([a, b], dim=-1) @ torch.cat([synthesis[:count], synthesis[rows : rows + count]])


def blur() -> None:
    """Averages over neighbors before the grid is halved and after it is doubled."""
    multiscale.Shrink, multiscale.Grow = BlurredShrink, BlurredGrow  # type: ignore[attr-defined]


def blur_growth() -> None:
    """Averages over neighbors after the grid is doubled."""
    multiscale.Grow = BlurredGrow  # type: ignore[attr-defined]


def fourier() -> None:
    """Products of waves instead of the attention."""
    multiscale.CoarseAttention = FourierMixing  # type: ignore[misc]
    multiscale.MultiscaleNetwork._phases = lambda self, x, layout: layout  # type: ignore[assignment,method-assign,return-value]


def diagonal() -> None:
    """One number for each wave and channel instead of the attention."""
    fourier()
    multiscale.CoarseAttention = DiagonalMixing  # type: ignore[misc]


def diagonal_and_blur() -> None:
    """One number for each wave and channel, and averages after growing."""
    diagonal()
    blur_growth()


def odd_reflection() -> None:
    """1D velocities as vectors: u(x) -> -u(-x) is a symmetry of burgers1d and ks1d."""
    group, move = augment.point_group, augment.moved

    def point_group(task: Any, space: Any, free: Any) -> Any:
        return [((0,), (False,)), ((0,), (True,))] if task.name in ODD else group(task, space, free)

    def moved(batch: Any, moves: Any, draws: Any) -> Any:
        batch = move(batch, moves, draws)
        if batch.task.name not in ODD:
            return batch
        sign = torch.from_numpy(1.0 - 2.0 * (draws[:, -1] >= 0.5)).to(batch.state.dtype)
        return replace(batch, state=batch.state * sign.reshape(-1, 1, 1, 1))

    augment.point_group, augment.moved = point_group, moved


ODD = ("burgers1d", "ks1d")
