"""Grids and labels: the part of the domain that each point of a grid stands for, and names and units in files.

On a uniform grid every point counts alike, so that means over points are means over the domain: nothing is weighted,
also where an axis has points on both of its ends. On any other grid a point counts by the width of its cell.

Labels are attributes of the CF conventions. Time is a plain number without a calendar: it has `axis="T"`, and neither a
standard name nor a reference date, which would make it a date.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ups.spec.batch import Float64
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

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


CONVENTIONS = "CF-1.11"
COMPONENT = "component"
_AXES = {"x": "X", "y": "Y", "z": "Z"}
# Spelled out, readers take them for durations and turn numbers into something else.
_TIME_UNITS = {"days": "d", "hours": "h", "minutes": "min", "seconds": "s", "milliseconds": "ms", "microseconds": "us"}
_SPELLED = {**_TIME_UNITS, "meters": "m", "metres": "m"}
_NO_UNIT = ("", "1", "-", "none", "dimensionless")


def units_differ(one: str, other: str) -> bool:
    """Whether two units are both stated and not the same, up to spelling: `m/s`, `m s-1`, `m*s**-1` are the same."""
    one, other = (unit.partition(" since ")[0].strip() for unit in (one, other))
    return not {one.lower(), other.lower()} & set(_NO_UNIT) and _powers(one) != _powers(other)


def _powers(unit: str) -> dict[str, int] | str:
    """Symbol -> power of a product of units; the text itself if it is written in another way."""
    powers: dict[str, int] = {}
    sign = 1
    for text in re.findall(r"/|[^\s*.\u00b7/]+", unit.replace("**", "^")):
        part = re.fullmatch(r"([^\W\d]+|%)\^?([+-]?\d)?", text)
        if part:
            symbol = _SPELLED.get(part[1].removesuffix("s") + "s", part[1])
            powers[symbol] = powers.get(symbol, 0) + sign * int(part[2] or 1)
        elif text not in ("/", "1"):
            return unit
        sign = -1 if text == "/" else 1
    return {symbol: power for symbol, power in powers.items() if power}


def axis_attributes(axis: AxisSpec) -> dict[str, Any]:
    """Of a coordinate in space."""
    letter = {"axis": _AXES[axis.name]} if axis.name in _AXES else {}
    return {"long_name": f"{axis.name} coordinate", "units": axis.unit, **letter}


def time_attributes(task: TaskSpec) -> dict[str, Any]:
    """Of the time coordinate."""
    return {"long_name": "time", "units": _TIME_UNITS.get(task.time_unit, task.time_unit), "axis": "T"}


def field_attributes(field: FieldSpec | ParameterSpec) -> dict[str, Any]:
    """Of a field or a parameter."""
    return {"long_name": field.name.replace("_", " "), "units": field.unit}


def component_dim(task: TaskSpec, field: FieldSpec) -> tuple[str, ...]:
    """The dimension of a field's components, () for a scalar. Vectors and tensors of one task differ in their number:
    then tensors have a dimension of their own."""
    if not field.tensor_rank:
        return ()
    both = field.tensor_rank == 2 and any(other.tensor_rank == 1 for other in task.fields)
    return (f"tensor_{COMPONENT}" if both else COMPONENT,)


def component_labels(task: TaskSpec, field: FieldSpec) -> list[str]:
    """What the components of a field are called: x, y of a vector; x_x, x_y, ... of a tensor; none of a scalar."""
    labels = [""] if field.tensor_rank else []
    for _ in range(field.tensor_rank):
        labels = [f"{label}_{axis.name}" if label else axis.name for label in labels for axis in task.axes]
    return labels
