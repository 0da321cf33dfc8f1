"""Numbers that describe frames: moments, cheap descriptors with their ranges over a train split, and divergence.

Each channel has its mean, its least and greatest value and its deviation, and along each axis its steepest fall and
rise from point to point and the RMS of its waves by band. An axis that is not periodic is mirrored: its waves are
half waves. Shape legend: N frames, B trajectories, T frames of each, C channels, S space, D descriptors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt

from ups.spec.statistics import Ranges, Statistics
from ups.spec.task import AxisSpec, Role, TaskSpec

if TYPE_CHECKING:
    from torch import Tensor


# Relative spacing of float32 numbers: data that varies less than this around its mean is constant but for rounding.
_RESOLUTION = 2.0**-23


class Moments:
    """Running mean, sum of squared deviations and range of several channels, in one pass and in float64.

    Parts are merged by the formula of Chan, Golub and LeVeque.
    Each part is first reduced around its own mean and then merged, so that neither a large mean nor many numbers cost
    digits: a sum of squares minus a squared sum would.
    allow_nonfinite: take in NaN and infinity, which then show in every number of their channel.
    """

    def __init__(self, num_channels: int, *, allow_nonfinite: bool = False) -> None:
        self.count = 0
        self._allow_nonfinite = allow_nonfinite
        self._mean = np.zeros(num_channels)
        self._squares = np.zeros(num_channels)
        self._low = np.full(num_channels, np.inf)
        self._high = np.full(num_channels, -np.inf)

    def add(self, values: npt.NDArray[Any]) -> None:
        """Take in (channels, n) numbers. Raises FloatingPointError, taking in nothing, if one is not finite.

        With `allow_nonfinite` nothing is refused.
        """
        count = values.shape[1] if values.size else 0
        if not count:
            return
        part = values.astype(np.float64, copy=False)
        low, high = part.min(axis=1), part.max(axis=1)
        if not self._allow_nonfinite and not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise FloatingPointError("a value is not finite")
        mean = part.mean(axis=1)
        squares = np.square(part - mean[:, None]).sum(axis=1)
        total = self.count + count
        delta = mean - self._mean
        self._squares += squares + delta**2 * (self.count * count / total)
        self._mean += delta * (count / total)
        self.count = total
        np.minimum(self._low, low, out=self._low)
        np.maximum(self._high, high, out=self._high)

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of each channel: exact where the channel is constant."""
        return tuple(float(lo if lo == hi else m) for lo, hi, m in zip(self._low, self._high, self._mean, strict=True))

    @property
    def minimum(self) -> tuple[float, ...]:
        """Smallest value of each channel; infinite if nothing was added."""
        return tuple(map(float, self._low))

    @property
    def maximum(self) -> tuple[float, ...]:
        """Largest value of each channel; minus infinity if nothing was added."""
        return tuple(map(float, self._high))

    @property
    def rms(self) -> tuple[float, ...]:
        """Root mean square of each channel; 0 if nothing was added."""
        return tuple(map(float, np.sqrt(self._mean**2 + self._squares / max(1, self.count))))

    @property
    def magnitude(self) -> npt.NDArray[np.float64]:
        """(channels,) largest absolute value of each channel; 0 if nothing was added."""
        return np.maximum(np.abs(self._low), np.abs(self._high)) if self.count else np.zeros_like(self._mean)

    def std(self, scale: npt.NDArray[np.float64] | None = None) -> tuple[float, ...]:
        """Standard deviation of each channel, exactly 0 where it is constant but for rounding.

        scale: (channels,) size of the numbers that the values were computed from, if not their own.
        """
        if not self.count:
            return (0.0,) * len(self._mean)
        std = np.sqrt(self._squares / self.count)
        size = np.abs(self._mean) if scale is None else scale
        constant = (self._low == self._high) | (std <= _RESOLUTION * size)
        return tuple(float(s) for s in np.where(constant, 0.0, std))


def by_channel(values: npt.NDArray[Any], axis: int) -> npt.NDArray[Any]:
    """Any array -> (channels, everything else), as `Moments.add` takes it. axis: that of the channels."""
    channels = values.shape[axis]
    return np.moveaxis(values, axis, 0).reshape(channels, values.size // max(1, channels))


Float64 = npt.NDArray[np.float64]
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
        for first, after in itertools.pairwise([*first_waves(period), period // 2 + 1]):
            waves = f"{first}" if after == first + 1 else f"{first} to {after - 1}"
            names.append(f"RMS of {kind} {waves} along {axis.name}")
    return tuple(names)


def ranges_fit(ranges: Mapping[str, Ranges], task: TaskSpec, space: Sequence[int]) -> bool:
    """Whether ranges by role have the channels of a task and the descriptors of its grid."""
    count = len(descriptor_names(task.axes, space))
    expected = {role: [count] * task.num_channels(role) for role in get_args(Role) if task.num_channels(role)}
    return {role: [len(channel) for channel in channels] for role, channels in ranges.items()} == expected


def describe(frames: npt.NDArray[Any], axes: Sequence[AxisSpec]) -> Float64:
    """(N, C, *S) -> (N, C, D)."""
    values = frames.astype(np.float64)
    space = tuple(range(2, values.ndim))
    mean = values.mean(axis=space, keepdims=True)
    columns = [mean.reshape(mean.shape[:2]), values.min(axis=space), values.max(axis=space)]
    values -= mean
    columns.append(np.sqrt(np.square(values).mean(axis=space)))
    for dim, axis in zip(space, axes, strict=True):
        lines = np.moveaxis(values, dim, -1)
        steps = np.diff(lines, axis=-1, append=lines[..., :1]) if axis.periodic else np.diff(lines, axis=-1)
        flat = steps.reshape(*steps.shape[:2], -1)
        columns += [flat.min(axis=-1), flat.max(axis=-1)]
        columns += list(np.moveaxis(np.sqrt(_band_energies(lines, periodic=axis.periodic)), -1, 0))
    return np.stack(columns, axis=-1)


def first_waves(points: int) -> list[int]:
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
    return np.asarray(np.add.reduceat(energy, first_waves(points), axis=-1))


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


# A frame has diverged if its RMS or its peak is above so many times the largest of the train split.
DIVERGED = 10.0
# Largest RMS and peak of usual frames in deviations, for statistics without ranges. Whatever the distribution, at most
# 1 in 100 frames of the train split is beyond the first and 1 in 900 values beyond the second; on six benchmark tasks
# the largest are 6.2 and 11.4.
MAX_RMS = 10.0
MAX_PEAK = 30.0


@dataclass(frozen=True)
class DivergenceLimits:
    """Above which a predicted frame has diverged, without a truth: far larger than all training data.

    mean, rms, peak: (C,) of each predicted channel; sizes are those around the mean of the train split.

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
        import torch  # here and below: commands that only describe data start without it

        return cls(*(torch.from_numpy(values) for values in (mean, DIVERGED * rms, DIVERGED * peak)))

    @property
    def usual_peak(self) -> float:
        """A frame without a larger number has not diverged: one comparison instead of all, in most steps."""
        import torch

        least = float(torch.minimum(self.rms, self.peak).min() - self.mean.abs().max())
        return min(least, torch.finfo(torch.float64).max)

    def exceeded(self, frames: Tensor) -> Tensor:
        """(B, C, *S) -> (B,): whether a frame has diverged."""
        import torch

        away = frames.flatten(2).double() - self.mean.to(frames.device)[:, None]
        peak, norm = (torch.linalg.vector_norm(away, ord, dim=2) for ord in (torch.inf, 2))
        rms = norm / away.shape[2] ** 0.5
        # A comparison with NaN is false; infinity is not below a limit that is infinite.
        usual: Tensor = (peak <= self.peak.to(peak)) & (rms <= self.rms.to(rms)) & torch.isfinite(peak)
        return ~usual.all(dim=1)
