"""Convolutions whose kernels serve grids of one, two and three axes, and samples with different boundaries at once.

A 1D field is a 2D field that does not depend on the first axis, and a 2D field is such a 3D field: a kernel has as many
axes as the largest task of the model, and for smaller tasks it is summed over the leading ones (averaged where it grows
a grid), unless those have kernels of their own. A kernel is stored as one matrix (outputs, inputs x taps).

Grids are (B, H, W, C) or (B, D, H, W, C): the channels of a point stand side by side, as convolutions and matrix
products on a CPU want them, so that neither needs a copy. A 1D field is (B, 1, W, C): convolutions are fast along the
last axis.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ups.models.normalization import Constants, as_type

# First sample, the one after the last, and which axes of the grid wrap around.
Range = tuple[int, int, tuple[bool, ...]]
# By the dimensions of the tensor.
_CONVOLVE: dict[int, Callable[..., Tensor]] = {4: F.conv2d, 5: F.conv3d}
_FEW_POINTS = 256


@dataclass(frozen=True)
class Layout:
    """What a tensor (B, C, *grid) holds: fields of `dims` dimensions, samples with the same boundaries in ranges."""

    dims: int
    ranges: tuple[Range, ...]

    @functools.cached_property
    def wraps_nowhere(self) -> bool:
        return not any(any(wraps) for _, _, wraps in self.ranges)

    @functools.cached_property
    def open_ends(self) -> tuple[tuple[int, int, int], ...]:
        """(first sample, the one after the last, axis of the grid) of all axes with points that do not wrap."""
        axes = range(1 if self.dims == 1 else 0, grid_rank(self.dims))
        return tuple((first, stop, axis) for first, stop, wraps in self.ranges for axis in axes if not wraps[axis])

    def sources(self, grid: Sequence[int], size: int, constants: Constants, device: torch.device) -> tuple[Tensor, ...]:
        """Where a convolution with `size` taps along each axis takes its points from, for each range.

        `tap_sources` where it is a product of matrices, else `halo_sources`; none where zero padding is all there is to
        do.
        """
        pads = [0, size // 2] if self.dims == 1 else [size // 2] * self.dims
        by_taps = self.as_product(grid, device)
        if self.wraps_nowhere and not by_taps:
            return ()
        make = tap_sources if by_taps else halo_sources
        keys = [(make, tuple(grid), tuple(pads), wraps) for _, _, wraps in self.ranges]
        return tuple(
            constants.get(functools.partial(make, grid, pads, key[-1]), key, device, torch.int64) for key in keys
        )

    def as_product(self, grid: Sequence[int], device: torch.device) -> bool:
        """Whether convolutions on this grid are products with the taps of each point side by side.

        On a CPU that is faster for few points: a convolution brings weights into another order in each call.
        """
        if torch.compiler.is_exporting():  # a graph is for any number of samples
            return False
        return device.type == "cpu" and math.prod(grid) * self.ranges[-1][1] <= _FEW_POINTS


def grid_rank(dims: int) -> int:
    """Axes of the grid on which fields of `dims` dimensions are convolved: a line is a plane of one row."""
    return max(2, dims)


def working_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The type of a product of x and weight: what autocast says, else the weight's."""
    kind = x.device.type
    if weight.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype


def halo_sources(grid: Sequence[int], pads: Sequence[int], wraps: Sequence[bool]) -> Tensor:
    """For each point of a grid with `pads` more points at both ends of each axis, the point of the grid that it takes
    its value from (as one number): around a wrapping axis, the nearest one elsewhere."""
    index = torch.zeros((), dtype=torch.int64)
    for points, pad, around in zip(grid, pads, wraps, strict=True):
        position = torch.arange(-pad, points + pad)
        position = position % points if around else position.clamp(0, points - 1)
        index = index[..., None] * points + position
    return index.flatten()


def tap_sources(grid: Sequence[int], pads: Sequence[int], wraps: Sequence[bool]) -> Tensor:
    """For each point of a grid and each tap of a kernel around it, the point under the tap, as `halo_sources`."""
    padded = halo_sources(grid, pads, wraps).reshape([n + 2 * p for n, p in zip(grid, pads, strict=True)])
    for axis, pad in enumerate(pads):
        padded = padded.unfold(axis, 2 * pad + 1, 1)
    return padded.flatten()  # (grid x taps)


def gathered(x: Tensor, ranges: Sequence[Range], sources: Sequence[Tensor]) -> Tensor:
    """x (B, *grid, C) -> (B, N, C): the points that the sources (N,) of each range name."""
    points = x.reshape(x.shape[0], -1, x.shape[-1])
    if len(ranges) == 1:
        return points.index_select(1, sources[0])
    out = points.new_empty(x.shape[0], sources[0].shape[0], x.shape[-1])
    for (first, stop, _), source in zip(ranges, sources, strict=True):
        torch.index_select(points[first:stop], 1, source, out=out[first:stop])
    return out


def with_halo(x: Tensor, pads: Sequence[int], layout: Layout, sources: Sequence[Tensor]) -> Tensor:
    """x (B, *grid, C) with `pads` more points at both ends of each axis: wrapped around, or 0 where nothing wraps.

    sources: what `halo_sources` gives for each of the ranges.
    """
    sizes = [n + 2 * p for n, p in zip(x.shape[1:-1], pads, strict=True)]
    padded = gathered(x, layout.ranges, sources).view(x.shape[0], *sizes, x.shape[-1])
    for first, stop, axis in layout.open_ends:
        if pad := pads[axis]:
            part = padded[first:stop]
            part.narrow(axis + 1, 0, pad).zero_()
            part.narrow(axis + 1, sizes[axis] - pad, pad).zero_()
    return padded


def with_taps(x: Tensor, pads: Sequence[int], layout: Layout, sources: Sequence[Tensor]) -> Tensor:
    """x (B, *grid, C) -> (B, grid x taps, C): the points under the taps of a kernel, 0 beyond ends that do not wrap.

    sources: what `tap_sources` gives for each of the ranges.
    """
    taps, grid = gathered(x, layout.ranges, sources), x.shape[1:-1]
    if layout.open_ends:
        by_tap = taps.view(x.shape[0], *grid, *[2 * pad + 1 for pad in pads], x.shape[-1])
        for first, stop, axis in layout.open_ends:
            part, pad, tap_axis = by_tap[first:stop], pads[axis], 1 + len(grid) + axis
            for offset in range(1, pad + 1):  # from the middle tap
                part.narrow(1 + axis, 0, offset).select(tap_axis, pad - offset).zero_()
                part.narrow(1 + axis, grid[axis] - offset, offset).select(tap_axis, pad + offset).zero_()
    return taps


class KernelProduct(torch.autograd.Function):
    """A convolution whose gradient is one, too: that of the field is convolved with the mirrored kernel.

    kernel (outputs, *sizes, inputs). What autograd would do instead costs two more passes over memory each way.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, bias: Tensor | None, layout: Layout, *sources: Tensor) -> Tensor:
        extended_x, out = _applied(x, kernel, bias, layout, sources)
        ctx.save_for_backward(extended_x, kernel, *sources)
        ctx.layout, ctx.grid = layout, x.shape[1:-1]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        extended_x, kernel, *sources = ctx.saved_tensors
        (gradient,) = gradients
        gradient = gradient.contiguous()
        for_x = for_kernel = for_bias = None
        needs_x, *needs = ctx.needs_input_grad[:3]
        if needs_x:
            mirrored = kernel.flip(tuple(range(1, kernel.ndim - 1))).transpose(0, -1).contiguous()
            _, for_x = _applied(gradient, mirrored, None, ctx.layout, sources)
        if ctx.layout.as_product(ctx.grid, gradient.device):
            rows = gradient.flatten(0, -2)
            for_kernel = (rows.T @ extended_x).view(kernel.shape) if needs[0] else None
            for_bias = rows.sum(0) if needs[1] else None
        elif any(needs):  # none of a frozen network
            for_kernel, for_bias = _kernel_gradient(gradient, extended_x, kernel, needs)
        return (for_x, for_kernel, for_bias, None, *[None] * len(sources))


def _kernel_gradient(
    gradient: Tensor, padded: Tensor, kernel: Tensor, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of kernel and bias, where they are needed."""
    rank = kernel.ndim - 2
    ones, zeros = [1] * rank, [0] * rank
    _, for_kernel, for_bias = torch.ops.aten.convolution_backward(
        gradient.movedim(-1, 1),
        padded.movedim(-1, 1),
        kernel.movedim(-1, 1),
        [kernel.shape[0]] if needs[1] else None,
        ones,
        zeros,
        ones,
        False,
        zeros,
        1,
        [False, *needs],
    )
    return for_kernel.movedim(1, -1) if needs[0] else None, for_bias


def _applied(
    x: Tensor, kernel: Tensor, bias: Tensor | None, layout: Layout, sources: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """What a kernel (outputs, *sizes, inputs) is applied to, x (B, *grid, inputs) with its halo or taps; the result."""
    pads = [size // 2 for size in kernel.shape[1:-1]]
    if layout.as_product(x.shape[1:-1], x.device):
        matrix = kernel.flatten(1)
        taps = with_taps(x, pads, layout, sources).view(-1, matrix.shape[1])
        return taps, F.linear(taps, matrix, bias).view(*x.shape[:-1], -1)
    padded = with_halo(x, pads, layout, sources)
    return padded, _CONVOLVE[x.ndim](padded.movedim(-1, 1), kernel.movedim(-1, 1), bias).movedim(1, -1)


class GridKernel(nn.Module):
    """A kernel of `size` taps along each axis, for grids of the largest of `dims` dimensions or fewer.

    weight (rows, taps x columns): that of the most dimensions, `axes` of them. The columns of a tap side by side, as
    convolutions want them, so that a kernel and its gradient are views of the matrix. own: those of fewer dimensions,
    which begin as what the largest is there (`reduced`); a number of dimensions that is not in `dims` has no kernel of
    its own, and takes that.
    """

    # Whether leading axes that a grid lacks are averaged over instead of summed.
    averages = False

    def __init__(self, rows: int, columns: int, num_outputs: int, size: int, dims: Sequence[int], scale: float) -> None:
        super().__init__()
        self.columns, self.size, self.axes = columns, size, max(dims)
        self.weight = nn.Parameter(torch.randn(rows, size**self.axes * columns) * scale)
        drawn = self.weight.detach()
        fewer = [n for n in sorted(dims) if n < self.axes]
        self.own = nn.ParameterDict({str(n): nn.Parameter(self._fitted(drawn, self.axes, n).clone()) for n in fewer})
        self.bias = nn.Parameter(torch.zeros(num_outputs))
        # What `prepared` returned and where the weights lay, in a network whose weights stay (`Network.fix_weights`).
        self.kept: dict[tuple[int, torch.dtype, bool], tuple[int, Tensor, Tensor]] | None = None

    def prepared(self, dims: int, dtype: torch.dtype, product: bool = True) -> tuple[Tensor, Tensor]:
        """Kernel, as `arranged` gives it, and bias for fields of `dims` dimensions. product: the kernel is a matrix."""
        if self.kept is None or torch.is_grad_enabled() or torch.compiler.is_exporting():
            weight, axes = self.of(dims), dims if str(dims) in self.own else self.axes
            taps = reduced(self._taps(weight, axes), axes, dims, self.averages)
            return self.arranged(taps.to(dtype), self._bias(dims).to(dtype))
        stamp = self.weight.data_ptr()  # another one after the network was moved
        stored = self.kept.get((dims, dtype, product))
        if stored is None or stored[0] != stamp:
            with torch.enable_grad():
                kernel, bias = self.prepared(dims, dtype)
            if product:  # columns side by side: a product of few rows takes a third of the time
                kernel = kernel.movedim(0, -1).contiguous().movedim(-1, 0)
            stored = (stamp, kernel.detach(), bias.detach())
            self.kept[dims, dtype, product] = stored
        return stored[1:]

    def arranged(self, taps: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """taps (rows, *size^dims, columns) as what the module applies, and the bias. A line keeps a first axis of
        length 1."""
        return taps.flatten(1), bias

    def of(self, dims: int) -> nn.Parameter:
        """The parameter that fields of `dims` dimensions take their kernel from."""
        parameter: nn.Parameter = self.own.get(str(dims), self.weight)
        return parameter

    def _bias(self, dims: int) -> Tensor:
        """The bias, with the kernels of other dimensions in its graph: every parameter is in every graph."""
        bias: Tensor = self.bias
        if not self.own or not torch.is_grad_enabled():
            return bias
        used = self.of(dims)
        for weight in (self.weight, *self.own.values()):
            if weight is not used and weight.requires_grad:
                bias = bias + 0.0 * weight.flatten()[0]  # one number of each is enough for the graph
        return bias

    def converted(self, kernels: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Kernels of such a module by their dimensions, as this one has them: parameter -> value.

        Where that one has none of as many dimensions, its largest is extended or reduced. Kernels that differ in more
        than their axes are left out.
        """
        most = max(kernels)
        fitting = {}
        for name, dims in (("weight", self.axes), *((f"own.{n}", int(n)) for n in self.own)):
            kernel, axes = (kernels[dims], dims) if dims in kernels else (kernels[most], most)
            if kernel.shape == (self.weight.shape[0], self.size**axes * self.columns):
                fitting[name] = self._fitted(kernel, axes, dims)
        return fitting

    def _taps(self, weight: Tensor, axes: int) -> Tensor:
        return weight.reshape(-1, *[self.size] * axes, self.columns)

    def _fitted(self, weight: Tensor, axes: int, dims: int) -> Tensor:
        """A weight of `axes` dimensions as one of `dims`."""
        return extended(self._taps(weight, axes), axes, dims, self.averages).flatten(1)


def reduced(taps: Tensor, axes: int, dims: int, averages: bool = False) -> Tensor:
    """taps (rows, *size^axes, columns) -> (rows, *size^dims, columns): summed over the leading axes.

    A line keeps an axis of length 1.
    """
    for _ in range(axes - dims):
        size = taps.shape[1]
        # Sums of planes: a sum over an axis that is not the last is slow on a CPU.
        taps = functools.reduce(torch.add, taps.unbind(1))
        taps = taps / size if averages else taps
    return taps.unsqueeze(1) if dims == 1 else taps


def extended(taps: Tensor, axes: int, to_axes: int, averages: bool = False) -> Tensor:
    """taps (rows, *size^axes, columns) -> (rows, *size^to_axes, columns), which `reduced` takes back to what they were.

    An odd kernel becomes the center plane of the new one, an even one is spread over both planes: neither prefers a
    direction along the new axis. What is averaged is repeated. To fewer axes it is `reduced` itself.
    """
    if to_axes < axes:
        return reduced(taps, axes, to_axes, averages)
    size = taps.shape[1]
    for _ in range(to_axes - axes):
        planes = taps.unsqueeze(1).repeat_interleave(size, 1)
        if not averages:
            share = taps.new_zeros(size)
            share[size // 2] = 1.0
            if size % 2 == 0:
                share[:] = 1.0 / size
            planes = planes * share.reshape(-1, *[1] * (taps.ndim - 1))
        taps = planes
    return taps


class GridConvolution(GridKernel):
    """A convolution that keeps the grid, with wrapped or zero padding as each sample's boundaries ask."""

    def __init__(self, inputs: int, outputs: int, size: int, dims: Sequence[int], zero: bool = False) -> None:
        scale = 0.0 if zero else (inputs * size ** max(dims)) ** -0.5
        super().__init__(outputs, inputs, outputs, size, dims, scale)

    def arranged(self, taps: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return taps, bias

    def forward(self, x: Tensor, layout: Layout, sources: Sequence[Tensor]) -> Tensor:
        """(B, *grid, inputs) -> (B, *grid, outputs). sources: of each range, see `Layout.sources`."""
        dtype = working_dtype(x, self.weight)
        kernel, bias = self.prepared(layout.dims, dtype, layout.as_product(x.shape[1:-1], x.device))
        return convolved(as_type(x, dtype), kernel, bias, layout, sources)


def convolved(x: Tensor, kernel: Tensor, bias: Tensor | None, layout: Layout, sources: Sequence[Tensor]) -> Tensor:
    """x (B, *grid, inputs) convolved with a kernel (outputs, *sizes, inputs), an odd number of taps along each axis."""
    if not sources:
        pads = [size // 2 for size in kernel.shape[1:-1]]
        return _CONVOLVE[x.ndim](x.movedim(-1, 1), kernel.movedim(-1, 1), bias, padding=pads).movedim(1, -1)
    if not torch.is_grad_enabled():
        return _applied(x, kernel, bias, layout, sources)[1]
    convolved_x: Tensor = KernelProduct.apply(x, kernel, bias, layout, *sources)  # type: ignore[no-untyped-call]
    return convolved_x


class Shrink(GridKernel):
    """Two points along each axis -> one: a matrix product with the points of a cell side by side."""

    def __init__(self, inputs: int, outputs: int, dims: Sequence[int]) -> None:
        super().__init__(outputs, inputs, outputs, 2, dims, (inputs * 2 ** max(dims)) ** -0.5)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """(B, *grid, inputs) -> (B, *grid / 2, outputs)."""
        dtype = working_dtype(x, self.weight)
        matrix, bias = self.prepared(layout.dims, dtype)
        return F.linear(_cells(as_type(x, dtype), _cell(layout)), matrix, bias)  # cells (B, *grid / 2, taps x inputs)


class Grow(GridKernel):
    """One point -> two along each axis."""

    averages = True

    def __init__(self, inputs: int, outputs: int, dims: Sequence[int]) -> None:
        super().__init__(inputs, outputs, outputs, 2, dims, inputs**-0.5)

    def arranged(self, taps: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return taps.flatten(1).T, bias.repeat(taps[0, ..., 0].numel())

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """(B, *grid, inputs) -> (B, *grid x 2, outputs)."""
        dtype = working_dtype(x, self.weight)
        matrix, bias = self.prepared(layout.dims, dtype)
        return _points(F.linear(as_type(x, dtype), matrix, bias), _cell(layout))  # of (B, *grid, taps x outputs)


def _cell(layout: Layout) -> tuple[int, ...]:
    """Points along each axis of the grid that are one point of the next level."""
    return (1, 2) if layout.dims == 1 else (2,) * layout.dims


def _cells(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """(B, *grid, C) -> (B, *grid / sizes, cell x C). A view in 1D."""
    rank = len(sizes)
    split = [n for points, size in zip(x.shape[1:-1], sizes, strict=True) for n in (points // size, size)]
    parts = x.reshape(x.shape[0], *split, x.shape[-1])  # (B, X, 2, Y, 2, C)
    order = [0, *range(1, 1 + 2 * rank, 2), *range(2, 2 + 2 * rank, 2), 1 + 2 * rank]
    return parts.permute(order).flatten(1 + rank)


def _points(cells: Tensor, sizes: Sequence[int]) -> Tensor:
    """(B, *grid, cell x C) -> (B, *grid x sizes, C): inverse of `_cells`."""
    rank = len(sizes)
    grid = cells.shape[1:-1]
    parts = cells.reshape(cells.shape[0], *grid, *sizes, -1)  # (B, X, Y, 2, 2, C)
    order = [0, *(n for axis in range(rank) for n in (1 + axis, 1 + rank + axis)), 1 + 2 * rank]
    whole = [points * size for points, size in zip(grid, sizes, strict=True)]
    return parts.permute(order).reshape(cells.shape[0], *whole, -1)


def smoothed(x: Tensor, layout: Layout, constants: Constants) -> Tensor:
    """x (B, *grid, C) averaged with its neighbors by 1/4, 1/2, 1/4 along each axis; ends that do not wrap repeat."""
    parts = []
    for first, stop, wraps in layout.ranges:
        part = x[first:stop] if len(layout.ranges) > 1 else x
        for axis, (points, around) in enumerate(zip(x.shape[1:-1], wraps, strict=True), start=1):
            make = functools.partial(smoothing_matrix, points, around)
            matrix = constants.get(make, (smoothing_matrix, points, around), x.device, x.dtype)
            part = torch.matmul(matrix, part.reshape(-1, points, x.shape[axis + 1 :].numel())).view(part.shape)
        parts.append(part)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def smoothing_matrix(points: int, periodic: bool) -> Tensor:
    """(points, points): what `smoothed` does along one axis."""
    index = torch.arange(points)
    matrix = 0.5 * torch.eye(points)
    for offset in (-1, 1):
        neighbors = (index + offset) % points if periodic else (index + offset).clamp(0, points - 1)
        matrix.index_put_((index, neighbors), torch.tensor(0.25), accumulate=True)
    return matrix


def plus_product(x: Tensor, y: Tensor, matrix: Tensor) -> Tensor:
    """x (..., N) + y (..., M) matrix^T, in one pass over memory where both have one type; matrix (N, M)."""
    if x.dtype != y.dtype or torch.is_autocast_enabled(x.device.type):
        return x + F.linear(y, matrix)
    rows, inputs = matrix.shape
    return torch.addmm(x.reshape(-1, rows), y.reshape(-1, inputs), matrix.T).view(x.shape)


class ResidualBlock(nn.Module):
    """x + B gelu((A x) scale + shift), with scale and shift from the condition; the identity when new."""

    def __init__(self, width: int, size: int, dims: Sequence[int]) -> None:
        super().__init__()
        self.inner = GridConvolution(width, width, size, dims)
        self.outer = GridConvolution(width, width, size, dims, zero=True)
        self.num_modulations = 2 * width

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor, layout: Layout, *sources: Tensor) -> Tensor:
        """x (B, *grid, C), scale and shift (B, 1, .., C), sources as in `GridConvolution` -> (B, *grid, C)."""
        y = self.inner(x, layout, sources)
        y = F.gelu(torch.addcmul(as_type(shift, y.dtype), y, as_type(scale, y.dtype)))
        added: Tensor = x + self.outer(y, layout, sources)
        return added
