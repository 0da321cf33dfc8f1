"""The files of a data set of The Well as one task: what they share, and what is assumed where they differ."""

from __future__ import annotations

import numpy as np

from ups.errors import DataError
from ups.formats.described_layout import same_points
from ups.formats.hdf5_guard import FileKey
from ups.formats.the_well_fields import plain
from ups.formats.the_well_layout import WellLayout
from ups.spec.task import AxisSpec, Boundary, FieldSpec, ParameterSpec, Scale, TaskSpec

# A parameter whose values spread further than this is told to a model on a logarithmic scale.
LOG_RATIO = 20.0


def check_same(layouts: list[tuple[FileKey, WellLayout]]) -> None:
    """Raises DataError for files that cannot be one task."""
    first_key, first = layouts[0]
    for key, layout in layouts[1:]:
        if layout.axes != first.axes or [len(c) for c in layout.coordinates] != [len(c) for c in first.coordinates]:
            what = "grid"
        elif _specs(layout) != _specs(first):
            what = "fields"
        else:
            continue
        raise DataError(
            f"{key[0]} and {first_key[0]} have different {what}",
            hint="files of one task may differ in parameters, length and time step; make them two tasks",
        )


def _specs(layout: WellLayout) -> list[FieldSpec]:
    return [spec for field in layout.fields for spec in field.specs]


def task_of(layouts: list[WellLayout], names: list[str], dt: float) -> TaskSpec:
    """The task of files with the same fields and grid. names: of parameters that every file has."""
    first = layouts[0]
    fields = tuple(_specs(first))
    axes = []
    for number, axis in enumerate(first.axes):
        points = first.coordinates[number]
        ends = {layout.ends[number] for layout in layouts}
        boundary: tuple[Boundary, Boundary] = ends.pop() if len(ends) == 1 else ("unknown", "unknown")
        axes.append(AxisSpec(axis, boundary, float((points[-1] - points[0]) * len(points) / (len(points) - 1))))
    # Fields, axes and parameters stand next to each other in results, so a name is given once.
    taken = {"time", *(field.name for field in fields), *first.axes}
    parameters = []
    for name in names:
        values = np.concatenate([layout.parameters[name] for layout in layouts])
        low, high = float(values.min()), float(values.max())
        free = plain(name, "parameter")
        while free in taken:
            free = f"{free[:50]}_parameter"
        taken.add(free)
        scale: Scale = "log" if low > 0 and high / low >= LOG_RATIO else "linear"
        parameters.append(ParameterSpec(free, minimum=low, maximum=high, scale=scale))
    return TaskSpec(first.name, fields, tuple(axes), tuple(parameters), dt)


def assumptions_of(layouts: list[WellLayout], names: list[str]) -> tuple[str, ...]:
    """What is taken for granted about the files, each sentence once."""
    first = layouts[0]
    found = list(dict.fromkeys(text for layout in layouts for text in layout.assumptions))
    for number, axis in enumerate(first.axes):
        points = first.coordinates[number]
        if any(not same_points(layout.coordinates[number], points) for layout in layouts):
            found.append(f"the points along {axis} differ between files: those of the first file are taken")
        if len({layout.ends[number] for layout in layouts}) > 1:
            found.append(f"files differ in what happens at the ends of {axis}: taken as unknown")
    lost = sorted({n for layout in layouts for n in layout.parameters} - set(names))
    if lost:
        found.append(f"not used, because not every file has it: {', '.join(lost)[:200]}")
    return tuple(found)
