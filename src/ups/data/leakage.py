"""Finds held-out trajectories that are also in the train split: a score on them says nothing.

Reads the first and the last frame of each trajectory, not the whole of it, so that it can run before every score; equal
bytes of both, of the given fields and of the parameters are an equal trajectory. Copies that were changed by noise are
found by `ups data validate`, which reads everything. Memory: 16 bytes per held-out trajectory, whatever is in train.
"""

from __future__ import annotations

import hashlib

import numpy as np

from ups.formats.base import Reader
from ups.spec.batch import Window


def trajectories_in_train(reader: Reader, split: str) -> dict[int, int]:
    """Trajectories of a held-out split that are also in train: number in `split` -> number in train."""
    held_out: dict[bytes, list[int]] = {}
    for trajectory in range(reader.splits.get(split, 0)):
        held_out.setdefault(fingerprint(reader, split, trajectory), []).append(trajectory)
    found: dict[int, int] = {}
    for trajectory in range(reader.splits.get("train", 0) if held_out else 0):
        for twin in held_out.get(fingerprint(reader, "train", trajectory), ()):
            found.setdefault(twin, trajectory)
    return dict(sorted(found.items()))


def fingerprint(reader: Reader, split: str, trajectory: int) -> bytes:
    """Hash of the first and last frame, the static and target fields and the parameters of a trajectory."""
    if reader.task.steady:
        return _digest([reader.read(split, trajectory, 0, 0)])
    ends = (0, reader.frames_in(split, trajectory) - 1)
    return _digest([reader.read(split, trajectory, frame, 1) for frame in ends])


def _digest(windows: list[Window]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for window in windows:
        for values in (window.state, window.static, window.target, window.parameters):
            # adding 0 makes one zero of the two
            digest.update(np.ascontiguousarray(values + np.float32(0.0)).tobytes())
    return digest.digest()
