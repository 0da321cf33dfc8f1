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
    for name, v in container.variables.items():
        if _connects(container, v, name.split("/")[-1].lower() in _CELLS):
            what = f"{container.label} holds a mesh, which is not read: '{name}' {v.shape} connects its points"
            raise DataError(what, hint=_MESH_HINT)


def _connects(container: Container, variable: Variable, named: bool) -> bool:
    """Whether an array holds numbers of points; without a name that says so, each of as many as another array has."""
    cells = (len(variable.shape) == 2 and 2 <= min(variable.shape) <= 8) or (named and len(variable.shape) == 1)
    if not cells or not 8 <= variable.size <= MAX_SMALL_VALUES:
        return False
    values = container.whole(variable.name)
    if (values != np.round(values)).any() or values.min() < 0:
        return False
    sizes = {n for v in container.variables.values() if v is not variable for n in v.shape}
    count = len(np.unique(values))
    all_used = values.min() <= 1 and count == np.ptp(values) + 1 and count > 16
    return named or bool(all_used and count in sizes and max(variable.shape) not in sizes)


def refuse_scattered(container: Container, main: Variable, dims: Dims) -> None:
    """Raise DataError for a file in which one dimension of a field has several coordinates."""
    arrays = container.variables.items()
    gridded = any(role == "space" and name for role, name in zip(dims.role, dims.coordinate, strict=True))
    for role, size in zip(dims.role, main.shape, strict=True):
        points = role == "space" and dims.role.count("space") == 1
        # Points in no order look like trajectories.
        points |= role == TRAJECTORY and not gridded and (len(main.shape) == 2 or size == max(main.shape))
        if not points or main.shape.count(size) > 1 or size < 8:
            continue
        rows = {plain(n): n for n, v in arrays if v.as_row.shape == (size,) and plain(n) in _AXES}
        named = [(n, sorted(v.shape)) for n, v in arrays if n.split("/")[-1].lower() in _POINTS]
        tables = [n for n, shape in named if shape in ([2, size], [3, size])]
        if tables or len({_AXES[name] for name in rows}) > 1:
            raise DataError(
                f"{container.label} holds scattered points, which are not read: {', '.join(tables or rows.values())} "
                f"are coordinates of the {size} entries of one dimension of '{main.name}' {main.shape}",
                hint=_MESH_HINT,
            )


def refuse_meshgrid(container: Container) -> None:
    """Raise DataError for coordinates that are stored for every point of a grid of several axes."""
    tables = {
        n: v.shape for n, v in container.variables.items() if plain(n) in _AXES and min(v.shape[:2], default=1) > 1
    }
    if len(tables) > 1 and len({*tables.values()}) == 1 and len(next(iter(tables.values()))) > 1:
        raise DataError(
            f"{container.label}: {', '.join(tables)} have a value for each point of a grid, and coordinates are one "
            "vector for each axis",
            hint="on a rectangular grid save x = X[:, 0] and y = Y[0, :]; interpolate fields on a curved grid to a "
            "rectangular one, with scipy.interpolate.griddata",
        )


def refuse_mask(values: Array, where: str) -> None:
    """Raise DataError if the same points of frames (N, T, C, *S) have no value in every frame of a trajectory."""
    missing, what = masked(values), "not finite"
    for channel in [] if missing.any() else np.moveaxis(values, 2, 0):
        for mark in (channel.min(), channel.max()):
            others = channel[channel != mark]
            far = others.size and np.abs(others - mark).min() > _FAR * np.ptp(others) > 0
            if far and (channel == mark).all(axis=1).any():
                missing, what = (channel == mark).all(axis=1), f"{mark:g}, far from all others,"
    if missing.any():
        first = next(one for one in missing if one.any())
        raise DataError(
            f"{where}: {np.count_nonzero(first)} of {first.size} values of a frame are {what} in every frame: an "
            "obstacle or a mask, which is not read",
            hint=MASK_HINT,
        )


def masked(values: Array) -> Array:
    """(N, C, *S) whether a value of frames (N, T, C, *S) is in no frame finite, while others of its trajectory are."""
    bad = np.asarray(~np.isfinite(values))
    everywhere = np.asarray(bad.all(axis=tuple(range(1, bad.ndim)), keepdims=True))
    return np.asarray(bad.all(axis=1) & ~everywhere[:, 0])
