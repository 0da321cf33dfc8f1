"""Names, units and axes of a task as scientists' tools expect them in a file: attributes of the CF conventions.

Time is a plain number without a calendar: it has `axis="T"`, and neither a standard name nor a reference date, which
would make it a date.
"""

from __future__ import annotations

import re
from typing import Any

from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

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
    found: dict[str, int] = {}
    sign = 1
    for text in re.findall(r"/|[^\s*.\u00b7/]+", unit.replace("**", "^")):
        part = re.fullmatch(r"([^\W\d]+|%)\^?([+-]?\d)?", text)
        if part:
            symbol = _SPELLED.get(part[1].removesuffix("s") + "s", part[1])
            found[symbol] = found.get(symbol, 0) + sign * int(part[2] or 1)
        elif text not in ("/", "1"):
            return unit
        sign = -1 if text == "/" else 1
    return {symbol: power for symbol, power in found.items() if power}


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
