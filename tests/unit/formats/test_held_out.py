"""Held-out trajectories from another data set: whose task, whose train split, and what cannot be scored at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ups.errors import ConfigError
from ups.formats.base import Reader
from ups.formats.held_out import HeldOutElsewhere
from ups.formats.store_writer import StoreWriter
from ups.formats.zarr_store import StoreReader
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

TASK = TaskSpec("wave", (FieldSpec("u"),), (AxisSpec("x"),), (ParameterSpec("c", minimum=0.0, maximum=1.0),), dt=0.1)


def store(path: Path, value: float, task: TaskSpec = TASK, points: int = 16, frames: int = 4) -> Reader:
    x = (np.arange(points) + 0.5) / points
    with StoreWriter(path, task, [x], frames) as writer:
        for split, count in (("train", 2), ("valid", 1), ("test", 3)):
            for _ in range(count):
                parameters = [value] * len(task.parameters)
                writer.append(split, state=np.full((frames, 1, points), value, np.float32), parameters=parameters)
    return StoreReader(path)


def test_the_task_and_the_train_split_are_those_of_the_model(tmp_path: Path) -> None:
    shifted = replace(TASK, parameters=(ParameterSpec("c", minimum=2.0, maximum=3.0),))
    own, other = store(tmp_path / "own.zarr", 0.5), store(tmp_path / "other.zarr", 2.5, shifted, frames=6)
    both = HeldOutElsewhere(own, other)
    assert both.task == TASK, "ranges are units of what a network is given"
    assert dict(both.splits) == {"train": 2, "valid": 1, "test": 3}
    assert (both.frames_in("train", 0), both.frames_in("test", 0), both.num_frames) == (4, 6, 6)
    assert both.read("train", 0, 0, 1).state.max() == np.float32(0.5)
    assert both.read("test", 0, 5, 1).state.max() == np.float32(2.5)
    assert both.read_block("test", [0, 1], [0, 1], 2).state.min() == np.float32(2.5)
    assert both.identity() == other.identity() != own.identity()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dt": 0.2}, "dt of the other data is 0.2"),
        ({"fields": (FieldSpec("v"),)}, "fields of the other data"),
        ({"parameters": ()}, "the other data have the parameters"),
        ({"parameters": (replace(TASK.parameters[0], unit="cm/s"),)}, "the other data have the parameters"),
        ({"axes": (AxisSpec("x", "wall"),)}, "axes of the other data"),
    ],
)
def test_another_task_is_refused(tmp_path: Path, change: dict[str, object], says: str) -> None:
    own = store(tmp_path / "own.zarr", 0.5)
    other = store(tmp_path / "other.zarr", 0.5, replace(TASK, **change))
    with pytest.raises(ConfigError, match=says):
        HeldOutElsewhere(own, other)


def test_another_grid_is_refused(tmp_path: Path) -> None:
    own, other = store(tmp_path / "own.zarr", 0.5), store(tmp_path / "other.zarr", 0.5, points=32)
    with pytest.raises(ConfigError, match="a grid of"):
        HeldOutElsewhere(own, other)


def test_points_in_other_places_are_refused(tmp_path: Path) -> None:
    own = store(tmp_path / "own.zarr", 0.5)
    x = np.sort(np.append(np.random.default_rng(0).uniform(0.01, 0.99, 14), [0.0, 1.0]))
    with StoreWriter(tmp_path / "other.zarr", TASK, [x], 4) as writer:
        writer.append("test", state=np.zeros((4, 1, 16), np.float32), parameters=[0.5])
    with pytest.raises(ConfigError, match="or other points"):
        HeldOutElsewhere(own, StoreReader(tmp_path / "other.zarr"))
