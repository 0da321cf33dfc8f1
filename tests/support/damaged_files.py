"""Damaged copies of files, the same for the same seed: flipped, filled, cut, spliced and exaggerated bytes."""

from __future__ import annotations

import numpy as np

_EXTREMES = (
    b"\xff" * 8,
    b"\x00" * 8,
    b"\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x00\x00\x00\x00\x01\x00\x00\x00",
    b"\x00\x00\x00\x40",
    b"\xff\xff",
)


def mutate(data: bytes, other: bytes, seed: int) -> bytes:
    """A damaged copy of `data`; `other` is a file of the same kind to splice from."""
    random = np.random.default_rng([seed, len(data)])
    out = bytearray(data)
    kind = int(random.integers(6))
    if kind == 0:
        for _ in range(int(random.integers(1, 17))):
            out[int(random.integers(len(out)))] ^= 1 << int(random.integers(8))
    elif kind == 1:
        for _ in range(int(random.integers(1, 9))):
            out[int(random.integers(len(out)))] = int(random.integers(256))
    elif kind == 2:
        del out[int(random.integers(len(out))) :]
    elif kind == 3:
        start, length = int(random.integers(len(out))), int(random.integers(1, 257))
        source = int(random.integers(len(other)))
        out[start : start + length] = other[source : source + length]
    elif kind == 4:
        start, length = int(random.integers(len(out))), int(random.integers(1, 65))
        out[start : start + length] = bytes([int(random.choice([0, 255]))]) * min(length, len(out) - start)
    else:
        for _ in range(int(random.integers(1, 5))):
            value = _EXTREMES[int(random.integers(len(_EXTREMES)))]
            start = int(random.integers(max(1, len(out) - 8))) & ~7
            out[start : start + len(value)] = value
    return bytes(out)
