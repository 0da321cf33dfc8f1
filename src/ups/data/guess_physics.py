"""What the values of a field suggest: what happens at the ends of an axis, and which integrals do not change.

A few frames of a few trajectories are looked at. A boundary is only named if the values show it; `open` cannot be seen,
and a field that does nothing near the ends shows nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ups.formats.base import Reader
from ups.spec.task import Boundary

Values = npt.NDArray[np.float64]

MAX_TRAJECTORIES = 12
MAX_FRAMES = 12
MAX_VALUES = 1 << 25
# The seam of a periodic axis looks like any other place: its differences are at most so many times the median ones,
# or, where a field varies most at the seam, so many times the largest ones inside.
SEAM = 2.5
LARGEST_SEAM = 1.5
# What is held fixed at an end changes by less than this part of what the inside does; a flat end likewise.
FIXED = 0.04
FLAT = 0.12
# A mean that changes by less than this part of how much the field varies in space is called conserved.
DRIFT = 1e-4
MOVES = 1e-3


@dataclass(frozen=True)
class Sample:
    """Frames (N, T, C, *S) of the state fields, or (N, 1, C, *S) of what a steady task asks for."""

    values: Values

    def without_last(self, axis: int) -> Sample:
        """Without the last point of an axis of space."""
        return Sample(np.delete(self.values, -1, axis=3 + axis))

    @property
    def whole(self) -> Values:
        """The trajectories whose values are all finite."""
        return self.values[np.isfinite(self.values).all(axis=tuple(range(1, self.values.ndim)))]


@dataclass(frozen=True)
class BoundaryGuess:
    """boundary, why, and whether the last point is the first again. unsure: something else fits as well."""

    boundary: Boundary
    why: str
    repeated_end: bool = False
    unsure: bool = False


def take_sample(reader: Reader) -> Sample:
    """Frames of the train split, evenly chosen."""
    task = reader.task
    points = int(np.prod(reader.space)) * max(1, task.num_channels(task.predicted))
    count = reader.splits["train"]
    frames = max(1, min(reader.num_frames, MAX_FRAMES, MAX_VALUES // max(1, points)))
    number = max(1, min(count, MAX_TRAJECTORIES, MAX_VALUES // max(1, points * frames)))
    parts = []
    for trajectory in np.unique(np.linspace(0, count - 1, number).astype(int)):
        if task.steady:
            window = reader.read("train", int(trajectory), 0, 0)
            parts.append(window.target[None])  # what is given obeys no boundary
            continue
        # As many of each, so that they can be stacked; of a short one some twice.
        chosen = np.linspace(0, reader.frames_in("train", int(trajectory)) - 1, frames).astype(int)
        states = [reader.read("train", int(trajectory), int(frame), 1).state[0] for frame in chosen]
        parts.append(np.stack(states))
    return Sample(np.stack(parts).astype(np.float64))


def guess_boundary(sample: Sample, axis: int) -> BoundaryGuess:
    """What happens at the two ends of an axis of space (0, 1 or 2)."""
    values = np.moveaxis(sample.whole, 3 + axis, -1)  # (N, T, C, ..., n)
    values = values.reshape(*values.shape[:3], math.prod(values.shape[3:-1]), values.shape[-1])  # (N, T, C, M, n)
    size = values.shape[-1]
    moving = [c for c in range(values.shape[2]) if values.size and np.ptp(values[:, :, c]) > 0]
    if size < 8 or not moving:
        return BoundaryGuess("unknown", "the values do not show it")
    channels = [values[:, :, c] for c in moving]
    if max(_activity(v) for v in channels) < FIXED / 4:
        return BoundaryGuess("unknown", "nothing happens near the ends")
    agree = all(_rms(v[..., 0] - v[..., -1]) < 1e-5 * (float(v.std()) or 1.0) for v in channels)
    repeats = agree and max(_seam(v[..., :-1]).by_median for v in channels) < SEAM
    if repeats and max(_wander(v[..., 0], v) for v in channels) > FIXED:
        why = "the last point is the first again in every frame"
        # Fields that are mirror images of themselves between two walls have equal ends, too.
        if all(max(_flat(v), _flat(v[..., ::-1])) < FLAT for v in channels):
            why += "; but fields are flat there, so that it may be neumann, without a repeated end"
            return BoundaryGuess("periodic", why, repeated_end=True, unsure=True)
        return BoundaryGuess("periodic", why, repeated_end=True)
    seams = [_seam(v) for v in channels]
    seam = max(seams, key=lambda seam: seam.by_largest).words
    larger = max(seam.by_largest for seam in seams) >= LARGEST_SEAM
    if max(seam.by_median for seam in seams) < SEAM:
        return BoundaryGuess("periodic", seam, unsure=larger)
    fixed = [max(_fixed(v), _fixed(v[..., ::-1])) for v in channels]
    flat = [max(_flat(v), _flat(v[..., ::-1])) for v in channels]
    if all(f < FIXED for f in fixed):
        return BoundaryGuess("dirichlet", f"{seam}, and the values at the ends stay constant")
    if all(f < FLAT for f in flat):
        return BoundaryGuess("neumann", f"{seam}, and the fields are flat at the ends")
    if all(a < FIXED or b < FLAT for a, b in zip(fixed, flat, strict=True)):
        return BoundaryGuess("wall", f"{seam}; some fields are flat at the ends, others stay constant")
    if not larger:
        return BoundaryGuess("periodic", f"{seam}, but larger than most", unsure=True)
    return BoundaryGuess("unknown", f"{seam}: not periodic, and neither fixed nor flat")


def guess_conserved(sample: Sample) -> dict[int, float]:
    """Channel -> largest change of its mean relative to how much it varies, for what is conserved while it moves."""
    values = sample.whole
    if values.shape[1] < 3 or not len(values):
        return {}
    space = tuple(range(3, values.ndim))
    integral = values.mean(axis=space)  # (N, T, C)
    # How much the field varies, not how large it is: 0.1 K of 300 K is no rounding.
    size = np.abs(values - values.mean(axis=space, keepdims=True)).mean(axis=space)
    drifts: dict[int, float] = {}
    for channel in range(values.shape[2]):
        field = values[:, :, channel]
        scale = float(size[..., channel].max())
        moved = float(np.abs(field - field[:, :1]).mean())
        if scale <= 0 or moved < MOVES * scale:
            continue
        drift = float(np.abs(integral[..., channel] - integral[:, :1, channel]).max()) / scale
        if drift < DRIFT:
            drifts[channel] = drift
    return drifts


def _rms(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def _wander(end: Values, inside: Values) -> float:
    """How much values at an end change in a trajectory, relative to how much those inside do."""
    usual = _rms(inside - inside.mean(axis=1, keepdims=True))
    if inside.shape[1] < 2 or usual == 0:  # no time: between samples
        usual = _rms(inside - inside.mean(axis=(0, 1), keepdims=True))
        return _rms(end - end.mean(axis=(0, 1), keepdims=True)) / usual if usual else 0.0
    return _rms(end - end.mean(axis=1, keepdims=True)) / usual


def _activity(v: Values) -> float:
    """How much happens in the outermost points of both ends, values and slopes, relative to the inside."""
    steps = np.diff(v, axis=-1)
    usual = _rms(steps)
    slopes = max(_rms(steps[..., :2]), _rms(steps[..., -2:])) / usual if usual else 0.0
    return max(_wander(v[..., 0], v), _wander(v[..., -1], v), slopes)


@dataclass(frozen=True)
class _Seam:
    """Differences over the ends relative to the median and to the largest ones inside (1 on a ring), and in words."""

    by_median: float = 0.0
    by_largest: float = 0.0
    words: str = "the step from the last point to the first is 0, as all others"


def _seam(v: Values) -> _Seam:
    """The largest factors of the differences of first to third order."""
    worst, ring = _Seam(), v
    for order in range(1, 4):
        ring = np.roll(ring, -1, axis=-1) - ring  # entry i: from i to i + order, around the ring
        squares = np.square(ring).reshape(-1, v.shape[-1]).mean(axis=0)
        inside, over = squares[: -order or None], squares[-order:]
        usual = float(np.sqrt(np.median(inside))) or float(np.sqrt(inside.mean()))
        if usual == 0:
            continue
        least, step = 1e-6 * _rms(v), float(np.sqrt(over.mean()))
        largest = max(float(np.sqrt(inside.max())), least)
        words = worst.words
        if step / largest >= worst.by_largest:
            words = f"the step from the last point to the first is {step / largest:.2g} times the largest inside"
            words += f" ({('', 'second ', 'third ')[order - 1]}differences, RMS {step:.2g} and {largest:.2g})"
        worst = _Seam(max(worst.by_median, step / max(usual, least)), max(worst.by_largest, step / largest), words)
    return worst


def _fixed(v: Values) -> float:
    """How much the left end changes, for points on the end, half a cell or a whole cell inside of it."""
    a, b, c = (v[..., i] for i in range(3))
    ends = (a, (15 * a - 10 * b + 3 * c) / 8, 3 * a - 3 * b + c)
    return min(_wander(end, v) for end in ends)


def _flat(v: Values) -> float:
    """The slope at the left end relative to the usual one, for points on the end or half a cell inside of it."""
    a, b, c = (v[..., i + 1] - v[..., i] for i in range(3))
    usual = _rms(np.diff(v, axis=-1))
    return min(_rms((15 * a - 10 * b + 3 * c) / 8), _rms(3 * a - 3 * b + c)) / usual if usual else 1.0
