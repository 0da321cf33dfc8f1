"""Over how many orders of magnitude the frames of a task go, around the mean of all of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ups.spec.statistics import safe

# Frames that are remembered; of more, every second, fourth, and so on.
_MOST_FRAMES = 1 << 17
# What is weaker than this, in usual deviations, is as good as nothing.
_SMALLEST = 1e-3


class FrameSizes:
    """Mean and mean square of each channel in each frame, from which sizes follow when the mean of all is known."""

    def __init__(self, num_channels: int) -> None:
        self._moments: list[np.ndarray[Any, Any]] = [np.zeros((0, num_channels, 2))]
        self._kept, self._seen, self._every = 0, 0, 1

    def add(self, state: np.ndarray[Any, Any]) -> None:
        """Take in frames (B, T, C, *S)."""
        if not state.size:
            return
        frames = state.reshape(-1, state.shape[2], int(np.prod(state.shape[3:])))
        first = -self._seen % self._every
        self._seen += len(frames)
        values = frames[first :: self._every].astype(np.float64)
        self._moments.append(np.stack([values.mean(-1), np.square(values).mean(-1)], axis=-1))
        self._kept += len(values)
        while self._kept > _MOST_FRAMES:
            self._every *= 2
            self._moments = [np.concatenate(self._moments)[::2]]
            self._kept = len(self._moments[0])

    def spread(self, mean: tuple[float, ...], std: tuple[float, ...]) -> float:
        """Standard deviation of the natural logarithm of sizes: root mean squares in usual deviations."""
        moments = np.concatenate(self._moments)
        if not len(moments) or not mean:
            return 0.0
        center, scale = np.asarray(mean), np.asarray(safe(std))
        squares = moments[..., 1] - 2 * center * moments[..., 0] + center**2  # (N, C)
        sizes = (squares / scale**2).mean(1)
        return float(np.log(np.maximum(sizes, _SMALLEST**2)).std() / 2)
