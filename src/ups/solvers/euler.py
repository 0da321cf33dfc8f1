"""Compressible flow in 1D: the Euler equations of an ideal gas, finite volumes of second order.

MUSCL reconstruction of density, velocity and pressure with the monotonized central limiter, HLLC fluxes, two-stage
strong-stability-preserving Runge-Kutta.

Shapes: component arrays are (3, N, n), N solver cells, n trajectories, in the order mass, momentum, energy (conserved)
or density, velocity, pressure (primitive); T frames, R stored cells.
"""

from __future__ import annotations

import numpy as np

from ups.solvers.finite_volume import Ends, divergence, face_states, march, with_ghosts
from ups.solvers.problem import Draws, Float64, Solution, solver_points, stored
from ups.solvers.reduce import block_mean
from ups.spec.task import TaskSpec

GAMMA = 1.4
CFL = 0.7
MIN_CELLS = 512
MAX_PIECES = 5


def euler1d(spec: TaskSpec, draws: Draws, resolution: int, num_frames: int) -> Solution:
    """Random piecewise-constant states with open ends: shocks, contacts and rarefactions that meet and leave."""
    cells = solver_points(resolution, MIN_CELLS)
    extent = spec.axes[0].extent
    start = conserved(random_pieces(draws, cells))
    frames = np.stack(evolve(start, extent / cells, spec.dt, num_frames, "open"))  # (T, 3, N, n)
    averages = block_mean(np.moveaxis(frames, -1, 0), resolution, 1)  # (n, T, 3, R)
    density, velocity, pressure = primitive(np.moveaxis(averages, 2, 0))
    state = np.stack([density, pressure, velocity], axis=2)  # (n, T, 3, R)
    return stored(spec, resolution, draws.parameters(spec), state=state)


def random_pieces(draws: Draws, cells: int) -> Float64:
    """(3, N, n) primitive states: 2 to 5 constant pieces; a cell that an edge cuts takes the state at its center."""
    num_edges = draws.integers("number of edges", 1, 1, MAX_PIECES - 1)
    edges = draws.uniform("edge", MAX_PIECES - 1, 0.1, 0.9)
    edges = np.where(np.arange(MAX_PIECES - 1) < num_edges, edges, 2.0)
    centers = (np.arange(cells) + 0.5) / cells
    piece = (centers[None, None, :] > edges[:, :, None]).sum(axis=1)  # (n, N)
    values = (
        draws.log_uniform("density", MAX_PIECES, 0.25, 2.0),
        draws.uniform("velocity", MAX_PIECES, -0.5, 0.5),
        draws.log_uniform("pressure", MAX_PIECES, 0.2, 2.0),
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
    return np.stack([density, velocity, (GAMMA - 1) * (energy - 0.5 * momentum * velocity)])


def evolve(u: Float64, dx: float, dt: float, num_frames: int, ends: Ends) -> list[Float64]:
    """Conserved cell averages (3, N, n) at times 0, dt, ..., (num_frames - 1) dt."""

    def rate(u: Float64) -> Float64:
        left, right = face_states(with_ghosts(primitive(u), 1, ends, normal=1), 1)
        return divergence(hllc_flux(left, right), 1, dx)

    def limit(u: Float64) -> float:
        density, velocity, pressure = primitive(u)
        return CFL * dx / float((np.abs(velocity) + np.sqrt(GAMMA * pressure / density)).max())

    return march(u, dt, num_frames, rate, limit)


def hllc_flux(left: Float64, right: Float64) -> Float64:
    """Flux through faces between primitive states (3, ...); resolves shocks and contacts (Toro, chapter 10)."""
    density_l, velocity_l, pressure_l = left
    density_r, velocity_r, pressure_r = right
    sound_l, sound_r = np.sqrt(GAMMA * pressure_l / density_l), np.sqrt(GAMMA * pressure_r / density_r)
    speed_l = np.minimum(velocity_l - sound_l, velocity_r - sound_r)
    speed_r = np.maximum(velocity_l + sound_l, velocity_r + sound_r)
    inflow_l, inflow_r = density_l * (speed_l - velocity_l), density_r * (speed_r - velocity_r)
    speed_star = (pressure_r - pressure_l + velocity_l * inflow_l - velocity_r * inflow_r) / (inflow_l - inflow_r)

    # Only the upwind side of the contact matters, so one side is chosen before the star state is formed.
    from_left = speed_star >= 0
    density, velocity, pressure = np.where(from_left, left, right)
    inflow = np.where(from_left, inflow_l, inflow_r)
    wave_speed = np.where(from_left, speed_l, speed_r)
    # Zero where the whole fan moves one way: then the plain flux remains.
    speed = np.where(from_left, np.minimum(speed_l, 0.0), np.maximum(speed_r, 0.0))

    momentum = density * velocity
    energy = pressure / (GAMMA - 1) + 0.5 * momentum * velocity
    star_density = inflow / (wave_speed - speed_star)
    star_energy = star_density * (energy / density + (speed_star - velocity) * (speed_star + pressure / inflow))
    return np.stack(
        [
            momentum + speed * (star_density - density),
            momentum * velocity + pressure + speed * (star_density * speed_star - momentum),
            (energy + pressure) * velocity + speed * (star_energy - energy),
        ]
    )
