"""Shallow water in 2D between reflecting walls: finite volumes of second order.

MUSCL reconstruction of depth and velocity with the monotonized central limiter, HLL fluxes with the transverse
momentum carried by the mass flux, two-stage strong-stability-preserving Runge-Kutta, unsplit. The bed is flat and wet
everywhere, so no dry states occur. Mass is kept to round-off: the flux through a wall is exactly zero.

Shapes: component arrays are (3, X, Y, n), X and Y solver cells, n trajectories, in the order depth, momentum along x,
momentum along y; T frames, R stored cells per axis.
"""

from __future__ import annotations

import numpy as np

from ups.solvers.finite_volume import divergence, face_states, march, with_ghosts
from ups.solvers.problem import Draws, Float64, Solution, cell_centers, solver_points, stored
from ups.solvers.reduce import block_mean
from ups.spec.task import TaskSpec

GRAVITY = 1.0
CFL = 0.45
MIN_CELLS = 64


def swe2d(spec: TaskSpec, draws: Draws, resolution: int, num_frames: int) -> Solution:
    """A round column of water collapses at a random place; its waves run to the walls and come back."""
    cells = solver_points(resolution, MIN_CELLS)
    extent = spec.axes[0].extent
    frames = np.stack(evolve(dam_break(draws, cells, extent), extent / cells, spec.dt, num_frames))  # (T, 3, X, Y, n)
    state = block_mean(np.moveaxis(frames, -1, 0), resolution, 2)  # (n, T, 3, R, R)
    return stored(spec, resolution, draws.parameters(spec), state=state)


def dam_break(draws: Draws, cells: int, extent: float) -> Float64:
    """(3, X, Y, n) at rest: depth 1 outside, 1.2 to 2.5 inside a disc of random center and radius.

    A cell that the rim cuts holds the average over 4 x 4 points of it.
    """
    x = cell_centers(4 * cells, extent)
    center = draws.uniform("center", 2, 0.3, 0.7) * extent
    radius = draws.uniform("radius", 1, 0.1, 0.25)[:, 0] * extent
    inside_depth = draws.uniform("depth", 1, 1.2, 2.5)[:, 0]
    squared = ((x - center[:, :1]) ** 2)[:, :, None] + ((x - center[:, 1:]) ** 2)[:, None, :]  # (n, 4X, 4Y)
    inside = block_mean((squared < radius[:, None, None] ** 2).astype(np.float64), cells, 2)
    depth = 1.0 + (inside_depth - 1.0) * np.moveaxis(inside, 0, -1)
    return np.stack([depth, np.zeros_like(depth), np.zeros_like(depth)])


def evolve(u: Float64, dx: float, dt: float, num_frames: int) -> list[Float64]:
    """Cell averages (3, X, Y, n) at times 0, dt, ..., (num_frames - 1) dt."""

    def rate(u: Float64) -> Float64:
        w = np.concatenate([u[:1], u[1:] / u[:1]])
        return _rate_along(w, 1, dx) + _rate_along(w, 2, dx)

    def limit(u: Float64) -> float:
        speed = np.maximum(np.abs(u[1]), np.abs(u[2])) / u[0] + np.sqrt(GRAVITY * u[0])
        return CFL * dx / float(speed.max())

    return march(u, dt, num_frames, rate, limit)


def _rate_along(w: Float64, axis: int, dx: float) -> Float64:
    """What the fluxes along array axis 1 (x) or 2 (y) add to the time derivative; component `axis` is along it."""
    left, right = face_states(with_ghosts(w, axis, "wall", normal=axis), axis)
    mass, along, across = _flux(left, right, axis, 3 - axis)
    return divergence(np.stack([mass, along, across] if axis == 1 else [mass, across, along]), axis, dx)


def _flux(left: Float64, right: Float64, along: int, across: int) -> tuple[Float64, Float64, Float64]:
    """HLL flux of mass, momentum along and momentum across, between states (3, ...) of depth and velocity."""
    depth_l, along_l = left[0], left[along]
    depth_r, along_r = right[0], right[along]
    wave_l, wave_r = np.sqrt(GRAVITY * depth_l), np.sqrt(GRAVITY * depth_r)
    speed_l = np.minimum(np.minimum(along_l - wave_l, along_r - wave_r), 0.0)
    speed_r = np.maximum(np.maximum(along_l + wave_l, along_r + wave_r), 0.0)
    weight = 1.0 / (speed_r - speed_l)
    product = speed_l * speed_r
    momentum_l, momentum_r = depth_l * along_l, depth_r * along_r
    push_l = momentum_l * along_l + (0.5 * GRAVITY) * depth_l * depth_l
    push_r = momentum_r * along_r + (0.5 * GRAVITY) * depth_r * depth_r
    mass = (speed_r * momentum_l - speed_l * momentum_r + product * (depth_r - depth_l)) * weight
    push = (speed_r * push_l - speed_l * push_r + product * (momentum_r - momentum_l)) * weight
    return mass, push, mass * np.where(mass > 0, left[across], right[across])
