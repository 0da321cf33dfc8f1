"""Standard normal draws as a function of a key, on any device: see `ups.spec.keyed`.

Counted in whole numbers, so that every device and every cut of a batch has the same ones.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ups.spec.keyed import keyed_rows

# 2^64 / golden ratio, and the multipliers of SplitMix64 (ups.spec.keyed), as signed words.
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_HALF = 2.0**-24


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
