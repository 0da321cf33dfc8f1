"""The score of APEBench: how far a rollout is from the truth, as one number."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.apebench.scenarios import SCORED_STEPS

Float64 = npt.NDArray[np.float64]


def mean_nrmse(predicted: npt.ArrayLike, reference: npt.ArrayLike) -> Float64:
    """(N, T, C, X) each, without the given frame -> (T,): the error of each step relative to the true frame.

    Of each channel the root of the mean square over space, relative to that of the truth; summed over channels, and
    then the mean over trajectories. Values that are not finite stay so.
    """
    truth = np.asarray(reference, np.float64)
    error = np.asarray(predicted, np.float64) - truth
    if error.shape != truth.shape or truth.ndim != 4:
        raise ValueError(f"rollouts must be (trajectory, step, channel, x) of equal shape, got {truth.shape}")
    with np.errstate(over="ignore", invalid="ignore"):
        relative = np.sqrt((error**2).mean(3)) / np.sqrt((truth**2).mean(3))
        found: Float64 = relative.sum(2).mean(0)
    return found


def score(errors: npt.ArrayLike, steps: int = SCORED_STEPS) -> float:
    """(T,) errors of the steps of a rollout -> their geometric mean over the first `steps`, infinite if one is not."""
    kept: Any = np.asarray(errors, np.float64)[:steps]
    if len(kept) < steps:
        raise ValueError(f"the score is of {steps} steps, and the rollout has {len(kept)}")
    if not np.isfinite(kept).all():
        return float("inf")
    with np.errstate(divide="ignore"):
        return float(np.exp(np.log(kept).mean()))
