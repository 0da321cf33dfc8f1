"""Noise on the given frames: what a rollout's own errors look like to the next step.

A model that only sees clean frames leaves alone, or amplifies, what its errors put into waves that the data does not
contain. Part of the samples stay clean; the others get white noise whose size is log-uniform over two decades, because
errors of a good model are small and those of a poor one are not. Sizes are relative to how much the frame itself varies
over space, so that frames in which little is left are not drowned.

Draws are keyed by (seed, task, step, window number) and counted in whole numbers, so that every device and every cut of
a batch has the same ones. B samples, T frames, C channels, S space.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ups.models.normalization import Normalization
from ups.spec.batch import Batch
from ups.spec.keyed import key_of, keyed_rows, keyed_uniform

_DECADES = 2.0
# 2^64 / golden ratio, and the multipliers of SplitMix64 (ups.spec.keyed), as signed words.
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_HALF = 2.0**-24


def noisy(
    batch: Batch, frames: Tensor, normalization: Normalization, seed: int, *, largest: float, clean: float
) -> Tensor:
    """frames (B, T, C, *S) of a batch with noise up to `largest` deviations; a share `clean` of samples has none."""
    if largest == 0 or clean == 1:
        return frames
    task = batch.task
    key = key_of(seed, "noise", task.name, batch.stage_step)
    numbers = batch.numbers.numpy()
    draws = keyed_uniform(key, numbers, 2)  # (B, 2): size, and whether there is any
    hit = np.flatnonzero(draws[:, 1] >= clean)
    if len(hit) == 0:
        return frames
    size = torch.from_numpy(largest * 10.0 ** (-_DECADES * draws[hit, 0]))
    index = torch.from_numpy(hit).to(frames.device, non_blocking=True)
    chosen = frames.index_select(0, index)
    space = tuple(range(3, frames.ndim))
    deviation = chosen.std(space, correction=0, keepdim=True)
    deviation = torch.minimum(deviation, normalization.state_scale(task, frames))
    values = keyed_normal(
        key_of(seed, "noise values", task.name, batch.stage_step), numbers[hit], chosen[0].numel(), frames
    )
    scale = deviation * size.to(frames.device, frames.dtype, non_blocking=True).reshape(-1, *([1] * (frames.ndim - 1)))
    return frames.index_add(0, index, values.reshape(chosen.shape) * scale)


def keyed_normal(key: int, numbers: np.ndarray[tuple[int], np.dtype[np.int64]], count: int, like: Tensor) -> Tensor:
    """(len(numbers), count) standard normal draws on the device of `like`: row i depends on key and numbers[i] alone.

    The words are those behind `keyed_uniform`; each gives a pair (Box-Muller).
    """
    start = torch.from_numpy(keyed_rows(key, numbers).view(np.int64)).to(like.device, non_blocking=True)
    columns = torch.arange(1, (count + 1) // 2 + 1, device=like.device) * _GOLDEN
    words = _mixed(start[:, None] + columns)
    radius = (((words >> 40) & 0xFFFFFF).to(like.dtype) + 0.5).mul_(_HALF).log_().mul_(-2.0).sqrt_()
    angle = ((words >> 8) & 0xFFFFFF).to(like.dtype).mul_(2.0 * math.pi * _HALF)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :count]


def _mixed(x: Tensor) -> Tensor:
    """`ups.spec.keyed.mix` on signed words: products wrap around, shifts fill with zeros."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_2
    return x ^ ((x >> 31) & (2**33 - 1))
