"""Files of The Well: what is read, and what is made of attributes that are missing."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support import pdebench_files
from tests.support import the_well_files as files
from ups.data.open import open_paths
from ups.errors import DataError
from ups.formats.base import Subsampling
from ups.formats.the_well import THE_WELL, WellReader

Change = Callable[[h5py.File], None]


def _written(path: Path, content: files.Content, change: Change | None = None) -> WellReader:
    files.write(path, content)
    if change is not None:
        with h5py.File(path, "r+") as file:
            change(file)
    return WellReader(path, valid_fraction=0, test_fraction=0)


def _state(content: files.Content, trajectory: int) -> np.ndarray:
    """(T, C, *S) of what was written."""
    dims, parts = len(content.axes), []
    for rank in range(3):
        for data in content.fields.get(rank, {}).values():
            if data.time:
                flat = data.values[trajectory].reshape(*data.values.shape[1 : 2 + dims], -1)
                parts.append(np.moveaxis(flat, -1, 1))
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("storage", [{}, {"chunks": True}, {"chunks": True, "compression": "gzip", "shuffle": True}])
@pytest.mark.parametrize("kind", files.KINDS)
def test_every_kind_of_file_gives_back_what_was_written(tmp_path: Path, kind: str, storage: dict[str, object]) -> None:
    content = files.write(tmp_path / "a.h5", files.KINDS[kind](), **storage)
    reader = WellReader(tmp_path / "a.h5", valid_fraction=0, test_fraction=0)
    assert reader.splits == {"train": content.trajectories, "valid": 0, "test": 0}
    for trajectory in range(content.trajectories):
        window = reader.read("train", trajectory, 1, 3)
        np.testing.assert_array_equal(window.state, _state(content, trajectory)[1:4])
    copy = pickle.loads(pickle.dumps(reader))
    np.testing.assert_array_equal(copy.read("train", 0, 0, 2).state, reader.read("train", 0, 0, 2).state)


def test_fields_have_their_rank_role_and_channels(tmp_path: Path) -> None:
    reader = _written(tmp_path / "a.h5", files.vectors_and_tensors())
    assert [(f.name, f.tensor_rank) for f in reader.task.fields] == [("density", 0), ("velocity", 1), ("strain", 2)]
    assert reader.task.channel_names("state")[-4:] == ("strain_x_x", "strain_x_y", "strain_y_x", "strain_y_y")
    assert any("forcing" in text for text in reader.assumptions)
    reader = _written(tmp_path / "b.h5", files.static_fields())
    content = files.static_fields()
    static = reader.read("train", 2, 0, 1).static
    assert reader.task.channel_names("static") == ("speed_of_sound", "height", "profile", "drift_x", "drift_y")
    fields = {**content.fields[0], **content.fields[1]}
    np.testing.assert_array_equal(static[0], fields["speed_of_sound"].values[2])
    np.testing.assert_array_equal(static[1], fields["height"].values)
    np.testing.assert_array_equal(static[2], np.broadcast_to(fields["profile"].values, (8, 6)))
    np.testing.assert_array_equal(static[3:], np.moveaxis(fields["drift"].values[2], -1, 0))


def test_parameters_are_of_each_trajectory_or_of_the_file(tmp_path: Path) -> None:
    reader = _written(tmp_path / "a.h5", files.vectors_and_tensors())
    assert [float(reader.read("train", i, 0, 1).parameters[0]) for i in range(3)] == [0.5, 1.0, 2.0]
    reader = _written(tmp_path / "b.h5", files.two_dims(), lambda file: file.__delitem__("scalars"))
    assert [(p.name, p.minimum) for p in reader.task.parameters] == [("viscosity", 1e-3), ("gamma", 1.4)]


def test_faces_and_walls_inside_come_from_the_masks(tmp_path: Path) -> None:
    reader = _written(tmp_path / "a.h5", files.masks())
    assert [axis.ends for axis in reader.task.axes] == [("wall", "open"), ("wall", "open")]
    mask = files.masks().masks["xy_wall"][2]
    assert reader.task.channel_names("static") == ("xy_wall_mask",)
    np.testing.assert_array_equal(reader.read("train", 1, 0, 1).static[0], mask.astype(np.float32))
    reader = _written(tmp_path / "b.h5", files.two_dims())
    assert [axis.boundary for axis in reader.task.axes] == ["periodic", "wall"]
    assert not reader.task.fields_of("static")


def test_a_periodic_axis_with_an_empty_mask_is_periodic_and_that_is_said(tmp_path: Path) -> None:
    def empty(file: h5py.File) -> None:
        file["boundary_conditions/x_periodic/mask"][:] = False
        file["boundary_conditions/x_periodic"].attrs["associated_dims"] = "x"  # a plain text, as some files have it

    reader = _written(tmp_path / "a.h5", files.two_dims(), empty)
    assert reader.task.axes[0].periodic
    assert any("mask of 'x_periodic' is empty" in text for text in reader.assumptions)


def test_time_that_varies_by_trajectory_gives_each_its_own_step(tmp_path: Path) -> None:
    reader = _written(tmp_path / "a.h5", files.varying_time())
    assert [round(reader.dt_in("train", i), 5) for i in range(3)] == [0.1, 0.2, 0.3]
    assert reader.differing == ("dt",)
    np.testing.assert_allclose(reader.times_in("train", 2), np.arange(6) * 0.3, rtol=1e-6)

    def shorter(file: h5py.File) -> None:
        file["dimensions/time"][1, 4:] = np.nan

    reader = _written(tmp_path / "b.h5", files.varying_time(), shorter)
    assert [reader.frames_in("train", i) for i in range(3)] == [6, 4, 6]


def _no_flags(file: h5py.File) -> None:
    for group in ("t0_fields", "t1_fields", "t2_fields"):
        del file[group].attrs["field_names"]
        for dataset in file[group].values():
            for name in list(dataset.attrs):
                del dataset.attrs[name]


def _no_root(file: h5py.File) -> None:
    for name in list(file.attrs):
        del file.attrs[name]


def _no_axes(file: h5py.File) -> None:
    for owner in (file["dimensions"], *file["dimensions"].values()):
        for name in list(owner.attrs):
            del owner.attrs[name]


def _no_conditions(file: h5py.File) -> None:
    del file["boundary_conditions"]


def _bare_conditions(file: h5py.File) -> None:
    for group in file["boundary_conditions"].values():
        for name in ("bc_type", "sample_varying", "time_varying", "associated_fields"):
            del group.attrs[name]


def _more(file: h5py.File) -> None:
    file.create_group("additional_information")["notes"] = np.zeros(3)
    del file["scalars"]


@pytest.mark.parametrize("change", [_no_flags, _no_root, _no_axes, _no_conditions, _bare_conditions, _more])
@pytest.mark.parametrize("kind", ["two_dims", "vectors_and_tensors", "varying_time"])
def test_whatever_attribute_is_missing_the_same_numbers_are_read(tmp_path: Path, kind: str, change: Change) -> None:
    whole = _written(tmp_path / "a.h5", files.KINDS[kind]())
    reader = _written(tmp_path / "b.h5", files.KINDS[kind](), change)
    for trajectory in range(reader.splits["train"]):
        np.testing.assert_array_equal(
            reader.read("train", trajectory, 0, 6).state, whole.read("train", trajectory, 0, 6).state
        )
    expected = "unknown" if change is _no_conditions else whole.task.axes[0].boundary
    assert reader.task.axes[0].boundary == expected


def test_an_axis_along_which_a_field_does_not_vary_may_be_absent_or_of_length_one(tmp_path: Path) -> None:
    content = files.two_dims()
    row, column = files.numbers(4, 9, 8, seed=5), files.numbers(4, 9, 12, 1, seed=6)
    content.fields[0] |= {
        "row": files.Dataset(row, dims=(False, True)),
        "column": files.Dataset(column, dims=(True, False)),
    }
    state = _written(tmp_path / "a.h5", content).read("train", 3, 2, 4).state
    np.testing.assert_array_equal(state[:, 2], np.broadcast_to(row[3, 2:6, None, :], (4, 12, 8)))
    np.testing.assert_array_equal(state[:, 3], np.broadcast_to(column[3, 2:6], (4, 12, 8)))


def test_a_falling_axis_is_turned_with_its_fields(tmp_path: Path) -> None:
    content = files.two_dims()
    content.axes["x"] = content.axes["x"][::-1].copy()
    reader = _written(tmp_path / "a.h5", content)
    assert (np.diff(reader.coordinates[0]) > 0).all()
    np.testing.assert_array_equal(reader.read("train", 0, 0, 2).state, _state(content, 0)[:2, :, ::-1])


def test_a_flat_tensor_and_a_third_component_are_read(tmp_path: Path) -> None:
    content = files.vectors_and_tensors()
    strain = content.fields[2]["strain"].values
    content.fields[2]["strain"].values = strain.reshape(*strain.shape[:-2], 4)
    content.fields[1]["velocity"].values = velocity = files.numbers(3, 7, 8, 6, 3, seed=8)
    reader = _written(tmp_path / "a.h5", content)
    state = reader.read("train", 1, 0, 7).state
    assert reader.task.channel_names("state")[1:4] == ("velocity_0", "velocity_1", "velocity_2")
    np.testing.assert_array_equal(state[:, 1:4], np.moveaxis(velocity[1], -1, 1))
    np.testing.assert_array_equal(state[:, 4:], np.moveaxis(strain[1].reshape(7, 8, 6, 4), -1, 1))


def test_a_data_set_has_its_splits_by_folder_and_files_of_different_length(tmp_path: Path) -> None:
    contents = {"train": [files.two_dims(4, 9), files.two_dims(2, 6)], "valid": [files.two_dims(3, 9)], "test": []}
    contents["train"][1].parameters["viscosity"] = 0.5
    contents["train"][1].scalars["viscosity"].values = np.array(0.5)
    folder = files.write_set(tmp_path / "set", contents)
    assert THE_WELL.recognizes(folder)
    reader = open_paths(folder)
    assert isinstance(reader, WellReader)
    assert reader.splits == {"train": 6, "valid": 3, "test": 0}
    assert [reader.frames_in("train", i) for i in range(6)] == [9, 9, 9, 9, 6, 6]
    assert reader.read("train", 5, 0, 6).parameters[0] == np.float32(0.5)
    assert reader.task.parameters[0].scale == "log"
    assert "1.hdf5 trajectory 1" in reader.where("train", 5)
    with pytest.raises(DataError, match="no window"):
        reader.read("train", 5, 1, 6)


def test_files_are_recognized_and_told_from_those_of_pdebench(tmp_path: Path) -> None:
    files.write(tmp_path / "a.h5", files.three_dims())
    pdebench_files.single(tmp_path / "1D_Advection_Sols_beta0.4.hdf5")
    assert isinstance(open_paths(tmp_path / "a.h5"), WellReader)
    assert not isinstance(open_paths(tmp_path / "1D_Advection_Sols_beta0.4.hdf5"), WellReader)


def test_the_first_frame_belongs_to_the_task(tmp_path: Path) -> None:
    content = files.write(tmp_path / "a.h5", files.two_dims())
    reader = open_paths(tmp_path / "a.h5", Subsampling(time_stride=2, first_frame=3))
    assert reader.num_frames == 3  # 3, 5, 7
    np.testing.assert_array_equal(reader.read("train", 0, 1, 2).state, _state(content, 0)[5:9:2])
    np.testing.assert_allclose(reader.times, [0.75, 1.25, 1.75])
    assert reader.identity() != open_paths(tmp_path / "a.h5", Subsampling(time_stride=2)).identity()
    with pytest.raises(DataError, match="leaves no frame"):
        open_paths(tmp_path / "a.h5", Subsampling(first_frame=9))


def test_files_of_different_fields_are_no_task(tmp_path: Path) -> None:
    files.write(tmp_path / "a.h5", files.vectors_and_tensors())
    files.write(tmp_path / "b.h5", files.static_fields())
    with pytest.raises(DataError, match="different fields"):
        WellReader([tmp_path / "a.h5", tmp_path / "b.h5"])
    with pytest.raises(DataError, match="same file"):
        WellReader([tmp_path / "a.h5", tmp_path / "a.h5"])
