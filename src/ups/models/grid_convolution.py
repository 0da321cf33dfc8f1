"""Convolutions whose kernels serve grids of one, two and three axes, and samples with different boundaries at once.

A 1D field is a 2D field that does not depend on the first axis, and a 2D field is such a 3D field: a kernel has as many
axes as the largest task of the model, and for smaller tasks it is summed over the leading ones (averaged where it grows
a grid). A kernel is stored as one matrix (outputs, inputs x taps).

Grids are (B, C, H, W) or (B, C, D, H, W) with the channels of a point side by side in memory. A line is (B, C, 1, W):
the axis in use must be the last one, along which convolutions are fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# First sample, the one after the last, and which axes of the grid wrap around.
Range = tuple[int, int, tuple[bool, ...]]


@dataclass(frozen=True, slots=True)
class Layout:
    """What a tensor (B, C, *grid) holds: fields of `dims` dimensions, samples with the same boundaries in ranges."""

    dims: int
    ranges: tuple[Range, ...]

    @property
    def wraps_nowhere(self) -> bool:
        return not any(any(wraps) for _, _, wraps in self.ranges)


def grid_rank(dims: int) -> int:
    """Axes of the grid on which fields of `dims` dimensions are convolved: a line is a plane of one row."""
    return max(2, dims)


def channels_last(x: Tensor) -> Tensor:
    """x with the channels of a point side by side in memory."""
    return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)


def working_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The type of a product of x and weight: what autocast says, else the weight's."""
    kind = x.device.type
    if weight.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype


class Halo(torch.autograd.Function):
    """x (B, C, *grid) with `pads` more points at both ends of each axis: wrapped around, or 0 where nothing wraps.

    One pass each way, for all ranges; slices and concatenations would copy the grid once for every axis.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, pads: tuple[int, ...], ranges: tuple[Range, ...]) -> Tensor:
        ctx.pads, ctx.ranges = pads, ranges
        sizes = [n + 2 * p for n, p in zip(x.shape[2:], pads, strict=True)]
        out = x.new_empty(x.shape[0], *sizes, x.shape[1]).movedim(-1, 1)
        _inner(out, pads).copy_(x)
        for axis in reversed(range(len(pads))):
            for low, start, end, high, wraps in _ends(out, axis, pads, ranges):
                if wraps:
                    low.copy_(end)
                    high.copy_(start)
                else:
                    low.zero_()
                    high.zero_()
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        folded = gradients[0].clone()
        for axis in range(len(ctx.pads)):
            for low, start, end, high, wraps in _ends(folded, axis, ctx.pads, ctx.ranges):
                if wraps:
                    end.add_(low)
                    start.add_(high)
        return _inner(folded, ctx.pads), None, None


def _inner(x: Tensor, pads: Sequence[int]) -> Tensor:
    for axis, pad in enumerate(pads):
        x = x.narrow(axis + 2, pad, x.shape[axis + 2] - 2 * pad)
    return x


def _ends(x: Tensor, axis: int, pads: tuple[int, ...], ranges: tuple[Range, ...]) -> Any:
    """Views of the two halos of an axis and of the points next to them: low halo, first, last, high halo, wraps."""
    pad, dim = pads[axis], axis + 2
    if not pad:
        return
    # Later axes have their halos already (forward) or still (backward): corners go around one axis after the other.
    slab = _inner(x, (*pads[:axis], *[0] * (len(pads) - axis)))
    size = x.shape[dim] - 2 * pad
    for first, stop, wraps in ranges:
        part = slab[first:stop]
        places = (0, pad, size, size + pad)
        low, start, end, high = (part.narrow(dim, place, pad) for place in places)
        yield low, start, end, high, wraps[axis]


class GridKernel(nn.Module):
    """A kernel of `size` taps along each of `axes` axes, for grids of as many axes or fewer."""

    # Whether leading axes that a grid lacks are averaged over instead of summed.
    averages = False

    def __init__(self, rows: int, columns: int, num_outputs: int, size: int, axes: int, std: float) -> None:
        super().__init__()
        self.columns, self.size, self.axes = columns, size, axes
        self.weight = nn.Parameter(torch.randn(rows, columns * size**axes) * std)
        self.bias = nn.Parameter(torch.zeros(num_outputs))

    def kernel(self, dims: int, dtype: torch.dtype) -> Tensor:
        """(rows, columns, *taps) for fields of `dims` dimensions, in the layout of the convolution."""
        taps = self.weight.reshape(-1, self.columns, *[self.size] * self.axes)
        return channels_last(reduced(taps, self.axes, dims, self.averages).to(dtype))

    def extended(self, weight: Tensor, axes: int) -> Tensor:
        """The weight of such a module of fewer axes, as this one has it: `kernel` gives back what it was."""
        taps = weight.reshape(-1, self.columns, *[self.size] * axes)
        return extended(taps, axes, self.axes, self.averages).flatten(1)


def reduced(taps: Tensor, axes: int, dims: int, averages: bool = False) -> Tensor:
    """taps (..., *size^axes) -> (..., *size^dims) by the sum over the leading axes; a line keeps one of length 1."""
    first = taps.ndim - axes
    leading = list(range(first, first + axes - dims))
    if leading:
        taps = taps.mean(leading) if averages else taps.sum(leading)
    return taps.unsqueeze(first) if dims == 1 else taps


def extended(taps: Tensor, axes: int, to_axes: int, averages: bool = False) -> Tensor:
    """taps (..., *size^axes) -> (..., *size^to_axes), which `reduced` takes back to what they were.

    An odd kernel becomes the center plane of the new one, an even one is spread over both planes: neither prefers a
    direction along the new axis. What is averaged is repeated.
    """
    first, size = taps.ndim - axes, taps.shape[-1]
    for _ in range(to_axes - axes):
        planes = taps.unsqueeze(first).repeat_interleave(size, first)
        if not averages:
            share = taps.new_zeros(size)
            share[size // 2] = 1.0
            if size % 2 == 0:
                share[:] = 1.0 / size
            planes = planes * share.reshape(-1, *[1] * (taps.ndim - first))
        taps = planes
    return taps


class GridConvolution(GridKernel):
    """A convolution that keeps the grid, with wrapped or zero padding as each sample's boundaries ask."""

    def __init__(self, inputs: int, outputs: int, size: int, axes: int, zero: bool = False) -> None:
        super().__init__(outputs, inputs, outputs, size, axes, 0.0 if zero else (inputs * size**axes) ** -0.5)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """(B, inputs, *grid) -> (B, outputs, *grid)."""
        dtype = working_dtype(x, self.weight)
        return convolved(x.to(dtype), self.kernel(layout.dims, dtype), self.bias.to(dtype), layout)


def convolved(x: Tensor, kernel: Tensor, bias: Tensor, layout: Layout) -> Tensor:
    """The convolution itself, for a kernel (outputs, inputs, *taps) with an odd number of taps along each axis."""
    pads = tuple(size // 2 for size in kernel.shape[2:])
    convolve = F.conv2d if x.ndim == 4 else F.conv3d
    if layout.wraps_nowhere:
        return convolve(x, kernel, bias, padding=pads)
    padded: Tensor = Halo.apply(x, pads, layout.ranges)  # type: ignore[no-untyped-call]
    return convolve(padded, kernel, bias)


class Shrink(GridKernel):
    """Two points along each axis -> one."""

    def __init__(self, inputs: int, outputs: int, axes: int) -> None:
        super().__init__(outputs, inputs, outputs, 2, axes, (inputs * 2**axes) ** -0.5)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """(B, inputs, *grid) -> (B, outputs, *grid / 2)."""
        dtype = working_dtype(x, self.weight)
        kernel = self.kernel(layout.dims, dtype)
        convolve = F.conv2d if x.ndim == 4 else F.conv3d
        return convolve(x.to(dtype), kernel, self.bias.to(dtype), stride=kernel.shape[2:])


class Grow(GridKernel):
    """One point -> two along each axis."""

    averages = True

    def __init__(self, inputs: int, outputs: int, axes: int) -> None:
        super().__init__(inputs, outputs, outputs, 2, axes, inputs**-0.5)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """(B, inputs, *grid) -> (B, outputs, *grid x 2)."""
        dtype = working_dtype(x, self.weight)
        kernel = self.kernel(layout.dims, dtype)
        convolve = F.conv_transpose2d if x.ndim == 4 else F.conv_transpose3d
        return convolve(x.to(dtype), kernel, self.bias.to(dtype), stride=kernel.shape[2:])


class ResidualBlock(nn.Module):
    """x + B gelu((A x) (1 + scale) + shift), with scale and shift from the condition; the identity when new."""

    def __init__(self, width: int, size: int, axes: int) -> None:
        super().__init__()
        self.inner = GridConvolution(width, width, size, axes)
        self.outer = GridConvolution(width, width, size, axes, zero=True)
        self.num_modulations = 2 * width

    def forward(self, x: Tensor, modulation: Tensor, layout: Layout) -> Tensor:
        """x (B, C, *grid), modulation (B, 2 C) -> (B, C, *grid)."""
        y = self.inner(x, layout)
        scale, shift = modulation.to(y.dtype).reshape(*modulation.shape, *[1] * (x.ndim - 2)).chunk(2, dim=1)
        y = F.gelu(torch.addcmul(shift, y, 1 + scale))
        added: Tensor = x + self.outer(y, layout)
        return added
