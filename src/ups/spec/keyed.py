"""Randomness as a function of a key, never a stream.

A draw depends on (seed, purpose, step, window number) and on nothing else, so that a retry, another world size or
another micro-batch size sees the same draws, and there is no generator state to save.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64: a bijection of 64-bit words in which every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def key_of(seed: int, *parts: int | str) -> int:
    """One 64-bit key from a seed and what the draw is for. Stable over versions, machines and processes."""
    text = "\x1f".join([str(seed), *(str(p) for p in parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def keyed_uniform(key: int, numbers: npt.ArrayLike, num_draws: int = 1) -> npt.NDArray[np.float64]:
    """(len(numbers), num_draws) uniform draws in [0, 1): row i depends only on `key` and numbers[i]."""
    rows = keyed_rows(key, numbers)
    with np.errstate(over="ignore"):
        columns = np.arange(1, num_draws + 1, dtype=np.uint64) * _GOLDEN
        words = mix(rows[:, None] + columns[None, :])
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def keyed_rows(key: int, numbers: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """(len(numbers),) words: draw j of a row is `mix` of its word plus j times the golden ratio, j from 1."""
    with np.errstate(over="ignore"):
        return mix(mix(np.asarray(numbers, dtype=np.int64).astype(np.uint64) * _GOLDEN + np.uint64(key)))
