"""Whether a predicted frame has diverged, without a truth: it is not finite, or far larger than all training data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ups.spec.descriptors import DEVIATION, GREATEST, LEAST, MEAN, RESOLUTION
from ups.spec.statistics import Statistics
from ups.spec.task import TaskSpec

# A frame has diverged if its RMS or its peak is above so many times the largest of the train split.
DIVERGED = 10.0
# Largest RMS and peak of usual frames in deviations, for statistics without ranges. Whatever the distribution, at most
# 1 in 100 frames of the train split is beyond the first and 1 in 900 values beyond the second; on six benchmark tasks
# the largest are 6.2 and 11.4.
MAX_RMS = 10.0
MAX_PEAK = 30.0


@dataclass(frozen=True)
class DivergenceLimits:
    """mean, rms, peak: (C,) of each predicted channel; sizes are those around the mean of the train split.

    A field has one size, the largest of its components: a component that is always 0 has none. A field that never
    changes has the size of its mean; one that is always 0 has no limit, and diverges where it is not finite.
    """

    mean: Tensor
    rms: Tensor
    peak: Tensor

    @classmethod
    def of(cls, task: TaskSpec, statistics: Statistics) -> DivergenceLimits:
        """From the ranges of the train split; from its deviations where these were not measured."""
        role = task.predicted
        mean = np.array(getattr(statistics, f"{role}_mean"))
        ranges = np.array(statistics.ranges.get(role, ()))  # (C, D, 4)
        if ranges.size:
            low, high = ranges[..., 0], ranges[..., 1]
            drift = np.maximum(high[:, MEAN] - mean, mean - low[:, MEAN])
            rms = np.hypot(drift, high[:, DEVIATION])
            peak = np.maximum(high[:, GREATEST] - mean, mean - low[:, LEAST])
        else:
            deviation = np.array(getattr(statistics, f"{role}_std"))
            rms, peak = MAX_RMS * deviation, MAX_PEAK * deviation
        first = 0
        for field in task.fields_of(role):
            part = slice(first, first + field.num_channels(task.num_spatial_dims))
            first = part.stop
            constant = np.abs(mean[part]).max()
            for size in (rms, peak):
                largest = size[part].max()
                size[part] = largest if largest > RESOLUTION * constant else constant or np.inf
        return cls(*(torch.from_numpy(values) for values in (mean, DIVERGED * rms, DIVERGED * peak)))

    @property
    def usual_peak(self) -> float:
        """A frame without a larger number has not diverged: one comparison instead of all, in most steps."""
        least = float(torch.minimum(self.rms, self.peak).min() - self.mean.abs().max())
        return min(least, torch.finfo(torch.float64).max)

    def exceeded(self, frames: Tensor) -> Tensor:
        """(B, C, *S) -> (B,): whether a frame has diverged."""
        away = frames.flatten(2).double() - self.mean.to(frames.device)[:, None]
        peak, norm = (torch.linalg.vector_norm(away, ord, dim=2) for ord in (torch.inf, 2))
        rms = norm / away.shape[2] ** 0.5
        # A comparison with NaN is false; infinity is not below a limit that is infinite.
        usual: Tensor = (peak <= self.peak.to(peak)) & (rms <= self.rms.to(rms)) & torch.isfinite(peak)
        return ~usual.all(dim=1)
