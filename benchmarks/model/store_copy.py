"""Copies of a store for comparisons: fewer trajectories, another description, other frames. No program of its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def copy_store(
    source: Path,
    target: Path,
    *,
    train: int | None = None,
    valid: int | None = None,
    test: int | None = None,
    compression: str | None = None,
    describe: Callable[[Any], Any] = lambda task: task,
    state: Callable[[Any], Any] = lambda frames: frames,
) -> None:
    """Write `target` unless it is there: the first trajectories of each split, by default all.

    describe: from the task to that of the copy. state: from the frames (T, C, *S) of a trajectory to those of the copy.
    """
    from ups.data.open import open_paths
    from ups.formats.store_writer import StoreWriter

    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.closing(open_paths(source)) as reader:
        steady = reader.task.steady
        frames = 0 if steady else reader.num_frames
        wanted = {"train": train, "valid": valid, "test": test}
        counts = {split: reader.splits.get(split, 0) if n is None else n for split, n in wanted.items()}
        for split, count in counts.items():
            if reader.splits.get(split, 0) < count:
                sys.exit(f"{source} has {reader.splits.get(split, 0)} {split} trajectories, not {count}")
        times = None if steady else reader.times
        task, points = describe(reader.task), reader.coordinates
        with StoreWriter(target, task, points, frames, times=times, compression=compression) as writer:
            for split, count in counts.items():
                for number in range(count):
                    one = reader.read(split, number, 0, frames)
                    writer.append(
                        split, state=state(one.state), static=one.static, target=one.target, parameters=one.parameters
                    )
