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
    describe: Callable[[Any], Any] = lambda task: task,
    state: Callable[[Any], Any] = lambda frames: frames,
) -> None:
    """Write `target` unless it is there: the first `train` trajectories of that split (default all), and all others.

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
        counts = dict(reader.splits) | ({} if train is None else {"train": train})
        if reader.splits["train"] < counts["train"]:
            sys.exit(f"{source} has {reader.splits['train']} train trajectories, not {train}")
        times = None if steady else reader.times
        with StoreWriter(target, describe(reader.task), reader.coordinates, frames, times=times) as writer:
            for split in ("train", "valid", "test"):
                for number in range(counts[split]):
                    one = reader.read(split, number, 0, frames)
                    writer.append(
                        split, state=state(one.state), static=one.static, target=one.target, parameters=one.parameters
                    )
