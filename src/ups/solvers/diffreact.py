"""FitzHugh-Nagumo diffusion and reaction in 2D without flow through the boundary: cosine modes in space.

Cosine modes satisfy the boundary condition exactly. Diffusion is integrated exactly and the reaction by the
fourth-order Runge-Kutta scheme in the integrating-factor form; the reaction is not stiff (rates of order one).

Shapes: n trajectories, N solver points per axis at cell centers, coefficients of the type-2 cosine transform.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ups.solvers.problem import Draws, Float64, Solution, cell_centers, namespace, solver_points, steps_of, stored
from ups.spec.task import TaskSpec

DIFFUSIVITY_U = 1e-3
DIFFUSIVITY_V = 5e-3
OFFSET = 5e-3
# The cube of the noise reaches 3 x 16 modes and sharpens further before diffusion smooths it: with 64 points the
# frames would be wrong by 1e-3, with 96 by 1e-5.
MIN_POINTS = 96
START_TIME = 1.0
NOISE_MODES = 16
NOISE_STD = 0.5
# Large amplitudes at the start react at rates up to 3 u^2, later all rates are of order one.
SPIN_UP_STEP = 0.0125
STEP = 0.05


def diffreact2d(spec: TaskSpec, draws: Draws, resolution: int, num_frames: int) -> Solution:
    """Activator and inhibitor from band-limited noise; frames start at t = 1, when the noise has become patterns."""
    extent = spec.axes[0].extent
    points = solver_points(resolution, MIN_POINTS)
    start = np.stack([cosine_noise(draws, name, points, extent) for name in ("activator", "inhibitor")])
    spun_up = evolve(start, extent, START_TIME, 2, max_step=SPIN_UP_STEP)[-1]
    frames = np.stack(evolve(spun_up, extent, spec.dt, num_frames, max_step=STEP))  # (T, 2, n, N, N)
    state = np.transpose(resample_cosine(frames, resolution), (2, 0, 1, 3, 4))
    return stored(spec, resolution, draws.parameters(spec), state=state)


def cosine_noise(draws: Draws, purpose: str, points: int, extent: float) -> Float64:
    """(n, N, N): cosine modes 0..15 along each axis with equal random amplitudes, standard deviation 0.5."""
    normal = draws.normal(purpose, NOISE_MODES**2).reshape(-1, NOISE_MODES, NOISE_MODES)
    x = cell_centers(points, extent)
    basis = math.sqrt(2.0 / NOISE_MODES) * np.cos(np.pi / extent * np.arange(NOISE_MODES)[:, None] * x)
    basis[0] /= math.sqrt(2.0)
    field: Float64 = NOISE_STD * np.einsum("nij,ix,jy->nxy", normal, basis, basis, optimize=True)
    return field


def evolve(
    fields: Float64, extent: float, dt: float, num_frames: int, *, max_step: float, offset: float = OFFSET
) -> list[Float64]:
    """u_t = Du lap u + u - u^3 - offset - v, v_t = Dv lap v + u - v: (2, n, N, N) at times 0, dt, ..., included.

    Fourth order in the time step, which is at most `max_step`.
    """
    substeps = steps_of(dt, max_step)
    advance = stepper(fields.shape[-1], extent, dt / substeps, offset)
    frames = [fields]
    modes = to_modes(fields)
    for _ in range(num_frames - 1):
        for _ in range(substeps):
            modes = advance(modes)
        frames.append(to_values(modes))
    return frames


def stepper(points: int, extent: float, step: float, offset: float = OFFSET) -> Callable[[Float64], Float64]:
    """A step of the cosine modes (2, n, N, N), of NumPy or of JAX."""
    wave = (np.pi / extent * np.arange(points)) ** 2
    decay = -(wave[:, None] + wave[None, :])
    rates = np.array([DIFFUSIVITY_U, DIFFUSIVITY_V])[:, None, None, None]
    half = np.exp(0.5 * step * rates * decay)
    whole = half**2
    sink = np.zeros((2, 1, points, points))
    sink[0, 0, 0, 0] = offset * points

    def reaction(modes: Float64) -> Float64:
        # Everything but the cube is linear, so one pair of transforms per stage is enough.
        u, v = modes
        values = to_values(u)
        cube = to_modes(values * values * values)
        out: Float64 = namespace(u).stack([u - cube - v, u - v]) - sink
        return out

    def advance(modes: Float64) -> Float64:
        first = reaction(modes)
        second = reaction(half * (modes + 0.5 * step * first))
        third = reaction(half * modes + 0.5 * step * second)
        fourth = reaction(whole * modes + step * half * third)
        return whole * modes + step / 6 * (whole * first + 2 * half * (second + third) + fourth)

    return advance


def resample_cosine(fields: Float64, wanted: int) -> Float64:
    """(..., N, N) at cell centers -> (..., wanted, wanted): cosine modes cut or padded with zeros."""
    points = fields.shape[-1]
    if points == wanted:
        return fields
    num_modes = min(points, wanted)
    modes = np.zeros((*fields.shape[:-2], wanted, wanted))
    modes[..., :num_modes, :num_modes] = to_modes(fields)[..., :num_modes, :num_modes]
    values: Float64 = to_values(modes) * (wanted / points)
    return values


def cosines(points: int) -> Float64:
    """(modes, points): the orthonormal cosine transform; compiled, products are faster than FFTs here."""
    modes = np.arange(points)[:, None]
    matrix = np.sqrt(2.0 / points) * np.cos(np.pi / points * modes * (np.arange(points) + 0.5))
    matrix[0] /= np.sqrt(2.0)
    return matrix


def to_modes(values: Float64) -> Float64:
    from scipy.fft import dctn

    if not isinstance(values, np.ndarray):
        return cosines(values.shape[-1]) @ values @ cosines(values.shape[-1]).T
    return np.asarray(dctn(values, type=2, norm="ortho", axes=(-2, -1)))


def to_values(modes: Float64) -> Float64:
    from scipy.fft import idctn

    if not isinstance(modes, np.ndarray):
        return cosines(modes.shape[-1]).T @ modes @ cosines(modes.shape[-1])
    return np.asarray(idctn(modes, type=2, norm="ortho", axes=(-2, -1)))
