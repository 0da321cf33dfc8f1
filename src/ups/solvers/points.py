"""Tasks whose fields live on the points of a triangulation, another one in each trajectory, and flow past obstacles.

`ups.solvers.point_sweep` writes them. Flow past obstacles is sampled to a grid with a mask: `stokes2d` is a task like
all others.

Boundary points have the number of a kind; plate2d: 1 roller, 2 pulled edge, 3 hole. inclusions2d: 1 zero.
heat2d: 1 zero, 2 insulated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ups.formats.mesh_files import MeshFile
from ups.solvers import finite_elements
from ups.solvers.problem import (
    Draws,
    Float64,
    Integers,
    Solution,
    cell_centers,
    stored,
)
from ups.solvers.triangulate import Triangulation, along, ellipse, inside, triangulate
from ups.spec.task import TaskSpec

SQUARE = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])


def plate2d(draws: Draws) -> MeshFile:
    """Stress of a square plate with one to four elliptic holes, pulled by 1 along x and by `lateral` along y."""
    spacing = 0.042
    lateral = float(draws.uniform("lateral", 1, -1.0, 1.0)[0, 0])
    holes = [ellipse(*hole, 0.6 * spacing) for hole in _holes(draws, 4, (0.07, 0.16), 2.2 * spacing)]
    mesh = triangulate([along(SQUARE, spacing), *holes], spacing)
    stress = finite_elements.plate_stress(
        mesh.points, mesh.triangles, lambda x, n: np.stack([1.0 * (x[0] > 1 - 1e-9), lateral * (x[1] > 1 - 1e-9)])
    )
    roller = (mesh.points[:, 0] < 1e-9) | (mesh.points[:, 1] < 1e-9)
    kind = np.where(mesh.loop == 1, np.where(roller, 1, 2), np.minimum(3 * mesh.loop, 3))
    return _file(mesh, kind, {"stress": stress}, parameters={"lateral": lateral})


def inclusions2d(draws: Draws) -> MeshFile:
    """Poisson's equation on a random smooth domain with one to four elliptic inclusions of another conductivity."""
    spacing = 0.038
    turns = 2 * np.pi * np.arange(400) / 400
    waves = np.arange(2, 6)
    shift, size = draws.uniform("phase", 4, 0, 2 * np.pi)[0], draws.uniform("wave", 4, 0, 0.2)[0] / (waves - 1)
    radius = 0.42 * (1 + (size * np.cos(np.outer(turns, waves) + shift)).sum(axis=1))
    fine = 0.5 + radius[:, None] * np.stack([np.cos(turns), np.sin(turns)], axis=1)
    outline = _evenly(fine, spacing)
    edge = float(radius.min())
    holes = _holes(draws, 4, (0.06, 0.13), 2.2 * spacing, lambda c, r: float(np.hypot(*(c - 0.5))) + r < edge - 0.06)
    loops = [ellipse(*hole, 0.7 * spacing) for hole in holes]
    values = draws.log_uniform("conductivity", 4, 0.1, 10.0)[0]
    mesh = triangulate([outline], spacing, loops)
    middle = mesh.points[mesh.triangles].mean(axis=1)
    on_points, on_triangles = np.ones(len(mesh.points)), np.ones(len(middle))
    first = len(outline)
    for loop, value in zip(loops, values, strict=False):
        end = np.roll(loop, -1, axis=0)
        on_triangles[inside(middle, loop, end)] = value
        on_points[inside(mesh.points, loop, end)] = value
        on_points[first : first + len(loop)] = value  # the edge of an inclusion belongs to it
        first += len(loop)
    u = finite_elements.poisson(mesh.points, mesh.triangles, on_triangles)
    return _file(mesh, mesh.loop, {"conductivity": on_points, "u": u})


def heat2d(draws: Draws) -> MeshFile:
    """Heat of two to four bumps in a random polygon, whose sides are cold or insulated."""
    count = int(draws.integers("corners", 1, 4, 8)[0, 0])
    gaps = draws.uniform("gap", 8, 0.75, 1.25)[0, :count]
    turns = 2 * np.pi * (np.cumsum(gaps) / gaps.sum() + draws.uniform("turn", 1)[0, 0])
    radius = draws.uniform("radius", 8, 0.36, 0.5)[0, :count]
    corners = 0.5 + radius[:, None] * np.stack([np.cos(turns), np.sin(turns)], axis=1)
    spacing = 0.034
    outline = along(corners, spacing)
    mesh = triangulate([outline], spacing)
    # The first side is always cold.
    chosen = np.concatenate([[True], draws.uniform("cold", 8)[0, 1:count] < 0.5])
    ends = np.array([int(np.argmin(((outline - corner) ** 2).sum(axis=1))) for corner in corners])
    side = np.searchsorted(ends, np.arange(len(outline)), side="right") - 1
    cold = np.zeros(len(mesh.points), bool)
    cold[: len(outline)] = chosen[side]
    cold[ends] |= np.roll(chosen, 1)  # a corner belongs to both of its sides
    bumps = int(draws.integers("bumps", 1, 2, 4)[0, 0])
    center, width = draws.uniform("center", 8, 0.25, 0.75)[0].reshape(4, 2), draws.uniform("width", 4, 0.05, 0.12)[0]
    height, diffusivity = (
        draws.uniform("height", 4, 0.5, 1.5)[0],
        float(draws.log_uniform("kappa", 1, 5e-3, 2e-2)[0, 0]),
    )

    def start(x: Float64) -> Float64:
        far = [((x[0] - c[0]) ** 2 + (x[1] - c[1]) ** 2) / w**2 for c, w in zip(center, width, strict=True)]
        return np.asarray(sum(h * np.exp(-f) for h, f in zip(height[:bumps], far, strict=False)))

    # The bumps do not fit the boundary: the first frame comes after they have met it.
    u = finite_elements.heat(mesh.points, mesh.triangles, start, diffusivity, 0.1, 21, cold)
    kind = np.where(mesh.loop == 1, np.where(cold, 1, 2), 0)
    return _file(mesh, kind, {"u": u}, times=np.asarray(0.1 * np.arange(1, 22)), parameters={"kappa": diffusivity})


def stokes2d(spec: TaskSpec, draws: Draws, resolution: int, num_frames: int) -> Solution:
    """Slow flow through a channel past one to four elliptic obstacles; 0 in them. `num_frames` is not used."""
    spacing = 0.034
    centers = cell_centers(resolution, 1.0)
    grid = np.stack(np.meshgrid(centers, centers, indexing="ij")).reshape(2, -1)
    parameters = draws.parameters(spec)
    fields = np.zeros((len(draws.numbers), 4, grid.shape[1]))
    for row, (values, skew) in enumerate(zip(fields, parameters[:, 0], strict=True)):
        own = _row(draws, row)
        holes = _holes(own, 4, (0.06, 0.15), 2.2 * spacing)
        mesh = triangulate([along(SQUARE, spacing), *(ellipse(*hole, 0.6 * spacing) for hole in holes)], spacing)
        for center, radii, angle in holes:
            x, y = grid - center[:, None]
            along_first, along_second = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
            values[0] += (along_first / radii[0]) ** 2 + (along_second / radii[1]) ** 2 < 1
        free = values[0] == 0
        values[1:, free] = finite_elements.stokes(
            mesh.points,
            mesh.triangles,
            functools.partial(_inflow, skew),
            lambda x: x[0] > 1 - 1e-9,
            grid[:, free],
        )
    maps = fields.reshape(*fields.shape[:2], resolution, resolution)
    return stored(spec, resolution, parameters, static=maps[:, :1], target=maps[:, 1:])


def _inflow(skew: float, x: Float64) -> Float64:
    """The velocity at the boundary: a parabola at x = 0, leaned by `skew`; 0 elsewhere."""
    profile = 4 * x[1] * (1 - x[1]) * (1 + skew * (2 * x[1] - 1))
    return np.asarray(np.stack([profile * (x[0] < 1e-9), 0 * x[0]]))


# Name -> what solves one trajectory of a row of draws, and the task.yaml without the name and the axes.
POINT_TASKS: dict[str, tuple[Callable[[Draws], MeshFile], dict[str, Any]]] = {
    "plate2d": (
        plate2d,
        {
            "equation": "div sigma = 0 in a plate with holes (plane stress, E = 1, nu = 0.3); stress is von Mises'",
            "fields": [{"name": "stress", "role": "target"}],
            "parameters": [{"name": "lateral"}],
            "steady": True,
        },
    ),
    "inclusions2d": (
        inclusions2d,
        {
            "equation": "-div(a grad u) = 1, u = 0 on the boundary; a = 1, and 0.1 to 10 in inclusions",
            "fields": [{"name": "conductivity", "role": "static"}, {"name": "u", "role": "target"}],
            "steady": True,
        },
    ),
    "heat2d": (
        heat2d,
        {
            "equation": "u_t = kappa lap u; u = 0 or du/dn = 0 on each side of a polygon",
            "fields": [{"name": "u", "role": "state"}],
            "parameters": [{"name": "kappa", "scale": "log"}],
        },
    ),
}


def _row(draws: Draws, row: int) -> Draws:
    return Draws(draws.seed, draws.task, draws.split, (draws.numbers[row],), draws.fixed)


def _holes(
    draws: Draws,
    most: int,
    sizes: tuple[float, float],
    gap: float,
    fits: Callable[[Float64, float], bool] | None = None,
) -> list[tuple[Float64, tuple[float, float], float]]:
    """(center, radii, angle) of up to `most` ellipses, `gap` apart and from the edge. fits: default the unit square."""
    tries = 200
    wanted = int(draws.integers("holes", 1, 1, most)[0, 0])
    centers = draws.uniform("hole center", 2 * tries)[0].reshape(tries, 2)
    radii = draws.uniform("hole radius", tries, *sizes)[0]
    flat, angles = draws.uniform("hole flatness", tries, 0.55, 1.0)[0], draws.uniform("hole angle", tries, 0, np.pi)[0]
    holes: list[tuple[Float64, tuple[float, float], float]] = []
    for center, radius, ratio, angle in zip(centers, radii, flat, angles, strict=True):
        within = fits(center, radius) if fits else min(*center, *(1 - center)) > radius + gap
        apart = all(np.hypot(*(center - other)) > radius + size[0] + gap for other, size, _ in holes)
        if within and apart and len(holes) < wanted:
            holes.append((center, (float(radius), float(ratio * radius)), float(angle)))
    return holes


def _evenly(loop: Float64, spacing: float) -> Float64:
    """Points of a closed curve at equal distances along it, at most `spacing`."""
    closed = np.concatenate([loop, loop[:1]])
    length = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(closed, axis=0).T))])
    at = np.linspace(0, length[-1], int(np.ceil(length[-1] / spacing)), endpoint=False)
    return np.stack([np.interp(at, length, closed[:, i]) for i in range(2)], axis=1)


def _file(
    mesh: Triangulation,
    kind: Integers,
    fields: dict[str, Float64],
    *,
    times: Float64 | None = None,
    parameters: dict[str, float] | None = None,
) -> MeshFile:
    arrays = {name: values.astype(np.float32) for name, values in fields.items()}
    cells = [mesh.triangles]
    return MeshFile(mesh.points, arrays, times, cells, ("triangle",), kind.astype(np.int64), parameters or {})
