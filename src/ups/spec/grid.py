"""Uniform grids and others: the part of the domain that each point of a grid stands for.

On a uniform grid every point counts alike, so that means over points are means over the domain: nothing is weighted,
also where an axis has points on both of its ends. On any other grid a point counts by the width of its cell.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from ups.spec.batch import Float64
from ups.spec.task import AxisSpec

# Largest difference of spacings, relative to their mean, on a grid that counts as uniform.
UNEVEN = 1e-3


def is_uniform(coordinate: Float64) -> bool:
    """Whether the points of an axis are equally far from each other."""
    steps = np.diff(np.asarray(coordinate, np.float64))
    return bool(len(steps) > 0 and np.abs(steps - steps.mean()).max() <= UNEVEN * abs(steps.mean()))


def uneven_axes(axes: Sequence[AxisSpec], coordinates: Sequence[Float64]) -> list[str]:
    """Names of the axes whose points are not equally far from each other."""
    return [axis.name for axis, values in zip(axes, coordinates, strict=True) if not is_uniform(values)]


def cell_widths(coordinate: Float64, axis: AxisSpec) -> Float64:
    """(n,) part of the axis that each point stands for; their sum is 1.

    Cells meet in the middle between two points. What the extent has beyond the first and the last point belongs to
    those; around a periodic axis the last cell meets the first.
    """
    x = np.asarray(coordinate, np.float64)
    if is_uniform(x):
        return np.full(len(x), 1 / len(x))
    inner = np.diff(x) / 2
    beyond = max(0.0, axis.extent - float(x[-1] - x[0])) / 2
    width = np.concatenate([[beyond], inner]) + np.concatenate([inner, [beyond]])
    return np.asarray(width / width.sum())


def point_weights(axes: Sequence[AxisSpec], coordinates: Sequence[Float64]) -> Float64 | None:
    """(*S) part of the domain that each point stands for, relative to the mean; None on a uniform grid."""
    if not uneven_axes(axes, coordinates):
        return None
    widths = [cell_widths(values, axis) * len(values) for axis, values in zip(axes, coordinates, strict=True)]
    return functools.reduce(np.multiply.outer, widths)
