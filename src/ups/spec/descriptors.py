"""Cheap descriptors of a frame, and their ranges over a train split: what a state must look like to be a usual one.

Each channel has its mean, its least and greatest value and its deviation, and along each axis its steepest fall and
rise from point to point and the RMS of its waves by band. An axis that is not periodic is mirrored: its waves are
half waves. Shape legend: N frames, B trajectories, T frames of each, C channels, S space, D descriptors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ups.spec.task import AxisSpec

Float64 = npt.NDArray[np.float64]
# For each channel and descriptor: smallest and largest value of the train split, and the limits of what is usual.
Ranges = tuple[tuple[tuple[float, float, float, float], ...], ...]
VALUES = ("mean", "least value", "greatest value", "deviation")
MEAN, LEAST, GREATEST, DEVIATION = range(len(VALUES))
# Part of new trajectories of the same kind that may be outside of a limit.
FALSE_ALARMS = 0.01
# In deviations of the channel: differences below this are storage in float16, or the noise of an interpolation.
TOLERANCE = 1e-3
# Relative to the mean: a channel that varies by less is constant but for rounding.
RESOLUTION = 1e-6
# Trajectories that are remembered one by one; of more, neighbors are joined, which only widens the limits.
_MOST_ROWS = 1 << 14


def descriptor_names(axes: Sequence[AxisSpec], space: Sequence[int]) -> tuple[str, ...]:
    """What the descriptors of a grid are called, in their order."""
    names = list(VALUES)
    for axis, points in zip(axes, space, strict=True):
        names += [f"steepest {way} along {axis.name}" for way in ("fall", "rise")]
        period, kind = (points, "waves") if axis.periodic else (2 * points, "half waves")
        for first, after in itertools.pairwise([*_first_waves(period), period // 2 + 1]):
            waves = f"{first}" if after == first + 1 else f"{first} to {after - 1}"
            names.append(f"RMS of {kind} {waves} along {axis.name}")
    return tuple(names)


def describe(frames: npt.NDArray[Any], axes: Sequence[AxisSpec]) -> Float64:
    """(N, C, *S) -> (N, C, D)."""
    values = frames.astype(np.float64)
    space = tuple(range(2, values.ndim))
    mean = values.mean(axis=space, keepdims=True)
    found = [mean.reshape(mean.shape[:2]), values.min(axis=space), values.max(axis=space)]
    values -= mean
    found.append(np.sqrt(np.square(values).mean(axis=space)))
    for dim, axis in zip(space, axes, strict=True):
        lines = np.moveaxis(values, dim, -1)
        steps = np.diff(lines, axis=-1, append=lines[..., :1]) if axis.periodic else np.diff(lines, axis=-1)
        flat = steps.reshape(*steps.shape[:2], -1)
        found += [flat.min(axis=-1), flat.max(axis=-1)]
        found += list(np.moveaxis(np.sqrt(_band_energies(lines, periodic=axis.periodic)), -1, 0))
    return np.stack(found, axis=-1)


def _first_waves(points: int) -> list[int]:
    """First wave number of each band on a periodic grid: four bands in an octave, single waves up to 8."""
    octaves = ([part << power for part in (4, 5, 6, 7)] for power in range(points.bit_length()))
    return [wave for octave in ((1, 2, 3), *octaves) for wave in octave if wave <= points // 2]


def _band_energies(lines: Float64, *, periodic: bool) -> Float64:
    """(N, C, ..., points) without mean -> (N, C, bands): mean square of the waves of each band."""
    if not periodic:
        lines = np.concatenate([lines, lines[..., ::-1]], axis=-1)
    points = lines.shape[-1]
    energy = np.square(np.abs(np.fft.rfft(lines))) * (2 / points**2)
    if points % 2 == 0:
        energy[..., -1] /= 2  # the wave of two points stands for itself alone
    energy = energy.mean(axis=tuple(range(2, energy.ndim - 1)))
    return np.asarray(np.add.reduceat(energy, _first_waves(points), axis=-1))


class RangeFinder:
    """Ranges of the descriptors of one role, from one pass over trajectories."""

    def __init__(self, axes: Sequence[AxisSpec]) -> None:
        self._axes = axes
        self._rows: list[Float64] = []  # (B, 2, C, D): smallest and largest value in each trajectory
        self._num_rows, self._last = 0, -1

    def add(self, trajectories: Sequence[int], frames: npt.NDArray[Any]) -> None:
        """Take in frames (B, T, C, *S) of trajectories; those of a long one may come in several parts."""
        if not frames.size:
            return
        values = describe(frames.reshape(-1, *frames.shape[2:]), self._axes)
        values = values.reshape(*frames.shape[:2], *values.shape[1:])  # (B, T, C, D)
        rows = np.stack([values.min(axis=1), values.max(axis=1)], axis=1)
        if self._rows and trajectories[0] == self._last:
            self._rows[-1][-1:] = _joined(self._rows[-1][-1:], rows[:1])
            rows = rows[1:]
        self._last = trajectories[-1]
        self._rows += [rows] if len(rows) else []
        self._num_rows += len(rows)
        if self._num_rows > _MOST_ROWS:
            every = np.concatenate(self._rows)
            even = len(every) // 2 * 2
            self._rows = [np.concatenate([_joined(every[0:even:2], every[1:even:2]), every[even:]])]
            self._num_rows = len(every) - even // 2

    def ranges(self, mean: Sequence[float], std: Sequence[float]) -> Ranges:
        """mean, std: of each channel; they say what is too small to matter."""
        if not self._rows:
            return ()
        rows = np.concatenate(self._rows)
        low, high = rows[:, 0], rows[:, 1]
        chance = FALSE_ALARMS / (2 * low[0].size)  # of each limit
        tolerance = np.maximum(TOLERANCE * np.asarray(std), RESOLUTION * np.abs(mean))[:, None]
        least = -_limit(-low, -high, chance) - tolerance
        most = _limit(high, low, chance) + tolerance
        numbers = np.stack([low.min(axis=0), high.max(axis=0), least, most], axis=-1)
        return tuple(tuple(tuple(map(float, row)) for row in channel) for channel in numbers)  # type: ignore[misc]


def _joined(one: Float64, other: Float64) -> Float64:
    """(B, 2, ...) smallest and largest value of both."""
    return np.stack([np.minimum(one[:, 0], other[:, 0]), np.maximum(one[:, 1], other[:, 1])], axis=1)


def _limit(largest: Float64, smallest: Float64, chance: float) -> Float64:
    """(n, C, D) of trajectories -> (C, D): what a new one exceeds with this chance, if the tail is exponential.

    The mean excess of the largest sqrt(n) over the next one measures the tail. Few trajectories give wide limits.
    """
    count = len(largest)
    if count == 1:  # how trajectories differ is not known: as much as the frames of this one
        return np.asarray(2 * largest[0] - smallest[0])
    ranked = -np.sort(-largest, axis=0)
    tail = math.isqrt(count)
    excess = (ranked[:tail].mean(axis=0) - ranked[tail]) * (1 + 1 / math.sqrt(tail))  # with its standard error
    return np.asarray(np.maximum(ranked[0], ranked[tail] + excess * math.log(tail / (count * chance))))
