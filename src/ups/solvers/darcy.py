"""Steady Darcy flow through a two-phase medium on the unit square: finite volumes, solved directly (SciPy sparse).

The medium is constant in each stored cell, so the stored field holds everything the solution depends on; the solver
divides each stored cell. Faces take the harmonic mean, which keeps the flux continuous across a jump of the medium.

Shapes: n trajectories, R stored and N solver cells per axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ups.solvers.problem import Draws, Float64, Solution, block_mean, cell_centers, namespace, solver_points, stored
from ups.spec.task import TaskSpec

LOW, HIGH = 3.0, 12.0
MIN_CELLS = 128
FIELD_MODES = 24


def darcy2d(spec: TaskSpec, draws: Draws, resolution: int, num_frames: int) -> Solution:
    """Pressure in a random medium with a constant source; `num_frames` is not used, the task is steady."""
    cells = solver_points(resolution, MIN_CELLS)
    parameters = draws.parameters(spec)
    medium = two_phase_medium(draws, resolution, spec.axes[0].extent)
    factor = cells // resolution
    fine = medium.repeat(factor, axis=1).repeat(factor, axis=2)
    unit_source = np.ones((cells, cells))
    pressure = np.stack([beta * solve(a, unit_source) for a, beta in zip(fine, parameters[:, 0], strict=True)])
    target = block_mean(pressure, resolution, 2)
    return stored(spec, resolution, parameters, static=medium[:, None], target=target[:, None])


def two_phase_medium(draws: Draws, resolution: int, extent: float) -> Float64:
    """(n, R, R): 12 where a smooth Gaussian random field is positive at the cell center, else 3.

    The field has the covariance (9 - lap)^-2 with no-flux ends, cut after 24 cosine modes per axis, and no mean: with
    its mean many media would be of one kind almost everywhere.
    """
    mode = np.arange(FIELD_MODES)
    normal = draws.normal("medium", FIELD_MODES**2).reshape(-1, FIELD_MODES, FIELD_MODES)
    spectrum = 1.0 / (np.pi**2 * (mode[:, None] ** 2 + mode[None, :] ** 2) + 9.0)
    spectrum[0, 0] = 0.0
    basis = np.sqrt(2.0) * np.cos(np.pi / extent * mode[:, None] * cell_centers(resolution, extent))
    basis[0] /= np.sqrt(2.0)
    field = np.einsum("nij,ix,jy->nxy", normal * spectrum, basis, basis, optimize=True)
    return np.where(field > 0, HIGH, LOW)


def iterate(
    medium: Float64,
    extent: float,
    iterations: int,
    repeat: Callable[[int, int, Callable[[Any, Any], Any], Any], Any] | None = None,
) -> Float64:
    """The same equation with a source of 1 for media (n, N, N) by conjugate gradients.

    Preconditioned by the Laplacian, inverted in sine modes: the error falls at least threefold with each iteration
    for a contrast of 4, so few iterations are cheaper than a factorization. repeat: `jax.lax.fori_loop`, where JAX
    compiles this.
    """
    xp, cells = namespace(medium), medium.shape[-1]
    modes = np.arange(1, cells + 1)
    sines = np.sqrt(2.0 / cells) * np.sin(np.pi / cells * modes[:, None] * (np.arange(cells) + 0.5))
    sines[-1] /= np.sqrt(2.0)
    laplacian = 2.0 - 2.0 * np.cos(np.pi / cells * modes)
    laplacian = laplacian[:, None] + laplacian
    faces = []
    for axis in (1, 2):
        a = xp.moveaxis(medium, axis, -1)
        inner = 2.0 * a[..., :-1] * a[..., 1:] / (a[..., :-1] + a[..., 1:])
        # The boundary is half a cell away from the center.
        faces.append(xp.moveaxis(xp.concatenate([2.0 * a[..., :1], inner, 2.0 * a[..., -1:]], axis=-1), -1, axis))

    def divergence(u: Float64) -> Float64:
        along_x = xp.diff(faces[0] * xp.diff(xp.pad(u, ((0, 0), (1, 1), (0, 0))), axis=1), axis=1)
        along_y = xp.diff(faces[1] * xp.diff(xp.pad(u, ((0, 0), (0, 0), (1, 1))), axis=2), axis=2)
        return -(along_x + along_y)

    def dot(a: Float64, b: Float64) -> Float64:
        return (a * b).sum(axis=(1, 2), keepdims=True)

    solution, residual = xp.zeros_like(medium), xp.full_like(medium, (extent / cells) ** 2)
    direction, before = xp.zeros_like(medium), xp.ones_like(medium[:, :1, :1])

    def improve(_: Any, state: tuple[Float64, ...]) -> tuple[Float64, ...]:
        solution, residual, direction, before = state
        improved = sines.T @ ((sines @ residual @ sines.T) / laplacian) @ sines
        size = dot(residual, improved)
        direction = improved + size / before * direction
        change = divergence(direction)
        step = size / dot(direction, change)
        return solution + step * direction, residual - step * change, direction, size

    state: tuple[Float64, ...] = (solution, residual, direction, before)
    if repeat is not None:
        return repeat(0, iterations, improve, state)[0]
    for number in range(iterations):
        state = improve(number, state)
    return state[0]


def solve(medium: Float64, source: Float64, extent: float = 1.0) -> Float64:
    """-div(medium grad u) = source with u = 0 on the boundary: cell averages (N, N) in, cell values (N, N) out."""
    from scipy import sparse
    from scipy.sparse.linalg import splu

    cells = medium.shape[0]
    number = np.arange(cells * cells).reshape(cells, cells)
    diagonal = np.zeros_like(medium)
    rows, columns, values = [], [], []
    for axis in (0, 1):
        a, index = np.moveaxis(medium, axis, 0), np.moveaxis(number, axis, 0)
        face = 2.0 * a[:-1] * a[1:] / (a[:-1] + a[1:])
        total = np.moveaxis(diagonal, axis, 0)
        total[:-1] += face
        total[1:] += face
        # The boundary is half a cell away from the center.
        total[0] += 2.0 * a[0]
        total[-1] += 2.0 * a[-1]
        rows += [index[:-1].ravel(), index[1:].ravel()]
        columns += [index[1:].ravel(), index[:-1].ravel()]
        values += [-face.ravel(), -face.ravel()]
    rows.append(number.ravel())
    columns.append(number.ravel())
    values.append(diagonal.ravel())
    matrix = sparse.csc_matrix(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(cells**2, cells**2)
    )
    factors = splu(matrix, permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})
    pressure: Float64 = factors.solve(source.ravel() * (extent / cells) ** 2)
    return pressure.reshape(cells, cells)
