"""Which reader a path gets, and what is refused before a reader exists."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ups.config.schema import TaskConfig
from ups.data.open import open_paths, open_task
from ups.errors import DataError
from ups.formats.base import Reader
from ups.formats.store_writer import StoreWriter
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec


@pytest.fixture
def store(tmp_path: Path) -> Path:
    task = TaskSpec("t", (FieldSpec("u"),), (AxisSpec("x"),), dt=0.5)
    with StoreWriter(tmp_path / "t.zarr", task, [np.arange(8.0)], 6) as writer:
        writer.append("train", state=np.arange(48.0).reshape(6, 1, 8))
    return tmp_path / "t.zarr"


def test_a_recipe_names_the_task_and_its_strides(store: Path) -> None:
    reader = open_task(TaskConfig(name="mine", path=str(store), time_stride=2, space_stride=4))
    assert isinstance(reader, Reader)
    assert (reader.task.name, reader.task.dt, reader.num_frames, reader.space) == ("mine", 1.0, 3, (2,))
    assert reader.read("train", 0, 2, 1).state.ravel().tolist() == [32.0, 36.0]


def test_missing_and_mixed_paths_are_refused(store: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="of task 'mine' does not exist") as caught:
        open_task(TaskConfig(name="mine", path=str(tmp_path / "none.zarr")))
    assert "`ups run RECIPE`, which needs a `source:` of the task" in caught.value.hint
    with pytest.raises(DataError, match="a store is one path"):
        open_paths([store, store])
    with pytest.raises(DataError, match="no file"):
        open_paths([])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="missing"):
        open_paths(tmp_path / "empty")


def test_a_split_without_trajectories_is_empty_not_absent(store: Path) -> None:
    reader = open_paths(store)
    assert reader.splits == {"train": 1, "valid": 0, "test": 0}
    with pytest.raises(DataError, match="no window"):
        reader.read("test", 0, 0, 1)


def test_data_that_a_recipe_would_fetch_is_said_to_be_missing_with_the_command(tmp_path: Path) -> None:
    config = TaskConfig.model_validate(
        {
            "name": "burgers",
            "path": str(tmp_path / "pdebench/burgers1d/1D_Burgers_Sols_Nu0.01.hdf5"),
            "source": {"type": "fetch", "dataset": "pdebench/burgers1d"},
        }
    )
    with pytest.raises(DataError, match="of task 'burgers' does not exist yet, and shapes are read from") as caught:
        open_task(config)
    assert "ups data fetch pdebench/burgers1d --only '1D_Burgers_Sols_Nu0.01.hdf5'" in caught.value.hint
