"""Fisher-KPP in a periodic box: bumps grow, fronts move out of them and meet. NumPy alone.

Strang splitting of two parts that are each solved exactly: diffusion in Fourier space, growth in every point. Values
stay between 0 and 1, and the error falls with the square of the step.

Shapes: n trajectories, T frames, N solver points per axis, R stored points per axis.
"""

from __future__ import annotations

import math

import numpy as np

from ups.solvers.problem import Draws, Float64, Solution, cell_centers, solver_points, stored
from ups.spec.task import TaskSpec

# Half of the thinnest front, sqrt(nu / rho) = 0.026, is 1.6 of these cells.
MIN_POINTS = 64
STEP = 0.02
NUM_BUMPS = 4


def reacdiff3d(spec: TaskSpec, draws: Draws, resolution: int, num_frames: int) -> Solution:
    """From one to four bumps on an empty background; stored as means over the solver's points in a cell."""
    parameters = draws.parameters(spec)
    points = solver_points(resolution, MIN_POINTS)
    starts = _bumps(draws, points, spec.axes[0].extent)
    frames = np.stack(
        [
            _cell_means(fisher_kpp_3d(start, one, spec.axes[0].extent, spec.dt, num_frames), resolution)
            for start, one in zip(starts, parameters, strict=True)
        ]
    )
    return stored(spec, resolution, parameters, state=frames[:, :, None])


def fisher_kpp_3d(
    start: Float64, parameters: Float64, extent: float, dt: float, num_frames: int, substeps: int | None = None
) -> Float64:
    """u_t = nu lap u + rho u (1 - u), parameters = nu, rho: (N, N, N) -> (T, N, N, N), frame 0 included."""
    nu, rho = (float(value) for value in parameters)
    points = start.shape[-1]
    substeps = substeps or max(1, math.ceil(dt / STEP - 1e-9))
    step = dt / substeps
    along = 2 * np.pi / extent * np.fft.fftfreq(points, 1 / points)
    half = 2 * np.pi / extent * np.fft.rfftfreq(points, 1 / points)
    squares = along[:, None, None] ** 2 + along[None, :, None] ** 2 + half[None, None, :] ** 2
    decay = np.exp(-nu * step * squares)
    growth = math.exp(rho * step / 2)

    def react(u: Float64) -> Float64:
        """Half a step of logistic growth, exactly."""
        grown: Float64 = growth * u / (1.0 + (growth - 1.0) * u)
        return grown

    frames = np.empty((num_frames, *start.shape))
    frames[0] = u = start
    for number in range(1, num_frames):
        for _ in range(substeps):
            u = react(np.fft.irfftn(decay * np.fft.rfftn(react(u)), s=start.shape, axes=(0, 1, 2)))
        frames[number] = u
    return frames


def _bumps(draws: Draws, points: int, extent: float) -> Float64:
    """(n, N, N, N): one to four smooth periodic bumps of random place, height and width, together within [0, 1]."""
    count = draws.integers("number of bumps", 1, 1, NUM_BUMPS)
    height = draws.uniform("height", NUM_BUMPS, 0.3, 1.0) * (np.arange(NUM_BUMPS) < count)
    width = draws.uniform("width", NUM_BUMPS, 0.05, 0.12)
    center = draws.uniform("center", 3 * NUM_BUMPS, 0.0, extent).reshape(-1, NUM_BUMPS, 3)
    x = cell_centers(points, extent)
    # A product of one factor for each axis.
    angle = 2 * np.pi / extent * (x - center[..., None])  # (n, bumps, 3, N)
    factor = np.exp((np.cos(angle) - 1.0) / (2 * np.pi / extent * width[:, :, None, None]) ** 2)
    rest = np.ones((len(draws.numbers), points, points, points))
    for bump in range(NUM_BUMPS):
        shape = np.einsum("nx,ny,nz->nxyz", *(factor[:, bump, axis] for axis in range(3)))
        rest *= 1.0 - height[:, bump, None, None, None] * shape
    return 1.0 - rest


def _cell_means(frames: Float64, resolution: int) -> Float64:
    """(T, N, N, N) -> (T, R, R, R)."""
    inner = frames.shape[-1] // resolution
    cut = frames.reshape(len(frames), *(size for _ in range(3) for size in (resolution, inner)))
    means: Float64 = cut.mean(axis=(2, 4, 6))
    return means
