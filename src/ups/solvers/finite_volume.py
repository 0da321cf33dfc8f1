"""What the finite-volume solvers share: limiter, ghost cells, reconstruction at faces, time stepping.

Arrays are (components, *cells, n): trajectories last, so that slices along any axis stay long runs of memory. All
trajectories of a batch advance with one time step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

from ups.solvers.problem import Float64

Ends = Literal["open", "periodic", "wall"]


def cut(array: Float64, axis: int, start: int | None, stop: int | None, step: int | None = None) -> Float64:
    """array[..., start:stop:step, ...] along `axis`."""
    return array[(slice(None),) * axis + (slice(start, stop, step),)]


def limited_slope(backward: Float64, forward: Float64) -> Float64:
    """Monotonized central limiter: the central slope, at most twice each one-sided one, zero at an extremum."""
    sign = np.copysign(0.5, backward) + np.copysign(0.5, forward)
    size = np.minimum(2.0 * np.minimum(np.abs(backward), np.abs(forward)), np.abs(0.5 * (backward + forward)))
    slope: Float64 = sign * size
    return slope


def with_ghosts(w: Float64, axis: int, ends: Ends, normal: int) -> Float64:
    """Two more cells at each end along `axis`; a wall mirrors the state and turns component `normal` round."""
    if ends == "periodic":
        return np.concatenate([cut(w, axis, -2, None), w, cut(w, axis, 0, 2)], axis=axis)
    if ends == "open":
        first, last = cut(w, axis, 0, 1), cut(w, axis, -1, None)
        return np.concatenate([first, first, w, last, last], axis=axis)
    before, after = cut(w, axis, 1, None, -1).copy(), cut(w, axis, -1, -3, -1).copy()
    before[normal] *= -1.0
    after[normal] *= -1.0
    return np.concatenate([before, w, after], axis=axis)


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
    u: Float64, dt: float, num_frames: int, rate: Callable[[Float64], Float64], limit: Callable[[Float64], float]
) -> list[Float64]:
    """States at times 0, dt, ..., (num_frames - 1) dt by the two-stage strong-stability-preserving scheme.

    limit(u): the largest stable step at this state. What is left of a frame is divided into equal steps, again after
    each step, so that no sliver of a step remains at its end.
    """
    frames = [u]
    for _ in range(num_frames - 1):
        left = dt
        while left > 0:
            steps = max(1, int(np.ceil(left / limit(u) - 1e-9)))
            step = left / steps
            middle = u + step * rate(u)
            u = 0.5 * (u + middle + step * rate(middle))
            left = left - step if steps > 1 else 0.0
        frames.append(u)
    return frames
