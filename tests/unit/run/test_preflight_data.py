"""What a recipe asks of its data, before any rank starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ups
from tests.support.small_bundle import ADVECTION, grid
from ups.data.open import open_tasks
from ups.errors import ConfigError, DataError
from ups.formats.store_writer import StoreWriter
from ups.run.preflight import check_data

TASK = replace(ADVECTION, axes=(replace(ADVECTION.axes[0], boundary="wall"),), conserved=("u",), symmetries=())


def check(path: Path, lengths: dict[str, int], power: float = 1.0) -> None:
    x = grid(TASK)[0] ** power
    with StoreWriter(path, TASK, [x], max(lengths.values())) as writer:
        for split, frames in lengths.items():
            state = np.tile(np.sin(2 * np.pi * x), (frames, 1, 1)).astype(np.float32)
            writer.append(split, state=state, parameters=[1.0], frames=frames)
    recipe = ups.load_recipe(
        {
            "version": 1,
            "run": {"name": "a"},
            "data": {"tasks": [{"name": TASK.name, "path": str(path)}]},
            "model": {"type": "multiscale"},
            "stages": [{"type": "operator", "steps": 1}],
        }
    )
    with open_tasks(recipe.data) as readers:
        check_data(recipe, readers)


def test_trajectories_that_are_long_enough_are_accepted(tmp_path: Path) -> None:
    check(tmp_path / "a.zarr", {"train": 2, "valid": 2, "test": 2})


@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_split_without_anything_to_score_is_refused(tmp_path: Path, split: str) -> None:
    lengths = {"train": 5, "valid": 5, "test": 5} | {split: 1}
    with pytest.raises(DataError, match=f"no trajectory of split '{split}' .* has 2 frames: there is nothing to score"):
        check(tmp_path / "a.zarr", lengths)


def test_a_train_split_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no trajectory of 2 frames to train on"):
        check(tmp_path / "a.zarr", {"train": 1, "valid": 5, "test": 5})


def test_integrals_on_an_uneven_grid_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not equally spaced along x"):
        check(tmp_path / "a.zarr", {"train": 5, "valid": 5, "test": 5}, power=2.0)
