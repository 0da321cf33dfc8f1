"""Fields between the grid of the data and one whose points a network's strides or patches divide.

Around a periodic axis a field is resampled: its waves are evaluated at the points of the finer grid, and what comes
back are the waves that the data's grid can hold. So the finer grid wraps around exactly as the axis does; a field that
was continued past its end instead would have a seam there. Along any other axis it goes on at both ends with its last
values, and those points are left out again. A grid that fits is left as it is.

n points of the data along an axis, m of the fitted grid.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ups.models.constants import Constants
from ups.models.normalization import wide
from ups.spec.task import AxisSpec, TaskSpec


class GridFit:
    """The way between the grid of the data and one that `divisor` divides along each axis, of at least `least` points
    each."""

    def __init__(self, divisor: int, least: int = 1) -> None:
        self.divisor, self.least = divisor, least
        self._constants = Constants()

    def grid(self, space: Sequence[int]) -> tuple[int, ...]:
        """The smallest such grid that has all points of the space."""
        return tuple(-(-max(points, self.least) // self.divisor) * self.divisor for points in space)

    def onto(self, x: Tensor, task: TaskSpec) -> Tensor:
        """x (B, C, *S) of the data -> (B, C, *grid)."""
        for axis, (spec, points) in enumerate(zip(task.axes, self.grid(x.shape[2:]), strict=True)):
            x = self._onto(x, axis + 2, spec, points)
        return x

    def back(self, x: Tensor, task: TaskSpec, space: Sequence[int]) -> Tensor:
        """x (B, C, *grid) -> (B, C, *S)."""
        for axis, (spec, points) in enumerate(zip(task.axes, space, strict=True)):
            x = self._back(x, axis + 2, spec, points)
        return x

    def coordinates(self, coordinates: Sequence[Tensor], task: TaskSpec) -> tuple[Tensor, ...]:
        """One (n,) per axis -> where the points of the fitted grid are; beyond an end they repeat the last one."""
        grid = self.grid([len(c) for c in coordinates])
        return tuple(_places(c, axis, m) for c, axis, m in zip(coordinates, task.axes, grid, strict=True))

    def _onto(self, x: Tensor, dim: int, axis: AxisSpec, points: int) -> Tensor:
        size = x.shape[dim]
        if size == points:
            return x
        if axis.periodic:
            return self._resampled(x, dim, points, finer_grid_matrix)
        place = self._constants.index(
            lambda: (torch.arange(points) - _before(size, points)).clamp(0, size - 1).tolist(),
            ("place", size, points),
            x.device,
        )
        return x.index_select(dim, place)

    def _back(self, x: Tensor, dim: int, axis: AxisSpec, points: int) -> Tensor:
        size = x.shape[dim]
        if size == points:
            return x
        if axis.periodic:
            return self._resampled(x, dim, points, coarser_grid_matrix)
        return x.narrow(dim, _before(points, size), points)

    def _resampled(self, x: Tensor, dim: int, points: int, make: Callable[[int, int], Tensor]) -> Tensor:
        size, values = x.shape[dim], wide(x)
        matrix = self._constants.get(
            functools.partial(make, size, points), (make, size, points), x.device, values.dtype
        )
        with torch.autocast(x.device.type, enabled=False):
            return (values.movedim(dim, -1) @ matrix).movedim(-1, dim)


def _before(size: int, points: int) -> int:
    """Points that stand before the first one where `size` of them are continued at both ends to `points`."""
    return (points - size) // 2


def _places(coordinate: Tensor, axis: AxisSpec, points: int) -> Tensor:
    size = len(coordinate)
    if size == points:
        return coordinate
    if not axis.periodic:
        place = torch.arange(points, device=coordinate.device) - _before(size, points)
        return coordinate[place.clamp(0, size - 1)]
    around = torch.cat([coordinate, coordinate[:1] + axis.extent])
    place = torch.arange(points, dtype=coordinate.dtype, device=coordinate.device) * (size / points)
    low = place.floor().long().clamp(max=size - 1)
    return around[low] + (place - low) * (around[low + 1] - around[low])


def finer_grid_matrix(size: int, points: int) -> Tensor:
    """(size, points) in float64: values around a periodic axis -> their waves at the points of a finer grid."""
    return _kernel(size, _distances(size, points), 1.0) / size


def coarser_grid_matrix(size: int, points: int) -> Tensor:
    """(size, points): values around a periodic axis -> those of their waves that fewer points can hold.

    The inverse of `finer_grid_matrix` on what that makes.
    """
    # The wave of Nyquist's frequency is one on the coarser grid, and two, of both signs, on the finer one.
    return _kernel(points, _distances(size, points), 2.0) / size


def _distances(size: int, points: int) -> Tensor:
    """(size, points): from each point of one grid to each of the other, as an angle around the axis."""
    ours = torch.arange(size, dtype=torch.float64) / size
    theirs = torch.arange(points, dtype=torch.float64) / points
    return 2 * math.pi * (theirs - ours[:, None])


def _kernel(count: int, angle: Tensor, of_highest: float) -> Tensor:
    """The waves that `count` points hold, added up at some angles; the highest of an even number `of_highest` times."""
    total = torch.ones_like(angle)
    for wave in range(1, (count + 1) // 2):
        total += 2 * torch.cos(wave * angle)
    return total if count % 2 else total + of_highest * torch.cos(count // 2 * angle)
