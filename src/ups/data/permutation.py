"""Keyed permutations of [0, n): any n up to 2^62, O(1) memory, vectorized, with an inverse.

A number is written as a pair (left, right) in [0, a) x [0, b) with a, b near sqrt(n). Each Feistel round adds a keyed
hash of one half to the other half, modulo the size of that half, which is a bijection whatever the hash is. The grid
a x b exceeds n by less than a points; a number that lands on one of those is sent through again until it is below n
("cycle walking"), which keeps the map a bijection of [0, n). With halves that are not powers of two the grid is so
tight that this happens about once in sqrt(n) numbers.

What a permutation is used for, passes over the windows of a task, is the business of `ups.data.sampler`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ups.spec.keyed import mix

UInt64 = npt.NDArray[np.uint64]
_Step = Callable[[UInt64, UInt64], UInt64]

MAX_SIZE = 2**62
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = np.uint64(0x94D049BB133111EB)
_FOLD = np.uint64(32)
# Leaves 35 bits, more than a half can need (31), and space for the addition that follows.
_DROP = np.uint64(29)
# Six rounds with a good hash look random for large n. Below 1024 they reach all orders, but not equally often;
# twelve do (tests/unit/data/test_sampler_permutation.py counts them).
_ROUNDS_LARGE = 6
_ROUNDS_SMALL = 12
_SMALL = 1024
_ROUNDS = (np.arange(1, _ROUNDS_SMALL + 1, dtype=np.uint64) * _GOLDEN)[:, None]


class Permutation:
    """A family of permutations of [0, size), one for every (key, pass)."""

    __slots__ = ("_key", "_last", "_left", "_right", "_rounds", "size")

    def __init__(self, size: int, key: int) -> None:
        if not 1 <= size <= MAX_SIZE:
            raise ValueError(f"a permutation needs a size from 1 to 2^62, not {size}")
        self.size = size
        left = math.isqrt(size - 1) + 1
        self._left = np.uint64(left)
        self._right = np.uint64(-(-size // left))
        self._key = np.uint64(key)
        self._rounds = _ROUNDS[: _ROUNDS_SMALL if size < _SMALL else _ROUNDS_LARGE]  # (rounds, 1)
        # Nearly every call asks for one pass, the same as the call before.
        self._last: tuple[int, UInt64] | None = None

    def forward(self, positions: npt.ArrayLike, passes: npt.ArrayLike = 0) -> npt.NDArray[np.int64]:
        """The number at each position of its pass. positions (n,) in [0, size); passes (n,) or a single one."""
        return self._walk(positions, passes, self._encrypt)

    def inverse(self, numbers: npt.ArrayLike, passes: npt.ArrayLike = 0) -> npt.NDArray[np.int64]:
        """The position of each number in its pass: undoes `forward`."""
        return self._walk(numbers, passes, self._decrypt)

    def _walk(self, values: npt.ArrayLike, passes: npt.ArrayLike, step: _Step) -> npt.NDArray[np.int64]:
        inputs = np.asarray(values, dtype=np.int64).astype(np.uint64)  # a negative one becomes too large
        size = np.uint64(self.size)
        if inputs.size and inputs.max() >= size:
            raise ValueError(f"places and numbers of a permutation of size {self.size} must be in [0, {self.size})")
        keys = self._keys_of(passes)  # (rounds, n) or (rounds, 1)
        result = step(inputs, keys)
        outside = np.flatnonzero(result >= size)
        while outside.size:
            walked = step(result[outside], keys if keys.shape[1] == 1 else keys[:, outside])
            result[outside] = walked
            outside = outside[walked >= size]
        return result.view(np.int64)

    def _keys_of(self, passes: npt.ArrayLike) -> UInt64:
        if not isinstance(passes, int):
            return self._round_keys(np.atleast_1d(np.asarray(passes)).astype(np.uint64))
        if self._last is None or self._last[0] != passes:
            self._last = (passes, self._round_keys(np.array([passes], np.uint64)))
        return self._last[1]

    def _round_keys(self, passes: UInt64) -> UInt64:
        return mix(mix(passes * _GOLDEN + self._key)[None, :] + self._rounds)  # (rounds, len(passes))

    def _encrypt(self, x: UInt64, keys: UInt64) -> UInt64:
        left, right = x // self._right, x % self._right
        for i in range(0, len(keys), 2):
            left += _hash(right, keys[i])
            left %= self._left
            right += _hash(left, keys[i + 1])
            right %= self._right
        left *= self._right
        left += right
        return left

    def _decrypt(self, x: UInt64, keys: UInt64) -> UInt64:
        left, right = x // self._right, x % self._right
        for i in range(len(keys) - 2, -1, -2):
            right = (right + self._right - _hash(left, keys[i + 1]) % self._right) % self._right
            left = (left + self._left - _hash(right, keys[i]) % self._left) % self._left
        return left * self._right + right


def _hash(half: UInt64, key: UInt64) -> UInt64:
    """A keyed hash to 35 bits. Lighter than `mix` and in place: with small blocks, calls into numpy are the cost."""
    x = half ^ key
    x *= _MULTIPLY_1
    x ^= x >> _FOLD
    x *= _MULTIPLY_2
    x >>= _DROP
    return x
