"""Where data never have the shortest wave of their grid: up, down, up, down from point to point. No torch.

Spectral solvers cut it off, and smooth fields do not reach it. What no sample has, no loss teaches: a model may let
such a wave grow by a few percent a step, which scores do not show and a long rollout does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ups.spec.task import TaskSpec

# Largest amplitude that counts as none, in standard deviations of the field. Rounding to float32 leaves 1e-8, and no
# model is as accurate as this; data that do have the wave are at 1e-4 and above.
_NOTHING = 1e-6


class ShortestWaves:
    """The largest amplitude of the wave of two points along each periodic axis with an even number of points."""

    def __init__(self, task: TaskSpec) -> None:
        self._axes = [axis.boundary == "periodic" for axis in task.axes]
        self._largest = np.zeros((task.num_channels("state"), len(task.axes)))
        self._points = [0] * len(task.axes)

    def add(self, state: np.ndarray[Any, Any]) -> None:
        """Take in frames (B, T, C, *S)."""
        if not state.size:
            return
        for axis, periodic in enumerate(self._axes):
            points = state.shape[3 + axis]
            if not periodic or points % 2:
                continue
            self._points[axis] = points
            lines = np.moveaxis(state, (2, 3 + axis), (0, -1))  # (C, ..., points)
            ups, downs = (lines[..., first::2].mean(-1, dtype=np.float64) for first in (0, 1))
            flat = np.abs(ups - downs).reshape(len(lines), -1) / 2
            self._largest[:, axis] = np.maximum(self._largest[:, axis], flat.max(1))

    def absent(self, std: tuple[float, ...]) -> tuple[tuple[int, ...], ...]:
        """For each channel and axis: the points of the grid where the wave is never there, else 0."""
        return tuple(
            tuple(n if found <= _NOTHING * scale else 0 for n, found in zip(self._points, row, strict=True))
            for row, scale in zip(self._largest, std, strict=True)
        )
