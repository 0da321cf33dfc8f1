"""Parts of the multiscale network and of its training that are only tried, for `ablations.py` alone.

Each function puts a part in the place of one of the product's own, in this process. A part that wins moves into the
product; the others stay here for as long as docs/ablations.md has their figures.
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
from ups.models.grid_convolution import Layout, smoothed
from ups.models.multiscale import CoarseAttention
from ups.models.normalization import wide
from ups.models.propagator import analysis_matrix, synthesis_matrix
from ups.training import augment

MODES = 16


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


class WavesAndAttention(FourierMixing):
    """Attention, and matrices of waves of the same modulated norm next to it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        waves = self.waves
        CoarseAttention.__init__(self, width, num_heads)
        self.waves = waves
        self.inner_waves = nn.Linear(width, width, bias=False)
        self.outer_waves = nn.Linear(width, width, bias=False)
        nn.init.normal_(self.inner_waves.weight, std=width**-0.5)
        nn.init.zeros_(self.outer_waves.weight)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor, phases: Any) -> Tensor:
        angles, layout = phases
        seen = CoarseAttention.forward(self, x, scale, shift, angles)
        y = torch.addcmul(shift, F.layer_norm(wide(x), (self.width,)).to(shift.dtype), scale)
        u = self.inner_waves(y)
        mixed = torch.cat([self._mixed(u[a:b], wraps, layout.dims) for a, b, wraps in layout.ranges])
        added: Tensor = seen + self.outer_waves(mixed)
        return added


def waves_and_attention() -> None:
    """Waves beside the attention."""
    phases = multiscale.MultiscaleNetwork._phases
    multiscale.CoarseAttention = WavesAndAttention  # type: ignore[misc]
    multiscale.MultiscaleNetwork._phases = lambda self, x, layout: (phases(self, x, layout), layout)  # type: ignore[assignment,method-assign,return-value]


def smooth_lines() -> None:
    """Averages over neighbors in 1D too."""
    multiscale.MultiscaleNetwork._smoothed = lambda self, x, layout: smoothed(x, layout, self._constants)  # type: ignore[method-assign]


def fourier() -> None:
    """Products of waves instead of the attention."""
    multiscale.CoarseAttention = FourierMixing  # type: ignore[misc]
    multiscale.MultiscaleNetwork._phases = lambda self, x, layout: layout  # type: ignore[assignment,method-assign,return-value]


def diagonal() -> None:
    """One number for each wave and channel instead of the attention."""
    fourier()
    multiscale.CoarseAttention = DiagonalMixing  # type: ignore[misc]


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


def trained_on_the_grid() -> None:
    """Fields on points are interpolated to the grid, and nothing is learned at the points."""
    from ups.data import rank_source

    read = rank_source.read_arrays

    def read_arrays(*window: Any) -> dict[str, Any]:
        return {name: values for name, values in read(*window).items() if not name.startswith(rank_source.EXTRA)}

    rank_source.read_arrays = read_arrays  # type: ignore[assignment]


def inverse_distances() -> None:
    """The same, with weights of the nearest points that do not know on which side they are."""
    import numpy as np

    from ups.formats import mesh_grid

    def planes(tree: Any, points: Any, targets: Any) -> Any:
        apart, index = tree.query(targets, k=[1, 2, 3, 4])
        near = 1 / (apart**2 + 1e-6)
        return index.astype(np.int64), (near / near.sum(1, keepdims=True)).astype(np.float32)

    mesh_grid._planes, mesh_grid._VERSION = planes, b"inverse distances"
    trained_on_the_grid()
