"""Readers that misbehave on purpose, and real stores to read. Importable by worker processes."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import numpy as np

from ups.formats.store_writer import StoreWriter
from ups.formats.zarr_store import StoreReader
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

TRANSIENT = TaskSpec(
    "wave",
    (FieldSpec("u"), FieldSpec("v"), FieldSpec("a", role="static")),
    (AxisSpec("x"),),
    parameters=(ParameterSpec("beta", minimum=0.1, maximum=10.0, scale="log"), ParameterSpec("shift")),
    dt=0.05,
)
STEADY = TaskSpec(
    "darcy", (FieldSpec("a", role="static"), FieldSpec("u", role="target")), (AxisSpec("x"), AxisSpec("y")), steady=True
)


def write_wave(path: Path, num_train: int = 12, num_frames: int = 9, num_points: int = 16) -> Path:
    """A transient task; the value of u is trajectory * 1000 + frame everywhere, so a window says where it is from."""
    with StoreWriter(path, TRANSIENT, [np.arange(num_points) / num_points], num_frames) as writer:
        for split, count in (("train", num_train), ("valid", 5), ("test", 3)):
            for trajectory in range(count):
                frames = trajectory * 1000.0 + np.arange(num_frames)[:, None]
                state = np.stack([frames + np.zeros(num_points), 0.5 * frames + np.linspace(0, 1, num_points)], axis=1)
                static = np.full((1, num_points), trajectory)
                writer.append(split, state=state, static=static, parameters=[0.1 * (trajectory + 1), -trajectory])
    return path


def write_darcy(path: Path, num_train: int = 10) -> Path:
    """A steady task in two dimensions."""
    with StoreWriter(path, STEADY, [np.arange(4.0), np.arange(6.0)], 0) as writer:
        for split, count in (("train", num_train), ("valid", 4)):
            for trajectory in range(count):
                grid = np.full((1, 4, 6), float(trajectory))
                writer.append(split, static=grid, target=-grid)
    return path


class RaisingReader(StoreReader):
    """Raises for one trajectory."""

    def _frames(self, split: str, trajectory: int, start: int, stop: int, step: int) -> Any:
        if trajectory == 7:
            raise ValueError("planted")
        return super()._frames(split, trajectory, start, stop, step)


class FlakyReader(StoreReader):
    """Raises the first time it is asked for many windows, and never for one."""

    def read_block(self, split: str, trajectories: Any, start_frames: Any, num_frames: int) -> Any:
        if len(trajectories) > 1:
            raise OSError(5, "Input/output error")
        return super().read_block(split, trajectories, start_frames, num_frames)


class SlowReader(StoreReader):
    """Takes its time for every block."""

    def read_block(self, split: str, trajectories: Any, start_frames: Any, num_frames: int) -> Any:
        time.sleep(0.3)
        return super().read_block(split, trajectories, start_frames, num_frames)


class SleepingReader(StoreReader):
    """Never comes back from its second block."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        self.num_blocks = 0

    def read_block(self, split: str, trajectories: Any, start_frames: Any, num_frames: int) -> Any:
        self.num_blocks += 1
        if self.num_blocks > 1:
            time.sleep(10_000)
        return super().read_block(split, trajectories, start_frames, num_frames)


class CrashingReader(StoreReader):
    """Dies in native code."""

    def read_block(self, split: str, trajectories: Any, start_frames: Any, num_frames: int) -> Any:
        return crash()


def crash() -> int:
    return ctypes.string_at(0)[0]
