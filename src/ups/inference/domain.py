"""Whether an input stands on the domain that a model was trained on: the same, resampled, mapped, or refused.

A model knows the number of a point, not its coordinate: given a longer, shifted or irregular axis it computes the same
numbers as before, and only the label would be wrong. So coordinates are compared with those of the training grid, and
what differs is never relabeled. Another number of points is resampled around a periodic axis, and refused along any
other (docs/decisions/0022-inputs-are-resampled-to-the-training-grid.md).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ups.errors import BundleError
from ups.models.grid_fit import Resampling
from ups.spec.grid import units_differ
from ups.spec.task import AxisSpec, TaskSpec

Float64 = npt.NDArray[np.float64]
# A point counts as being where it should be within this part of a cell: coordinates are often stored as float32.
TOLERANCE = 0.01
# Points of an input around a periodic axis, in those of the training grid: with fewer the error of burgers1d is 9 times
# as large, and more were not measured (benchmarks/model/other_grid.py).
FEWEST, MOST = 1 / 4, 8
INTERPOLATE = "interpolate the fields to the training grid"
RESCALE_HINT = "convert the coordinates, or map them with {}; the physics is not rescaled with them"


@dataclass(frozen=True)
class Domain:
    """The grid of a rollout, one (n,) array per axis.

    coordinates: what the result carries; trained: what the model is given, always the training grid.
    resampling: between the two. rescaled: in words, how the first was mapped to the second; '' if it is the same
    domain. assumed: axes that came without coordinates.
    """

    coordinates: tuple[Float64, ...]
    trained: tuple[Float64, ...]
    resampling: Resampling
    rescaled: str = ""
    assumed: tuple[str, ...] = ()


def is_dataset(value: Any) -> bool:
    return _is_xarray(value, "Dataset")


def is_array(value: Any) -> bool:
    """Whether a value is one array of xarray, whose dimensions have names."""
    return _is_xarray(value, "DataArray", "Variable")


def labeled_in(label: str, value: Any) -> dict[str, Any]:
    """What has coordinates of xarray in an input, by a name for messages: the input, or fields of a mapping."""
    parts = {label: value}
    if isinstance(value, Mapping) and not is_dataset(value):
        parts = {f"{label} '{name}'": part for name, part in value.items()}
    return {name: part for name, part in parts.items() if _is_xarray(part, "Dataset", "DataArray")}


def _is_xarray(value: Any, *kinds: str) -> bool:
    module = sys.modules.get("xarray")  # without it there are no objects of it; subclasses come from any module
    return module is not None and isinstance(value, tuple(getattr(module, kind) for kind in kinds))


def check_units(what: str, value: Any, expected: str) -> None:
    """Raises BundleError if an object of xarray states another unit than the task."""
    stated = str(getattr(value, "attrs", {}).get("units", ""))
    if units_differ(stated, expected):
        raise BundleError(f"{what} is in '{stated[:40]}', and the model was trained in '{expected}'", hint="convert it")


def given_coordinates(task: TaskSpec, explicit: Any, inputs: Mapping[str, Any]) -> dict[str, Float64]:
    """Axis -> coordinates, of all that an input says about them; two sources that disagree are refused.

    explicit: a mapping from axis to values, or None. inputs: label -> what was given as state or static fields; those
    of xarray carry coordinates, also as values of a dict.
    """
    sources: dict[str, tuple[str, Float64]] = {}
    for label, source in _sources(task, explicit, inputs):
        for axis in task.axes:
            if axis.name not in source:
                continue
            check_units(f"coordinate '{axis.name}'", source[axis.name], axis.unit)
            values = _values(source[axis.name], axis.name)
            if axis.name in sources and not _close(values, sources[axis.name][1]):
                raise BundleError(f"{sources[axis.name][0]} and {label} have different coordinates '{axis.name}'")
            sources[axis.name] = (label, values)
    return {name: values for name, (_, values) in sources.items()}


def _sources(task: TaskSpec, explicit: Any, inputs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    sources: list[tuple[str, Any]] = []
    if explicit is not None:
        known = [a.name for a in task.axes]
        if not isinstance(explicit, Mapping) or not set(explicit) <= set(known):
            raise BundleError(f"coordinates must be a dict with one list of numbers for each of {', '.join(known)}")
        sources.append(("coordinates=", explicit))
    for label, value in inputs.items():
        sources += [(name, part.coords) for name, part in labeled_in(label, value).items()]
    return sources


def _values(value: Any, name: str) -> Float64:
    value = value.detach().cpu().numpy() if isinstance(value, Tensor) else getattr(value, "values", value)
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError) as error:
        raise BundleError(f"coordinate '{name}' must be one increasing list of numbers") from error
    if array.ndim != 1 or not np.isfinite(array).all() or (np.diff(array) <= 0).any():
        raise BundleError(f"coordinate '{name}' must be one increasing list of numbers")
    return array


def fit_domain(
    task: TaskSpec, trained: tuple[Float64, ...], space: tuple[int, ...], axes: Mapping[str, Float64], *, rescale: bool
) -> Domain:
    """The grid of a rollout over `space` points. Raises BundleError for a domain that is not the trained one, and for a
    grid that cannot be resampled to the training grid.

    trained: coordinates of the training grid; axes: axis -> coordinates of the input, where it has them.
    rescale: map another domain to the trained one, if that is a change of the unit of length or of the origin.
    """
    _check_grid(task, tuple(len(known) for known in trained), space)
    coordinates, offsets, mapped = [], [], []
    factors: dict[str, float] = {}
    for axis, known, points in zip(task.axes, trained, space, strict=True):
        expected = regrid(known, points, axis)
        values = axes.get(axis.name, expected)
        first = values[0]
        if len(values) != points:
            raise BundleError(f"coordinate '{axis.name}' has {len(values)} values for {points} points of the fields")
        if values is not expected and not _same(axis, known, values, expected, "translation" in task.symmetries):
            _refuse(task, axis, known, values, rescale=rescale)
            factors[axis.name] = axis_length(values, axis, known) / axis_length(known, axis, known)
            mapped.append(f"{axis.name} from {_ends(values)} to {_ends(expected)}")
            first = expected[0]
        coordinates.append(values)
        offsets.append(float(known[0] - first) / axis_length(known, axis, known))
    _check_one_unit(task, factors, axes)
    assumed = tuple(a.name for a in task.axes if a.name not in axes)
    resampling = Resampling(task, space, [len(known) for known in trained], offsets)
    return Domain(tuple(coordinates), trained, resampling, ", ".join(mapped), assumed)


def _check_grid(task: TaskSpec, trained: tuple[int, ...], space: tuple[int, ...]) -> None:
    """Raises BundleError for a grid that looks transposed, or that cannot be resampled to the training grid."""
    names, problem, hint = [axis.name for axis in task.axes], "", INTERPOLATE
    for axis, points, known in zip(task.axes, space, trained, strict=True):
        if points == 0:
            problem = f"the fields have no points along '{axis.name}'"
        elif points != known and not axis.periodic:
            problem = f"the number of points along '{axis.name}' ({axis.boundary_text}) cannot change"
        elif not FEWEST * known <= points <= MOST * known:
            problem = f"the grid is too {'fine' if points > known else 'coarse'} along '{axis.name}'"
    if _transposed(space, trained):
        problem, hint = "the fields are transposed", f"give them in the order {', '.join(names)}, or {hint}"
    if problem:
        grids = f"{points_text(space)} points were given, and task '{task.name}' was trained on {points_text(trained)}"
        raise BundleError(f"{problem}: {grids}", hint=hint)


def _transposed(space: tuple[int, ...], trained: tuple[int, ...]) -> bool:
    """Whether only another order of the axes is the training grid, or finer or coarser than it by one factor."""

    def alike(order: tuple[int, ...]) -> bool:
        return len({n / points for n, points in zip(order, trained, strict=True)}) == 1

    return not alike(space) and any(map(alike, itertools.permutations(space)))


def points_text(space: tuple[int, ...]) -> str:
    """'24 x 16'."""
    return " x ".join(str(n) for n in space)


def regrid(known: Float64, points: int, axis: AxisSpec) -> Float64:
    """The training grid's coordinates for another number of points around a periodic axis: the same period."""
    if points == len(known):
        return known
    if not _uniform(known):
        raise BundleError(
            f"the model was trained on {len(known)} points of unequal spacing along '{axis.name}', not on {points}",
            hint=INTERPOLATE,
        )
    length = axis_length(known, axis, known)
    # Centers of cells stay centers, if the period begins at 0 or half a period from it; else the first point stays.
    halves = (float(known[0]) - _spacing(known) / 2) / (length / 2)
    centered = abs(halves - round(halves)) * length / 2 <= TOLERANCE * _spacing(known)
    first = float(known[0]) + (length / points - _spacing(known)) / 2 * centered
    return np.asarray(first + np.arange(points) * length / points)


def _spacing(values: Float64) -> float:
    return float(values[-1] - values[0]) / (len(values) - 1)


def on_nodes(known: Float64, axis: AxisSpec) -> bool:
    """Whether the training grid of a bounded axis has points on both ends of it, rather than in the middle of cells."""
    span = float(known[-1] - known[0])
    return not axis.periodic and abs(span - axis.extent) < abs(span + _spacing(known) - axis.extent)


def axis_length(values: Float64, axis: AxisSpec, known: Float64) -> float:
    """Length of the domain that `values` stand for, if they follow the convention of the training grid `known`."""
    return float(values[-1] - values[0]) + (0.0 if on_nodes(known, axis) else _spacing(values))


def _close(a: Float64, b: Float64) -> bool:
    """Whether all points agree to a part (TOLERANCE) of the smallest cell."""
    return len(a) == len(b) and bool(np.abs(a - b).max() <= TOLERANCE * float(np.diff(b).min(initial=np.inf)))


def _same(axis: AxisSpec, known: Float64, values: Float64, expected: Float64, translation: bool) -> bool:
    if _close(values, expected):
        return True
    if not axis.periodic:
        return False
    first = expected - expected[0] + known[0]  # the first point stays, or centers of cells stay centers
    if any(_close(values, first + shift) for shift in (0.0, (_spacing(expected) - _spacing(known)) / 2)):
        return True
    # Where all places are equal, a grid that starts elsewhere within the first cell is the same domain.
    shift = float(values[0] - expected[0])
    return translation and abs(shift) <= _spacing(expected) and _close(values - shift, expected)


def _refuse(task: TaskSpec, axis: AxisSpec, known: Float64, values: Float64, *, rescale: bool) -> None:
    """Raises BundleError unless rescaling was asked for and an affine map leads to the training grid."""
    alike = len(values) == len(known)
    if not _close(_pattern(values), _pattern(known) if alike else np.arange(len(values), dtype=np.float64)):
        kind = "is not the training grid" if alike and not _uniform(known) else "is not uniform"
        steps = np.diff(values)
        raise BundleError(
            f"coordinate '{axis.name}' {kind}: its spacing goes from {steps.min():.4g} to {steps.max():.4g}, "
            f"and task '{task.name}' was trained on {_describe(known, axis)}",
            hint=INTERPOLATE,
        )
    mistake = _wrong_ends(axis, known, values)
    if mistake or not rescale:
        reason = mistake[0] if mistake else "is another domain"
        raise BundleError(
            f"coordinate '{axis.name}' {reason}: {_describe(values)} were given, and task '{task.name}' was trained on "
            f"{_describe(known, axis)}",
            hint=mistake[1] if mistake else RESCALE_HINT.format("rescale_domain=True"),
            command_hint="" if mistake else RESCALE_HINT.format("--rescale-domain"),
        )


def _pattern(values: Float64) -> Float64:
    """Where points stand between the first (0) and the last (number of points - 1)."""
    return np.asarray((values - values[0]) / (values[-1] - values[0]) * (len(values) - 1))


def _uniform(values: Float64) -> bool:
    return _close(_pattern(values), np.arange(len(values), dtype=np.float64))


def _wrong_ends(axis: AxisSpec, known: Float64, values: Float64) -> tuple[str, str] | None:
    """What is wrong, and what to do, if the input covers the trained domain but places its points by another rule."""
    near = TOLERANCE * _spacing(values)
    half, cell = _spacing(known) / 2, _spacing(values) / 2
    if axis.periodic:
        if abs(float(values[-1] - values[0]) - axis_length(known, axis, known)) <= near:
            hint = f"leave the last point out: dataset.isel({axis.name}=slice(None, -1))"
            return "repeats the first point of a periodic axis at its end", hint
    elif on_nodes(known, axis):
        if abs(values[0] - cell - known[0]) <= near and abs(values[-1] + cell - known[-1]) <= near:
            return "has centers of cells, and the training grid has points on the boundary", INTERPOLATE
    elif abs(values[0] - (known[0] - half)) <= near and abs(values[-1] - (known[-1] + half)) <= near:
        return "has points on the boundary, and the training grid has centers of cells", INTERPOLATE
    return None


def _check_one_unit(task: TaskSpec, factors: Mapping[str, float], coordinates: Mapping[str, Float64]) -> None:
    """A change of the unit of length stretches all axes alike; anything else would be another equation."""
    if not factors:
        return
    stretched = {a.name: factors.get(a.name, 1.0) for a in task.axes if a.name in coordinates}
    low, high = min(stretched.values()), max(stretched.values())
    if high - low > 1e-3 * high:
        words = ", ".join(f"{name} by {factor:.4g}" for name, factor in stretched.items())
        raise BundleError(
            f"the domain cannot be rescaled: its axes are stretched differently ({words}): not a change of unit",
            hint=INTERPOLATE,
        )


def _ends(values: Float64) -> str:
    return f"[{values[0]:.6g}, {values[-1]:.6g}]"


def _describe(values: Float64, axis: AxisSpec | None = None) -> str:
    text = f"{len(values)} points from {values[0]:.6g} to {values[-1]:.6g}"
    return text if axis is None else f"{text} ({axis.boundary_text}, length {axis_length(values, axis, values):.6g})"
