"""Held-out trajectories that are also in train are found, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ups.data.validate import trajectories_in_train
from ups.formats.store_writer import StoreWriter
from ups.formats.zarr_store import StoreReader
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

X = np.arange(16) / 16
WAVE = TaskSpec("wave", (FieldSpec("u"),), (AxisSpec("x"),), parameters=(ParameterSpec("speed", maximum=9.0),), dt=0.1)
STEADY = TaskSpec(
    "steady", (FieldSpec("a", role="static"), FieldSpec("u", role="target")), (AxisSpec("x"),), steady=True
)


def wave(number: int) -> np.ndarray:
    """(5, 1, 16): all start from the same frame, at rest, and end differently."""
    frames = np.sin(2 * np.pi * X) + number * np.linspace(0, 1, 5)[:, None] * np.cos(2 * np.pi * X)
    return frames[:, None].astype(np.float32)


def store(path: Path, train: list[int], test: list[int], speed: float = 1.0) -> StoreReader:
    with StoreWriter(path, WAVE, [X], 5) as writer:
        for split, numbers in (("train", train), ("test", test)):
            for number in numbers:
                writer.append(split, state=wave(number), parameters=[speed if split == "train" else 1.0])
    return StoreReader(path)


def test_a_test_trajectory_that_is_in_train_is_named_with_its_twin(tmp_path: Path) -> None:
    reader = store(tmp_path / "a.zarr", train=[1, 2, 3, 4], test=[5, 3, 6, 1, 1])
    assert trajectories_in_train(reader, "test") == {1: 2, 3: 0, 4: 0}


def test_equal_first_frames_or_equal_fields_of_another_equation_are_no_leak(tmp_path: Path) -> None:
    assert trajectories_in_train(store(tmp_path / "a.zarr", [1, 2], [3, 4]), "test") == {}
    assert trajectories_in_train(store(tmp_path / "b.zarr", [1, 2], [1, 2], speed=2.0), "test") == {}


def test_the_sign_of_zero_hides_nothing(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "a.zarr", WAVE, [X], 5) as writer:
        for split, zero in (("train", 0.0), ("test", -0.0)):
            state = wave(1)
            state[:, :, 0] = zero
            writer.append(split, state=state, parameters=[1.0])
    assert trajectories_in_train(StoreReader(tmp_path / "a.zarr"), "test") == {0: 0}


def test_steady_tasks_are_compared_by_what_is_given_and_asked(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "a.zarr", STEADY, [X], 0) as writer:
        for split, numbers in (("train", (1, 2)), ("test", (2, 3))):
            for number in numbers:
                writer.append(split, static=np.full((1, 16), number), target=np.sin(number * X)[None])
    assert trajectories_in_train(StoreReader(tmp_path / "a.zarr"), "test") == {0: 1}


def test_whole_trajectories_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = store(tmp_path / "a.zarr", [1, 2, 3], [4])
    read = []
    original = StoreReader._frames
    monkeypatch.setattr(
        StoreReader, "_frames", lambda self, *request: read.append(request[3] - request[2]) or original(self, *request)
    )
    trajectories_in_train(reader, "test")
    assert read == [1] * 8
