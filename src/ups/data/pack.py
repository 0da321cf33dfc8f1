"""From any reader to a store: converts PDEBench files, thins a store, compresses one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ups.formats.base import Reader
from ups.formats.store_writer import FrameSource, StoreWriter
from ups.record.manifest import Manifest
from ups.spec.batch import Float32

Progress = Callable[[int, int], None]


def pack(
    reader: Reader,
    path: str | Path,
    *,
    compression: str | None = None,
    overwrite: bool = False,
    generator: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Write all trajectories of a reader as a store, a few frames at a time. progress(done, total) in trajectories.

    Values that are not finite are counted, and the store names their number among its assumptions.
    """
    done, total = 0, sum(reader.splits.values())
    facts = {"packed_from": reader.identity(), **(generator or {})}
    if reader.assumptions:
        facts["assumptions"] = list(reader.assumptions)
    writer = StoreWriter(
        path,
        reader.task,
        reader.coordinates,
        reader.num_frames,
        times=reader.times,
        compression=compression,
        overwrite=overwrite,
        generator=facts,
    )
    bad = seen = 0

    def counted(values: Float32) -> Float32:
        nonlocal bad, seen
        bad, seen = bad + int(np.count_nonzero(~np.isfinite(values))), seen + values.size
        return values

    with writer:
        for split, count in reader.splits.items():
            for trajectory in range(count):
                fields = reader.read(split, trajectory, 0, 0 if reader.task.steady else 1)
                writer.append(
                    split,
                    state=None if reader.task.steady else _frames_of(reader, split, trajectory, counted),
                    static=counted(fields.static),
                    target=counted(fields.target),
                    parameters=fields.parameters,
                    frames=reader.frames_in(split, trajectory) if "frames" in reader.differing else None,
                    dt=reader.dt_in(split, trajectory) if "dt" in reader.differing else None,
                )
                done += 1
                if progress is not None:
                    progress(done, total)
        if bad:
            writer.assume(f"{bad} of {seen} values are not finite, and training refuses them: see `ups data validate`")
    return writer.manifest


def _frames_of(reader: Reader, split: str, trajectory: int, counted: Callable[[Float32], Float32]) -> FrameSource:
    def frames(first: int, stop: int) -> Float32:
        return counted(reader.read(split, trajectory, first, stop - first).state)

    return frames
