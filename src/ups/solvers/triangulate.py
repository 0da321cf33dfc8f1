"""Triangulations of plane domains with holes: boundary points are given, those inside are spread evenly (SciPy)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ups.errors import DataError
from ups.solvers.problem import Float64, Integers

_ROUNDS = 6
# Points inside stay so far from fixed ones, in spacings: more than half an edge, so that no edge of a loop is cut.
_CLEARANCE = 0.6


@dataclass(frozen=True, slots=True)
class Triangulation:
    """points (N, 2), the boundary loops first; triangles (M, 3), counterclockwise. loop: (N,) which loop a point is
    of, counted from 1; 0 inside."""

    points: Float64
    triangles: Integers
    loop: Integers


def triangulate(loops: Sequence[Float64], spacing: float, lines: Sequence[Float64] = ()) -> Triangulation:
    """Triangles of the domain between closed loops of points (K, 2): its outline, and its holes.

    lines: closed loops inside the domain that no triangle crosses. Distances between loops must be about two spacings,
    and their own points at most `spacing` apart. Raises DataError for loops that cannot be kept.
    """
    from scipy.spatial import Delaunay, cKDTree

    fixed = np.concatenate([*loops, *lines])
    start, end = (np.concatenate([np.roll(loop, -shift, axis=0) for loop in loops]) for shift in (0, 1))
    tree = cKDTree(fixed)
    inner = _lattice(fixed.min(axis=0), fixed.max(axis=0), spacing)
    inner = inner[inside(inner, start, end) & (tree.query(inner)[0] > _CLEARANCE * spacing)]
    for _ in range(_ROUNDS):
        # Each point goes to the middle of its neighbors. So far from the fixed points, none crosses a loop.
        points = np.concatenate([fixed, inner])
        starts, neighbors = Delaunay(points).vertex_neighbor_vertices
        moved = np.add.reduceat(points[neighbors], starts[len(fixed) : -1]) / np.diff(starts[len(fixed) :])[:, None]
        inner = np.where(tree.query(moved)[0][:, None] > _CLEARANCE * spacing, moved, inner)
    points = np.concatenate([fixed, inner])
    triangles = _kept(points, Delaunay(points).simplices, start, end)
    _check(triangles, [*loops, *lines], len(loops), len(points))
    loop = np.concatenate([np.full(len(part), i + 1) for i, part in enumerate(loops)])
    loop = np.concatenate([loop, np.zeros(len(points) - len(loop), np.int64)]).astype(np.int64)
    return Triangulation(points, triangles, loop)


def inside(points: Float64, start: Float64, end: Float64) -> npt.NDArray[np.bool_]:
    """Whether points (N, 2) are inside of closed loops of edges from start to end (E, 2): odd crossings of a ray."""
    x, y = points[:, :1], points[:, 1:]
    with np.errstate(divide="ignore", invalid="ignore"):
        at = start[:, 0] + (y - start[:, 1]) * (end[:, 0] - start[:, 0]) / (end[:, 1] - start[:, 1])
    crossed = ((start[:, 1] > y) != (end[:, 1] > y)) & (x < at)
    return np.asarray(crossed.sum(axis=1) % 2 == 1)


def along(corners: Float64, spacing: float) -> Float64:
    """Points at most `spacing` apart along the closed polygon of these corners, which are among them."""
    sides = []
    for here, there in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        count = max(1, int(np.ceil(np.linalg.norm(there - here) / spacing - 1e-9)))
        sides.append(here + (there - here) * (np.arange(count) / count)[:, None])
    return np.concatenate(sides)


def ellipse(center: Float64, radii: tuple[float, float], angle: float, spacing: float) -> Float64:
    """Points of an ellipse, at most `spacing` apart and at least 12."""
    count = max(12, int(np.ceil(2 * np.pi * max(radii) / spacing)))
    turns = 2 * np.pi * np.arange(count) / count
    x, y = radii[0] * np.cos(turns), radii[1] * np.sin(turns)
    turned = [x * np.cos(angle) - y * np.sin(angle), x * np.sin(angle) + y * np.cos(angle)]
    return np.asarray(center + np.stack(turned, axis=1))


def _lattice(low: Float64, high: Float64, spacing: float) -> Float64:
    """Corners of equilateral triangles that cover a box."""
    rows = np.arange(low[1], high[1], spacing * np.sqrt(0.75))
    columns = np.arange(low[0], high[0] + spacing, spacing)
    x = columns[None, :] - 0.5 * spacing * (np.arange(len(rows)) % 2)[:, None]
    return np.stack([x, np.broadcast_to(rows[:, None], x.shape)], axis=-1).reshape(-1, 2)


def _kept(points: Float64, triangles: Integers, start: Float64, end: Float64) -> Integers:
    """Triangles inside of the domain, without those that have no area."""
    a, b, c = (points[triangles[:, i]] for i in range(3))
    area = (b[:, 0] - a[:, 0]) * (c[:, 1] - a[:, 1]) - (b[:, 1] - a[:, 1]) * (c[:, 0] - a[:, 0])
    longest = np.maximum.reduce([((p - q) ** 2).sum(axis=1) for p, q in ((a, b), (b, c), (c, a))])
    return np.asarray(triangles[(area > 1e-3 * longest) & inside((a + b + c) / 3, start, end)], np.int64)


def _check(triangles: Integers, loops: list[Float64], num_closed: int, num_points: int) -> None:
    """Raises DataError unless edges of closed loops are the boundary, and those of lines are edges of triangles."""
    pairs = np.sort(np.concatenate([triangles[:, pair] for pair in ([0, 1], [1, 2], [2, 0])]), axis=1)
    edges, counts = np.unique(pairs, axis=0, return_counts=True)
    wanted: list[set[tuple[int, ...]]] = [set(), set()]
    first = 0
    for number, loop in enumerate(loops):
        here = [*range(first, first + len(loop)), first]
        wanted[number >= num_closed] |= {(min(pair), max(pair)) for pair in itertools.pairwise(here)}
        first += len(loop)
    boundary, every = set(map(tuple, edges[counts == 1].tolist())), set(map(tuple, edges.tolist()))
    lost = len(wanted[0] ^ boundary) + len(wanted[1] - every) + num_points - len(np.unique(triangles))
    if lost:
        raise DataError(
            f"a triangulation lost {lost} edges of its boundary, or points",
            hint="choose a smaller spacing: loops must be two spacings apart",
        )
