"""A data set opened from Python: card, splits, trajectories as xarray, batches as tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import ups
from ups.errors import DataError

STORE = Path(__file__).parents[2] / "integration" / "runs" / "data" / "wave1d.zarr"


@pytest.fixture
def data() -> ups.Dataset:
    return ups.open_data(STORE)


def test_the_card_and_the_splits_are_those_of_the_store(data: ups.Dataset) -> None:
    assert data.card["task"] == data.task.name == "wave1d"
    assert data.card["splits"] == data.splits
    assert repr(data).startswith("Dataset('wave1d', ")


def test_a_trajectory_has_names_units_and_time(data: ups.Dataset) -> None:
    dataset = data.trajectory("test", 0)
    field = data.task.fields_of("state")[0]
    axis = data.task.axes[0].name
    assert dataset[field.name].dims[0] == "time"
    assert dataset.sizes["time"] == data.num_frames
    assert dataset.sizes[axis] == data.space[0]
    np.testing.assert_allclose(np.diff(dataset["time"]), data.task.dt, rtol=1e-6)
    assert dataset.attrs["split"] == "test"
    assert len(list(data.trajectories("test"))) == data.splits["test"]


def test_batches_hold_every_window_once(data: ups.Dataset) -> None:
    straight = list(data.batches("train", 5, frames=3))
    shuffled = list(data.batches("train", 5, frames=3, shuffle=1))
    numbers = torch.cat([batch.numbers for batch in straight])
    assert numbers.tolist() == list(range(data.splits["train"] * (data.num_frames - 2)))
    mixed = torch.cat([batch.numbers for batch in shuffled])
    assert sorted(mixed.tolist()) == numbers.tolist() != mixed.tolist()
    assert straight[0].state.shape[:2] == (5, 3)
    one = next(batch for batch in shuffled if 0 in batch.numbers)
    index = one.numbers.tolist().index(0)
    assert torch.equal(one.state[index], straight[0].state[0])


def test_a_batch_is_what_the_trajectory_says(data: ups.Dataset) -> None:
    batch = next(data.batches("valid", 1, frames=data.num_frames))
    field = data.task.fields_of("state")[0].name
    np.testing.assert_array_equal(batch.state[0, :, 0].numpy(), data.trajectory("valid", 0)[field].to_numpy())


def test_what_is_not_there_is_refused(data: ups.Dataset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no split 'trian'"):
        data.trajectory("trian")
    with pytest.raises(DataError, match="none of number 99"):
        data.trajectory("test", 99)
    with pytest.raises(DataError, match="does not exist"):
        ups.open_data(tmp_path / "no.zarr")
    with pytest.raises(DataError, match="1 or more"):
        ups.open_data(STORE, time_stride=0)
    with pytest.raises(DataError, match="do not fit"):
        next(data.batches(frames=99))
