"""Mean and deviation of many numbers in one pass: float64, merged by the formula of Chan, Golub and LeVeque."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

# Relative spacing of float32 numbers: data that varies less than this around its mean is constant but for rounding.
_RESOLUTION = 2.0**-23


class Moments:
    """Running mean, sum of squared deviations and range of several channels.

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
