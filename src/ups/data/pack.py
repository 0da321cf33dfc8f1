"""From any reader to a store: converts PDEBench files, thins a store, compresses one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ups.formats.base import GridReader, Reader
from ups.formats.store_writer import FrameSource, StoreWriter
from ups.record.manifest import Manifest

Progress = Callable[[int, int], None]


def pack(
    reader: GridReader,
    path: str | Path,
    *,
    compression: str | None = None,
    overwrite: bool = False,
    generator: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Write all trajectories of a reader as a store, a few frames at a time. progress(done, total) in trajectories."""
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
    with writer:
        for split, count in reader.splits.items():
            for trajectory in range(count):
                given = reader.read(split, trajectory, 0, 0 if reader.task.steady else 1)
                writer.append(
                    split,
                    state=None if reader.task.steady else _frames_of(reader, split, trajectory),
                    static=given.static,
                    target=given.target,
                    parameters=given.parameters,
                    frames=reader.frames_in(split, trajectory) if "frames" in reader.differing else None,
                    dt=reader.dt_in(split, trajectory) if "dt" in reader.differing else None,
                )
                done += 1
                if progress is not None:
                    progress(done, total)
    return writer.manifest


def _frames_of(reader: Reader, split: str, trajectory: int) -> FrameSource:
    def frames(first: int, stop: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return reader.read(split, trajectory, first, stop - first).state

    return frames
