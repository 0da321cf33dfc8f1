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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ups.models.normalization import Constants

# First sample, the one after the last, and which axes of the grid wrap around.
Range = tuple[int, int, tuple[bool, ...]]
# By the dimensions of the tensor.
_CONVOLVE: dict[int, Callable[..., Tensor]] = {4: F.conv2d, 5: F.conv3d}


@dataclass(frozen=True, slots=True)
class Layout:
    """What a tensor (B, C, *grid) holds: fields of `dims` dimensions, samples with the same boundaries in ranges."""

    dims: int
    ranges: tuple[Range, ...]

    @property
    def wraps_nowhere(self) -> bool:
        return not any(any(wraps) for _, _, wraps in self.ranges)

    def sources(self, grid: Sequence[int], size: int, constants: Constants, device: torch.device) -> tuple[Tensor, ...]:
        """`halo_sources` of each range for a kernel of `size` taps; none where zero padding is all there is to do."""
        if self.wraps_nowhere:
            return ()
        pads = [0, size // 2] if self.dims == 1 else [size // 2] * self.dims
        keys = [(tuple(grid), tuple(pads), wraps) for _, _, wraps in self.ranges]
        return tuple(
            constants.get(functools.partial(halo_sources, grid, pads, key[-1]), key, device, torch.int64)
            for key in keys
        )


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
        place = torch.arange(-pad, points + pad)
        place = place % points if around else place.clamp(0, points - 1)
        index = index[..., None] * points + place
    return index.flatten()


def with_halo(x: Tensor, pads: Sequence[int], ranges: Sequence[Range], sources: Sequence[Tensor]) -> Tensor:
    """x (B, *grid, C) with `pads` more points at both ends of each axis: wrapped around, or 0 where nothing wraps.

    sources: what `halo_sources` gives for each of the ranges.
    """
    sizes = [n + 2 * p for n, p in zip(x.shape[1:-1], pads, strict=True)]
    points = x.flatten(1, -2)  # (B, points, C)
    if len(ranges) == 1:
        out = points.index_select(1, sources[0])
    else:
        out = points.new_empty(x.shape[0], sources[0].shape[0], x.shape[-1])
        for (first, stop, _), source in zip(ranges, sources, strict=True):
            torch.index_select(points[first:stop], 1, source, out=out[first:stop])
    padded = out.view(x.shape[0], *sizes, x.shape[-1])
    for first, stop, wraps in ranges:
        for axis, (pad, around) in enumerate(zip(pads, wraps, strict=True), start=1):
            if pad and not around:
                padded[first:stop].narrow(axis, 0, pad).zero_()
                padded[first:stop].narrow(axis, sizes[axis - 1] - pad, pad).zero_()
    return padded


class HaloConvolution(torch.autograd.Function):
    """The convolution of `with_halo`, whose gradient is folded back in place: one pass over memory less each way than
    padding and convolution one after the other."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: Tensor, bias: Tensor | None, ranges: tuple[Range, ...], *sources: Tensor
    ) -> Tensor:
        pads = tuple(size // 2 for size in kernel.shape[2:])
        padded = with_halo(x, pads, ranges, sources)
        ctx.save_for_backward(padded, kernel)
        ctx.pads, ctx.ranges, ctx.bias_sizes = pads, ranges, None if bias is None else list(bias.shape)
        return _CONVOLVE[x.ndim](padded.movedim(-1, 1), kernel, bias).movedim(1, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        padded, kernel = ctx.saved_tensors
        rank = kernel.ndim - 2
        ones, zeros = [1] * rank, [0] * rank
        folded, for_kernel, for_bias = torch.ops.aten.convolution_backward(
            gradients[0].movedim(-1, 1),
            padded.movedim(-1, 1),
            kernel,
            ctx.bias_sizes,
            ones,
            zeros,
            ones,
            False,
            zeros,
            1,
            ctx.needs_input_grad[:3],
        )
        if folded is not None:
            folded = folded.movedim(1, -1)
            for axis in range(rank):
                for low, start, end, high, wraps in _ends(folded, axis, ctx.pads, ctx.ranges):
                    if wraps:
                        end.add_(low)
                        start.add_(high)
            folded = _inner(folded, ctx.pads)
        return (folded, for_kernel, for_bias, None, *[None] * len(ctx.ranges))


def _inner(x: Tensor, pads: Sequence[int]) -> Tensor:
    for axis, pad in enumerate(pads, start=1):
        x = x.narrow(axis, pad, x.shape[axis] - 2 * pad)
    return x


def _ends(x: Tensor, axis: int, pads: tuple[int, ...], ranges: tuple[Range, ...]) -> Any:
    """Views of the two halos of an axis and of the points next to them: low halo, first, last, high halo, wraps."""
    pad, dim = pads[axis], axis + 1
    if not pad:
        return
    # Later axes still have their halos: corners go around one axis after the other.
    slab = _inner(x, (*pads[:axis], *[0] * (len(pads) - axis)))
    size = x.shape[dim] - 2 * pad
    for first, stop, wraps in ranges:
        part = slab[first:stop]
        offsets = (0, pad, size, size + pad)
        low, start, end, high = (part.narrow(dim, offset, pad) for offset in offsets)
        yield low, start, end, high, wraps[axis]


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
        self.bias = nn.Parameter(torch.zeros(num_outputs)) if num_outputs else None
        # What `prepared` returned and where the weights lay, in a network whose weights stay (`Network.fix_weights`).
        self.kept: dict[tuple[int, torch.dtype], tuple[int, Tensor, Tensor | None]] | None = None

    def prepared(self, dims: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Kernel, as `arranged` gives it, and bias for fields of `dims` dimensions."""
        if self.kept is None or torch.is_grad_enabled():
            weight, axes = self.of(dims), dims if str(dims) in self.own else self.axes
            taps = reduced(self._taps(weight, axes), axes, dims, self.averages)
            bias = None if self.bias is None else self._with_idle(self.bias, dims).to(dtype)
            taps = self._with_idle(taps, dims) if bias is None else taps
            return self.arranged(taps.to(dtype), bias)
        stamp = self.weight.data_ptr()  # another one after the network was moved
        stored = self.kept.get((dims, dtype))
        if stored is None or stored[0] != stamp:
            with torch.enable_grad():
                kernel, bias = self.prepared(dims, dtype)
            stored = self.kept[dims, dtype] = (stamp, kernel.detach(), None if bias is None else bias.detach())
        return stored[1:]

    def arranged(self, taps: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """taps (rows, *size^dims, columns) as the matrix of a product, or as the kernel of a convolution; and the bias.

        A line keeps a first axis of length 1.
        """
        return taps.flatten(1), bias

    def of(self, dims: int) -> nn.Parameter:
        """The parameter that fields of `dims` dimensions take their kernel from."""
        parameter: nn.Parameter = self.own.get(str(dims), self.weight)
        return parameter

    def _with_idle(self, x: Tensor, dims: int) -> Tensor:
        """x, with the kernels of other dimensions in its graph: every parameter is in every graph."""
        if not self.own or not torch.is_grad_enabled():
            return x
        used = self.of(dims)
        for weight in (self.weight, *self.own.values()):
            if weight is not used and weight.requires_grad:
                x = x + 0.0 * weight.flatten()[0]  # one number of each is enough for the graph
        return x

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

    def arranged(self, taps: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return taps.movedim(-1, 1), bias

    def forward(self, x: Tensor, layout: Layout, sources: Sequence[Tensor]) -> Tensor:
        """(B, *grid, inputs) -> (B, *grid, outputs). sources: of the halo, for each range, see `Layout.sources`."""
        dtype = working_dtype(x, self.weight)
        kernel, bias = self.prepared(layout.dims, dtype)
        return convolved(x.to(dtype), kernel, bias, layout, sources)


def convolved(x: Tensor, kernel: Tensor, bias: Tensor | None, layout: Layout, sources: Sequence[Tensor]) -> Tensor:
    """x (B, *grid, inputs) convolved with a kernel (outputs, inputs, *sizes), an odd number of taps along each axis."""
    pads = [size // 2 for size in kernel.shape[2:]]
    if layout.wraps_nowhere:
        return _CONVOLVE[x.ndim](x.movedim(-1, 1), kernel, bias, padding=pads).movedim(1, -1)
    if not torch.is_grad_enabled():
        padded = with_halo(x, pads, layout.ranges, sources)
        return _CONVOLVE[x.ndim](padded.movedim(-1, 1), kernel, bias).movedim(1, -1)
    convolved_x: Tensor = HaloConvolution.apply(x, kernel, bias, layout.ranges, *sources)  # type: ignore[no-untyped-call]
    return convolved_x


class Shrink(GridKernel):
    """Two points along each axis -> one: a matrix product with the points of a cell side by side."""

    def __init__(self, inputs: int, outputs: int, dims: Sequence[int]) -> None:
        super().__init__(outputs, inputs, outputs, 2, dims, (inputs * 2 ** max(dims)) ** -0.5)

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """(B, *grid, inputs) -> (B, *grid / 2, outputs)."""
        dtype = working_dtype(x, self.weight)
        matrix, bias = self.prepared(layout.dims, dtype)
        return F.linear(_cells(x.to(dtype), _cell(layout)), matrix, bias)  # cells (B, *grid / 2, taps x inputs)


class Grow(GridKernel):
    """One point -> two along each axis."""

    averages = True

    def __init__(self, inputs: int, outputs: int, dims: Sequence[int]) -> None:
        super().__init__(inputs, outputs, outputs, 2, dims, inputs**-0.5)

    def arranged(self, taps: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return taps.flatten(1).T, None if bias is None else bias.repeat(taps[0, ..., 0].numel())

    def forward(self, x: Tensor, layout: Layout) -> Tensor:
        """(B, *grid, inputs) -> (B, *grid x 2, outputs)."""
        dtype = working_dtype(x, self.weight)
        matrix, bias = self.prepared(layout.dims, dtype)
        return _points(F.linear(x.to(dtype), matrix, bias), _cell(layout))  # of (B, *grid, taps x outputs)


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


class PointMatrix(GridKernel):
    """A matrix between the channels of each point, whose result is added to other points. Zero when new."""

    def __init__(self, inputs: int, outputs: int, dims: Sequence[int]) -> None:
        super().__init__(outputs, inputs, 0, 1, dims, 0.0)

    def forward(self, y: Tensor, x: Tensor, layout: Layout) -> Tensor:
        """x (B, *grid, outputs) and the product with y (B, *grid, inputs)."""
        dtype = working_dtype(y, self.weight)
        return plus_product(x, y.to(dtype), self.prepared(layout.dims, dtype)[0])


def plus_product(x: Tensor, y: Tensor, matrix: Tensor) -> Tensor:
    """x (..., N) + y (..., M) matrix^T, in one pass over memory where both have one type; matrix (N, M)."""
    if x.dtype != y.dtype or torch.is_autocast_enabled(x.device.type):
        return x + F.linear(y, matrix)
    return torch.addmm(x.flatten(0, -2), y.flatten(0, -2), matrix.T).view(x.shape)


class ResidualBlock(nn.Module):
    """x + B gelu((A x) scale + shift), with scale and shift from the condition; the identity when new.

    A is a convolution, B another one or a matrix at each point (`pointwise`).
    """

    def __init__(self, width: int, size: int, pointwise: bool, dims: Sequence[int]) -> None:
        super().__init__()
        self.inner = GridConvolution(width, width, size, dims)
        self.outer: PointMatrix | GridConvolution
        self.outer = PointMatrix(width, width, dims) if pointwise else GridConvolution(width, width, size, dims, True)
        self.num_modulations = 2 * width

    def forward(self, x: Tensor, modulation: Tensor, layout: Layout, *sources: Tensor) -> Tensor:
        """x (B, *grid, C), modulation (B, 1, .., 2 C), sources as in `GridConvolution` -> (B, *grid, C)."""
        y = self.inner(x, layout, sources)
        scale, shift = modulation.to(y.dtype).chunk(2, dim=-1)
        y = F.gelu(torch.addcmul(shift, y, scale))
        pointwise = isinstance(self.outer, PointMatrix)
        out: Tensor = self.outer(y, x, layout) if pointwise else x + self.outer(y, layout, sources)
        return out
