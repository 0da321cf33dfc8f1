"""Fields between two grids: that of the data and one that a network's strides divide (`GridFit`), or that of an input
and the training grid (`Resampling`).

Around a periodic axis a field is resampled: its waves are evaluated at the points of the finer grid, and what comes
back are the waves that the data's grid can hold. So the finer grid wraps around exactly as the axis does; a field that
was continued past its end instead would have a seam there. Along any other axis it continues at both ends with its last
values, and those points are left out again. A grid that fits is left as it is. Between the grids of an input and of the
training only periodic axes may differ.

n points of the data along an axis, m of the fitted grid.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ups.models.constraints import not_negative
from ups.models.normalization import Constants, wide, without_autocast
from ups.spec.task import AxisSpec, Role, TaskSpec


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
        if axis.periodic or size == points:
            return _resampled(x, dim, points, 0.0, self._constants)
        place = self._constants.index(
            lambda: (torch.arange(points) - _before(size, points)).clamp(0, size - 1).tolist(),
            ("place", size, points),
            x.device,
        )
        return x.index_select(dim, place)

    def _back(self, x: Tensor, dim: int, axis: AxisSpec, points: int) -> Tensor:
        if axis.periodic or x.shape[dim] == points:
            return _resampled(x, dim, points, 0.0, self._constants)
        return x.narrow(dim, _before(points, x.shape[dim]), points)


class Resampling:
    """The way between the grid of an input and the training grid, which differ in points around periodic axes.

    given, trained: points along each axis. offsets: from the first point of the given grid to that of the training
    grid, as a part of the axis. Waves that only one of the grids can hold are left out; none is folded onto another.
    """

    def __init__(self, task: TaskSpec, given: Sequence[int], trained: Sequence[int], offsets: Sequence[float]) -> None:
        self.task, self.given, self.trained, self.offsets = task, tuple(given), tuple(trained), tuple(offsets)
        self._constants = Constants()

    def onto(self, x: Tensor, role: Role) -> Tensor:
        """Fields of a role (..., C, *given) -> (..., C, *trained)."""
        return self._moved(x, role, self.trained, 1.0)

    def back(self, x: Tensor, role: Role) -> Tensor:
        """Fields of a role (..., C, *trained) -> (..., C, *given)."""
        return self._moved(x, role, self.given, -1.0)

    def _moved(self, x: Tensor, role: Role, space: tuple[int, ...], sign: float) -> Tensor:
        if self.given == self.trained:
            return x
        for axis, (points, offset) in enumerate(zip(space, self.offsets, strict=True)):
            x = _resampled(x, x.ndim - len(space) + axis, points, sign * offset, self._constants)
        if role != "state":
            return x
        # A steep field that is never negative rings below 0 between its points.
        frames = x.flatten(0, x.ndim - len(space) - 2)  # (N, C, *S)
        return not_negative(frames, self.task, conserve=True).reshape(x.shape)


def _resampled(x: Tensor, dim: int, points: int, offset: float, constants: Constants) -> Tensor:
    if x.shape[dim] == points:
        return x
    key, values = (x.shape[dim], points, offset), wide(x)
    matrix = constants.get(functools.partial(resampling_matrix, *key), key, x.device, values.dtype)
    with without_autocast(x.device):
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


def resampling_matrix(size: int, points: int, offset: float = 0.0) -> Tensor:
    """(size, points) in float64: values around a periodic axis -> those of their waves that both grids hold.

    offset: from the first of the `size` points to the first of the others, as a part of the axis. The way back is the
    inverse, on what came from the coarser grid.
    """
    ours = torch.arange(size, dtype=torch.float64) / size
    theirs = torch.arange(points, dtype=torch.float64) / points + offset
    angle = 2 * math.pi * (theirs - ours[:, None])
    total, count = torch.ones_like(angle), min(size, points)
    for wave in range(1, (count + 1) // 2):
        total += 2 * torch.cos(wave * angle)
    if count % 2 == 0:
        # The wave of Nyquist's frequency is one on the coarser grid, and two, of both signs, on the finer one.
        total += (1.0 if points > size else 2.0) * torch.cos(count // 2 * angle)
    return total / size
