"""Steady Darcy flow through a two-phase medium on the unit square: finite volumes, solved directly (SciPy sparse).

The medium is constant in each stored cell, so the stored field holds everything the solution depends on; the solver
divides each stored cell. Faces take the harmonic mean, which keeps the flux continuous across a jump of the medium.

Shapes: n trajectories, R stored and N solver cells per axis.
"""

from __future__ import annotations

import numpy as np

from ups.solvers.problem import Draws, Float64, Solution, block_mean, cell_centers, solver_points, stored
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
