"""From the solver's grid to the stored one, without aliasing: spectral truncation or cell averages.

Smooth periodic fields are truncated (exact values of the kept modes), fields with steep fronts are averaged over the
stored cells (no ringing, and integrals are kept to round-off). Stored values belong to cell centers in both cases.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ups.solvers.problem import Float64

Complex128 = npt.NDArray[np.complex128]


def half_cell_shift(modes: npt.NDArray[Any], resolution: int) -> Complex128:
    """Phase of each integer mode that moves samples from the left end of a cell to its center."""
    phase: Complex128 = np.exp(1j * np.pi * modes / resolution)
    return phase


def truncate_periodic_1d(coefficients: Complex128, num_points: int, resolution: int) -> Float64:
    """(..., num_points // 2 + 1) rfft coefficients -> (..., resolution) values at cell centers.

    Keeps modes below the Nyquist mode of the stored grid.
    """
    modes = np.arange((resolution + 1) // 2)
    kept = coefficients[..., : modes.size] * half_cell_shift(modes, resolution) * (resolution / num_points)
    return np.fft.irfft(kept, n=resolution)


def average_periodic_1d(coefficients: Complex128, num_points: int, resolution: int) -> Float64:
    """(..., num_points // 2 + 1) rfft coefficients -> (..., resolution) averages over the stored cells.

    The average of each mode over a cell is exact, so the mean of the field is kept to round-off.
    """
    modes = np.arange(num_points // 2 + 1)
    filtered = coefficients * np.sinc(modes / resolution) * half_cell_shift(modes, resolution)
    fine: Float64 = np.fft.irfft(filtered, n=num_points)
    return fine[..., :: num_points // resolution]


def truncate_periodic_2d(coefficients: Complex128, num_points: int, resolution: int) -> Float64:
    """(..., num_points, num_points // 2 + 1) rfft2 coefficients -> (..., resolution, resolution) at cell centers."""
    half = (resolution + 1) // 2
    rows = np.concatenate([np.arange(half), np.arange(-(half - 1), 0)])
    columns = np.arange(half)
    kept = np.zeros((*coefficients.shape[:-2], resolution, resolution // 2 + 1), dtype=np.complex128)
    shift = half_cell_shift(rows[:, None] + columns[None, :], resolution) * (resolution / num_points) ** 2
    kept[..., rows[:, None], columns[None, :]] = coefficients[..., rows[:, None], columns[None, :]] * shift
    return np.fft.irfft2(kept, s=(resolution, resolution))


def block_mean(field: Float64, resolution: int, num_spatial_dims: int) -> Float64:
    """(..., *fine) cell averages -> (..., *stored) cell averages over blocks of whole solver cells."""
    lead = field.shape[: field.ndim - num_spatial_dims]
    factor = field.shape[-1] // resolution
    split: tuple[int, ...] = ()
    for _ in range(num_spatial_dims):
        split += (resolution, factor)
    blocks = field.reshape(*lead, *split)  # (..., n, factor[, n, factor])
    axes = tuple(len(lead) + 2 * d + 1 for d in range(num_spatial_dims))
    means: Float64 = blocks.mean(axis=axes)
    return means
