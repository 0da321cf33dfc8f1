"""What is no field on a full grid, though its arrays look like one: meshes, scattered points, obstacles. Refused, with
what to do; what a person describes by --dims or a task.yaml is not held against these checks."""

from __future__ import annotations

import numpy as np

from ups.config.description import TRAJECTORY
from ups.data.guess_dims import Dims, plain
from ups.errors import DataError
from ups.formats.base import Array
from ups.formats.container import MAX_SMALL_VALUES, Container, Variable

_CELLS = frozenset(
    {"cells", "connectivity", "topology", "triangles", "tri", "tets", "elements", "faces", "simplices", "edge_index"}
)
_POINTS = frozenset({"points", "nodes", "vertices", "coords", "coordinates", "positions", "pos", "xy", "xyz"})
_AXES = {"x": 0, "y": 1, "z": 2, "lon": 0, "lat": 1, "longitude": 0, "latitude": 1}
_MESH_HINT = (
    "interpolate the fields to a grid, with scipy.interpolate.griddata, and save them as (trajectory, time, x, y) with "
    "x and y; if they are on a grid already, say what each dimension is, as in --dims trajectory,time,x"
)
MASK_HINT = (
    "replace those values by a number that suits the field, such as 0 for a velocity, and save the mask (1 in the "
    "obstacle, else 0) as an array without time: it becomes a static field that the model is given"
)
# A number that stands for a missing value is this many times farther from the others than they are from each other.
_FAR = 10


def refuse_mesh(container: Container) -> None:
    """Raise DataError for a file with an array that connects points to cells."""
    for name, variable in container.variables.items():
        if _connects(container, variable, name.split("/")[-1].lower() in _CELLS):
            raise DataError(
                f"{container.label} holds a mesh, which is not read: '{name}' {variable.shape} connects its points",
                hint=_MESH_HINT,
            )


def _connects(container: Container, variable: Variable, named: bool) -> bool:
    """Whether an array holds numbers of points; without a name that says so, each of as many as another array has."""
    cells = (len(variable.shape) == 2 and 2 <= min(variable.shape) <= 8) or (named and len(variable.shape) == 1)
    if not cells or not 8 <= variable.size <= MAX_SMALL_VALUES:
        return False
    values = container.whole(variable.name)
    if not (values == np.round(values)).all() or values.min() < 0:
        return False
    sizes = {n for v in container.variables.values() if v is not variable for n in v.shape}
    count = len(np.unique(values))
    return named or (
        values.min() <= 1
        and count == np.ptp(values) + 1
        and {count} <= sizes
        and count > 16
        and max(variable.shape) not in sizes
    )


def refuse_scattered(container: Container, main: Variable, dims: Dims) -> None:
    """Raise DataError for a file in which one dimension of a field has several coordinates."""
    for i, size in enumerate(main.shape):
        points = dims.role[i] == "space" and dims.role.count("space") == 1
        points |= dims.role[i] == TRAJECTORY and (len(main.shape) == 2 or size == max(main.shape))
        if not points or main.shape.count(size) > 1 or size < 8:
            continue
        rows = {plain(n): n for n, v in container.variables.items() if v.as_row.shape == (size,) and plain(n) in _AXES}
        tables = [
            n
            for n, v in container.variables.items()
            if n.split("/")[-1].lower() in _POINTS and sorted(v.shape) in ([2, size], [3, size])
        ]
        if tables or len({_AXES[name] for name in rows}) > 1:
            listed = ", ".join(f"'{n}'" for n in tables or rows.values())
            raise DataError(
                f"{container.label} holds scattered points, which are not read: {listed} are coordinates of the {size} "
                f"entries of one dimension of '{main.name}' {main.shape}",
                hint=_MESH_HINT,
            )


def refuse_mask(values: Array, where: str) -> None:
    """Raise DataError if the same points of frames (N, T, C, *S) have no value in every frame of a trajectory."""
    missing, what = masked(values), "not finite"
    channels = () if missing.any() else np.moveaxis(values, 2, 0)
    for channel in channels:
        for mark in (channel.min(), channel.max()):
            others = channel[channel != mark]
            far = others.size and np.abs(others - mark).min() > _FAR * np.ptp(others) > 0
            if far and (channel == mark).all(axis=1).any():
                missing, what = (channel == mark).all(axis=1), f"{mark:g}, far from all others,"
    if missing.any():
        first = missing[missing.any(axis=tuple(range(1, missing.ndim)))][0]
        raise DataError(
            f"{where}: {np.count_nonzero(first)} of {first.size} values of a frame are {what} in every frame: an "
            "obstacle or a mask, which is not read",
            hint=MASK_HINT,
        )


def masked(values: Array) -> Array:
    """(N, C, *S) whether a value of frames (N, T, C, *S) is in no frame finite, while others of its trajectory are."""
    bad = ~np.isfinite(values)
    return np.asarray(bad.all(axis=1) & ~bad.all(axis=tuple(range(1, bad.ndim)), keepdims=True)[:, 0])
