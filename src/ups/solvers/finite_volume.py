"""Finite volumes of second order: compressible flow in 1D (`euler1d`) and shallow water in 2D (`swe2d`).

Both use the monotonized central limiter and the two-stage strong-stability-preserving Runge-Kutta scheme. Arrays are
(components, *cells, n): trajectories last, so that slices along any axis are contiguous. All trajectories of a batch
advance with one time step. T frames, R stored cells per axis. Rates take the namespace of their input, so that JAX can
compile them (`coarse_solver`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from ups.solvers.problem import Draws, Float64, Solution, block_mean, cell_centers, namespace, solver_points, stored
from ups.spec.task import TaskSpec

Ends = Literal["open", "periodic", "wall"]
# The time derivative of a state, and its largest stable step.
Flow = tuple[Callable[[Float64], Float64], Callable[[Float64], Float64]]


def cut(array: Float64, axis: int, start: int | None, stop: int | None, step: int | None = None) -> Float64:
    """array[..., start:stop:step, ...] along `axis`."""
    return array[(slice(None),) * axis + (slice(start, stop, step),)]


def limited_slope(backward: Float64, forward: Float64) -> Float64:
    """Monotonized central limiter: the central slope, at most twice each one-sided one, zero at an extremum."""
    xp = namespace(backward)
    sign = xp.copysign(0.5, backward) + xp.copysign(0.5, forward)
    size = xp.minimum(2.0 * xp.minimum(xp.abs(backward), xp.abs(forward)), xp.abs(0.5 * (backward + forward)))
    slope: Float64 = sign * size
    return slope


def with_ghosts(w: Float64, axis: int, ends: Ends, normal: int) -> Float64:
    """Two more cells at each end along `axis`; a wall mirrors the state and turns component `normal` round."""
    join = namespace(w).concatenate
    if ends == "periodic":
        return join([cut(w, axis, -2, None), w, cut(w, axis, 0, 2)], axis=axis)
    if ends == "open":
        first, last = cut(w, axis, 0, 1), cut(w, axis, -1, None)
        return join([first, first, w, last, last], axis=axis)
    sign = np.ones((len(w), *(1,) * (w.ndim - 1)), dtype=w.dtype)
    sign[normal] = -1.0
    return join([cut(w, axis, 1, None, -1) * sign, w, cut(w, axis, -1, -3, -1) * sign], axis=axis)


def face_states(w: Float64, axis: int) -> tuple[Float64, Float64]:
    """Left and right states at the N + 1 faces, from N + 4 cell values with ghosts along `axis`."""
    jump = cut(w, axis, 1, None) - cut(w, axis, None, -1)
    half_slope = 0.5 * limited_slope(cut(jump, axis, None, -1), cut(jump, axis, 1, None))
    left = cut(w, axis, 1, -2) + cut(half_slope, axis, None, -1)
    right = cut(w, axis, 2, -1) - cut(half_slope, axis, 1, None)
    return left, right


def divergence(flux: Float64, axis: int, dx: float) -> Float64:
    """-(flux_right - flux_left) / dx of each cell."""
    return (cut(flux, axis, None, -1) - cut(flux, axis, 1, None)) * (1.0 / dx)


def march(
    u: Float64, dt: float, num_frames: int, rate: Callable[[Float64], Float64], limit: Callable[[Float64], Float64]
) -> list[Float64]:
    """States at times 0, dt, ..., (num_frames - 1) dt by the two-stage strong-stability-preserving scheme.

    limit(u): the largest stable step at this state. What is left of a frame is divided into equal steps, again after
    each step, so that no sliver of a step remains at its end.
    """
    frames = [u]
    for _ in range(num_frames - 1):
        left = dt
        while left > 0:
            steps = max(1, int(np.ceil(left / float(limit(u)) - 1e-9)))
            step = left / steps
            middle = u + step * rate(u)
            u = 0.5 * (u + middle + step * rate(middle))
            left = left - step if steps > 1 else 0.0
        frames.append(u)
    return frames


# Compressible flow in 1D: the Euler equations of an ideal gas. MUSCL reconstruction of density, velocity and pressure,
# HLLC fluxes. Component arrays are (3, N, n): mass, momentum, energy (conserved) or density, velocity, pressure
# (primitive).
GAMMA = 1.4
EULER_CFL = 0.7
EULER_MIN_CELLS = 512
EULER_MAX_PIECES = 5


def euler1d(spec: TaskSpec, draws: Draws, resolution: int, num_frames: int) -> Solution:
    """Random piecewise-constant states with open ends: shocks, contacts and rarefactions that meet and leave."""
    cells = solver_points(resolution, EULER_MIN_CELLS)
    extent = spec.axes[0].extent
    start = conserved(random_pieces(draws, cells))
    frames = np.stack(evolve_gas(start, extent / cells, spec.dt, num_frames, "open"))  # (T, 3, N, n)
    averages = block_mean(np.moveaxis(frames, -1, 0), resolution, 1)  # (n, T, 3, R)
    density, velocity, pressure = primitive(np.moveaxis(averages, 2, 0))
    state = np.stack([density, pressure, velocity], axis=2)  # (n, T, 3, R)
    return stored(spec, resolution, draws.parameters(spec), state=state)


def random_pieces(draws: Draws, cells: int) -> Float64:
    """(3, N, n) primitive states: 2 to 5 constant pieces; a cell that an edge cuts takes the state at its center."""
    num_edges = draws.integers("number of edges", 1, 1, EULER_MAX_PIECES - 1)
    edges = draws.uniform("edge", EULER_MAX_PIECES - 1, 0.1, 0.9)
    edges = np.where(np.arange(EULER_MAX_PIECES - 1) < num_edges, edges, 2.0)
    centers = (np.arange(cells) + 0.5) / cells
    piece = (centers[None, None, :] > edges[:, :, None]).sum(axis=1)  # (n, N)
    values = (
        draws.log_uniform("density", EULER_MAX_PIECES, 0.25, 2.0),
        draws.uniform("velocity", EULER_MAX_PIECES, -0.5, 0.5),
        draws.log_uniform("pressure", EULER_MAX_PIECES, 0.2, 2.0),
    )
    return np.stack([np.take_along_axis(v, piece, axis=1).T for v in values])


def conserved(w: Float64) -> Float64:
    """Density, velocity, pressure -> mass, momentum, energy per volume."""
    density, velocity, pressure = w
    return np.stack([density, density * velocity, pressure / (GAMMA - 1) + 0.5 * density * velocity**2])


def primitive(u: Float64) -> Float64:
    """Mass, momentum, energy per volume -> density, velocity, pressure."""
    density, momentum, energy = u
    velocity = momentum / density
    return namespace(u).stack([density, velocity, (GAMMA - 1) * (energy - 0.5 * momentum * velocity)])


def gas(dx: float, ends: Ends) -> Flow:
    """Rate and largest stable step of conserved cell averages (3, N, n)."""

    def rate(u: Float64) -> Float64:
        left, right = face_states(with_ghosts(primitive(u), 1, ends, normal=1), 1)
        return divergence(hllc_flux(left, right), 1, dx)

    def limit(u: Float64) -> Float64:
        density, velocity, pressure = primitive(u)
        speed = abs(velocity) + namespace(u).sqrt(GAMMA * pressure / density)
        return EULER_CFL * dx / speed.max()

    return rate, limit


def evolve_gas(u: Float64, dx: float, dt: float, num_frames: int, ends: Ends) -> list[Float64]:
    """Conserved cell averages (3, N, n) at times 0, dt, ..., (num_frames - 1) dt."""
    return march(u, dt, num_frames, *gas(dx, ends))


def hllc_flux(left: Float64, right: Float64) -> Float64:
    """Flux through faces between primitive states (3, ...); resolves shocks and contacts (Toro, chapter 10)."""
    xp = namespace(left)
    density_l, velocity_l, pressure_l = left
    density_r, velocity_r, pressure_r = right
    sound_l, sound_r = xp.sqrt(GAMMA * pressure_l / density_l), xp.sqrt(GAMMA * pressure_r / density_r)
    speed_l = xp.minimum(velocity_l - sound_l, velocity_r - sound_r)
    speed_r = xp.maximum(velocity_l + sound_l, velocity_r + sound_r)
    inflow_l, inflow_r = density_l * (speed_l - velocity_l), density_r * (speed_r - velocity_r)
    speed_star = (pressure_r - pressure_l + velocity_l * inflow_l - velocity_r * inflow_r) / (inflow_l - inflow_r)

    # Only the upwind side of the contact matters, so one side is chosen before the star state is formed.
    from_left = speed_star >= 0
    density, velocity, pressure = xp.where(from_left, left, right)
    inflow = xp.where(from_left, inflow_l, inflow_r)
    wave_speed = xp.where(from_left, speed_l, speed_r)
    # Zero where the whole fan moves one way: then the plain flux remains.
    speed = xp.where(from_left, xp.minimum(speed_l, 0.0), xp.maximum(speed_r, 0.0))

    momentum = density * velocity
    energy = pressure / (GAMMA - 1) + 0.5 * momentum * velocity
    star_density = inflow / (wave_speed - speed_star)
    star_energy = star_density * (energy / density + (speed_star - velocity) * (speed_star + pressure / inflow))
    return xp.stack(
        [
            momentum + speed * (star_density - density),
            momentum * velocity + pressure + speed * (star_density * speed_star - momentum),
            (energy + pressure) * velocity + speed * (star_energy - energy),
        ]
    )


# Shallow water in 2D between reflecting walls, unsplit: MUSCL reconstruction of depth and velocity, HLL fluxes with the
# transverse momentum carried by the mass flux. The bed is flat and wet everywhere. The flux through a wall is exactly
# zero, so mass is kept to round-off. Component arrays are (3, X, Y, n): depth, momentum along x, momentum along y.
GRAVITY = 1.0
SWE_CFL = 0.45
SWE_MIN_CELLS = 64


def swe2d(spec: TaskSpec, draws: Draws, resolution: int, num_frames: int) -> Solution:
    """A round column of water collapses at a random position; its waves run to the walls and come back."""
    cells = solver_points(resolution, SWE_MIN_CELLS)
    extent = spec.axes[0].extent
    frames = np.stack(
        evolve_water(dam_break(draws, cells, extent), extent / cells, spec.dt, num_frames)
    )  # (T, 3, X, Y, n)
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


def water(dx: float) -> Flow:
    """Rate and largest stable step of cell averages (3, X, Y, n)."""

    def rate(u: Float64) -> Float64:
        w = namespace(u).concatenate([u[:1], u[1:] / u[:1]])
        return _water_rate_along(w, 1, dx) + _water_rate_along(w, 2, dx)

    def limit(u: Float64) -> Float64:
        xp = namespace(u)
        speed = xp.maximum(abs(u[1]), abs(u[2])) / u[0] + xp.sqrt(GRAVITY * u[0])
        return SWE_CFL * dx / speed.max()

    return rate, limit


def evolve_water(u: Float64, dx: float, dt: float, num_frames: int) -> list[Float64]:
    """Cell averages (3, X, Y, n) at times 0, dt, ..., (num_frames - 1) dt."""
    return march(u, dt, num_frames, *water(dx))


def _water_rate_along(w: Float64, axis: int, dx: float) -> Float64:
    """What the fluxes along array axis 1 (x) or 2 (y) add to the time derivative; component `axis` is along it."""
    xp = namespace(w)
    left, right = face_states(with_ghosts(w, axis, "wall", normal=axis), axis)
    mass, along, across = _water_flux(left, right, axis, 3 - axis)
    return divergence(xp.stack([mass, along, across] if axis == 1 else [mass, across, along]), axis, dx)


def _water_flux(left: Float64, right: Float64, along: int, across: int) -> tuple[Float64, Float64, Float64]:
    """HLL flux of mass, momentum along and momentum across, between states (3, ...) of depth and velocity."""
    xp = namespace(left)
    depth_l, along_l = left[0], left[along]
    depth_r, along_r = right[0], right[along]
    wave_l, wave_r = xp.sqrt(GRAVITY * depth_l), xp.sqrt(GRAVITY * depth_r)
    speed_l = xp.minimum(xp.minimum(along_l - wave_l, along_r - wave_r), 0.0)
    speed_r = xp.maximum(xp.maximum(along_l + wave_l, along_r + wave_r), 0.0)
    weight = 1.0 / (speed_r - speed_l)
    product = speed_l * speed_r
    momentum_l, momentum_r = depth_l * along_l, depth_r * along_r
    push_l = momentum_l * along_l + (0.5 * GRAVITY) * depth_l * depth_l
    push_r = momentum_r * along_r + (0.5 * GRAVITY) * depth_r * depth_r
    mass = (speed_r * momentum_l - speed_l * momentum_r + product * (depth_r - depth_l)) * weight
    push = (speed_r * push_l - speed_l * push_r + product * (momentum_r - momentum_l)) * weight
    return mass, push, mass * xp.where(mass > 0, left[across], right[across])
