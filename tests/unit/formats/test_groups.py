"""Groups of an HDF5 file: trajectories only where that is certain, and what differs between them is not the first's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ups.errors import DataError
from ups.formats.container import Container
from ups.formats.open_container import open_container

U = np.random.default_rng(0).normal(size=(12, 5, 8)).astype(np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "groups.h5"
    with h5py.File(path, "w") as file:
        for i in range(12):
            file[f"run_{i}/u"] = U[i]
            file[f"run_{i}/x"] = np.arange(8.0)
    return path


def _all(container: Container, name: str) -> Any:
    return container.read(name, tuple(slice(0, n, 1) for n in container.variables[name].shape))


def test_attributes_of_member_arrays_and_subgroups_have_one_value_for_each_group(path: Path) -> None:
    with h5py.File(path, "a") as file:
        for i in range(12):
            file[f"run_{i}/u"].attrs.update({"nu": float(i), "units": "m", "g": 9.81, "by": f"person {i}"})
            file[f"run_{i}/x"].attrs["offset"] = float(-i)
            file.create_group(f"run_{i}/params").attrs["mu"] = 10.0 * i
            file[f"run_{i}"].attrs["model"] = "heat"
            if i < 3:
                file[f"run_{i}/u"].attrs["odd"] = 1.0
    container = open_container(path)
    assert container.variables["*/u"].attributes == {"units": "m", "g": 9.81}
    np.testing.assert_array_equal(_all(container, "*/u@nu"), np.arange(12.0))
    np.testing.assert_array_equal(_all(container, "*/x@offset"), -np.arange(12.0))
    np.testing.assert_array_equal(_all(container, "*/params@mu"), 10 * np.arange(12.0))
    assert container.attributes == {"*@model": "heat"}
    assert tuple(container.left_out) == (
        "attribute 'by' of '*/u', a text that differs between groups",
        "attribute 'odd', which only some of the groups '*/u' have as a number",
    )


@pytest.mark.parametrize("key", ["scale_factor", "add_offset", "_FillValue", "missing_value", "units"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_an_array_whose_numbers_mean_something_else_in_each_group_is_left_out(
    path: Path, key: str, everywhere: bool
) -> None:
    with h5py.File(path, "a") as file:
        for i in range(12) if everywhere else range(1):
            file[f"run_{i}/u"].attrs[key] = f"{i} m" if key == "units" else float(i)
    container = open_container(path)
    assert set(container.variables) == {"*/x"}
    assert tuple(container.left_out) == (f"'*/u', whose attribute '{key}' differs between groups",)


def test_a_group_that_is_no_trajectory_stays_apart(path: Path) -> None:
    with h5py.File(path, "a") as file:
        file["mesh/t"], file["mesh/cells"] = np.arange(5.0), np.zeros((3, 2))
        file["run_12/u"] = U[0]  # without 'x', so it is not like the others
        file["mean/u"] = U[0]
    container = open_container(path)
    assert set(container.variables) == {"*/u", "*/x", "mesh/t", "mesh/cells"}
    np.testing.assert_array_equal(_all(container, "*/u"), U)
    (text,) = container.left_out
    assert "'mean/u' and 'run_12/u': whether groups" in text


@pytest.mark.parametrize(
    "names",
    [
        ["density/values", "pressure/values"],
        ["train/u", "test/u"],
        ["train/run_0/u", "train/run_1/u", "test/run_0/u", "test/run_1/u"],
        ["run_0/p/values", "run_0/q/values", "run_1/p/values", "run_1/q/values"],
    ],
    ids=str,
)
def test_groups_that_may_be_fields_or_splits_are_not_taken_for_trajectories(tmp_path: Path, names: list[str]) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for name in names:
            file[name] = U[0]
    with pytest.raises(DataError, match=r"no arrays of numbers.*trajectories, fields or splits"):
        open_container(path)
    with h5py.File(path, "a") as file:
        file["w"] = U
    assert set(open_container(path).variables) == {"w"}


def test_groups_may_be_called_by_digits_that_are_no_numbers(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in ("10", "9", "\u00b2"):
            file[f"{name}/u"] = U[0] * (name == "9")
    container = open_container(tmp_path / "a.h5")
    np.testing.assert_array_equal(_all(container, "*/u"), [U[0], 0 * U[0]])


def test_a_group_that_contains_itself_is_read_once(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["u"] = U
        file.create_group("g")["loop"] = file["/"]
    container = open_container(tmp_path / "a.h5")
    assert set(container.variables) == {"u"}
    assert tuple(container.left_out) == ("group 'g/loop' contains itself",)
