"""Files as users bring them to `ups init` and `ups data import`: read as they are meant, or refused with what to do."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pytest
import scipy.io
import xarray
import zarr

import ups
from ups.cli.main import run
from ups.config.schema import TaskConfig
from ups.data.normalize import compute_statistics, ensure_statistics
from ups.data.open import open_paths, open_task
from ups.errors import DataError
from ups.run.preflight import CheckFailed, check_windows

X, T = np.arange(24) * 0.1, np.arange(11) * 0.05
RNG = np.random.default_rng(0)
SPEED, PHASE = RNG.uniform(0.5, 2, (30, 1, 1)), RNG.uniform(0, 6, (30, 1, 1))
PLACE = 2 * np.pi / 2.4 * (X - SPEED * T[:, None])
WAVES = np.sin(PLACE + PHASE) + 0.5 * np.sin(2 * PLACE + 2 * PHASE)  # (30, 11, 24)

pytestmark = pytest.mark.timeout(600)  # each HDF5 file is looked at by a process of its own


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _init(path: str, *options: str) -> int:
    return run(["init", "mine", "--data", path, *options])


def one_large_value() -> str:
    np.savez("large.npz", u=np.where(np.arange(24) == 7, 1e200, WAVES), x=X, t=T)
    return "large.npz"


def one_large_parameter() -> str:
    np.savez("large.npz", u=WAVES, x=X, t=T, nu=np.where(np.arange(30) == 7, 1e200, SPEED.ravel()))
    return "large.npz"


def _packed(values: Any, scale: float, offset: float = 0.0) -> str:
    attributes = {"scale_factor": scale, "add_offset": offset}
    dataset = xarray.Dataset({"u": (("n", "time", "x"), values, attributes)}, {"x": X, "time": T})
    dataset.to_netcdf("packed.nc", engine="h5netcdf")
    return "packed.nc"


def scale_of_zero() -> str:
    return _packed((WAVES * 100).astype("i2"), 0.0, 1.0)


def scale_that_is_infinite() -> str:
    return _packed((WAVES * 100).astype("i2"), np.inf)


def scale_that_is_large() -> str:
    return _packed((WAVES * 100).astype("i2"), 1e300)


def scale_of_single_precision() -> str:
    return _packed((WAVES * 1e30).astype("f4"), 1e10)


def _zarr(change: Callable[[dict[str, Any]], None], **options: Any) -> str:
    group = zarr.open_group("waves.zarr", mode="w", zarr_format=2)
    group.create_array("u", shape=WAVES.shape, dtype="f8", chunks=(5, 11, 24), fill_value=np.nan, **options)[:] = WAVES
    file = Path("waves.zarr/u/.zarray")
    metadata = json.loads(file.read_text())
    change(metadata)
    file.write_text(json.dumps(metadata))
    return "waves.zarr"


def _filtered(scale: float) -> str:
    packing = numcodecs.FixedScaleOffset(offset=0, scale=100, dtype="f8", astype="i2")
    return _zarr(lambda metadata: metadata["filters"][0].update(scale=scale), filters=[packing])


def filter_with_scale_of_zero() -> str:
    return _filtered(0)


def filter_with_tiny_scale() -> str:
    return _filtered(1e-308)


def other_separator() -> str:
    return _zarr(lambda metadata: metadata.update(dimension_separator="/"))


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (one_large_value, "trajectory 0 (train trajectory 0) has finite values that float32 cannot hold"),
        (one_large_parameter, "parameter 'nu' has the value 1e+200, which float32 cannot hold"),
        (scale_of_zero, "array 'u' has scale_factor 0 and add_offset 1"),
        (scale_that_is_infinite, "array 'u' has scale_factor inf"),
        (scale_that_is_large, "has finite values that float32 cannot hold"),
        (scale_of_single_precision, "has finite values that float32 cannot hold"),
        (filter_with_scale_of_zero, "the filters of array 'u' compute values that are not finite"),
        (filter_with_tiny_scale, "the filters of array 'u' compute values that are not finite"),
        (other_separator, "no chunk is stored: chunks must be named 0/0/0, and are 0.0.0"),
    ],
)
def test_finite_values_never_become_others_in_silence(
    write: Callable[[], str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write()
    assert run(["data", "import", path, "-o", "out.zarr"]) == 4
    assert words in capsys.readouterr().err
    assert not Path("out.zarr").exists()


def test_one_infinite_value_changes_no_guess_and_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    values = WAVES.copy()
    values[4, 3, 2] = np.inf
    np.save("waves.npy", values)
    assert run(["data", "import", "waves.npy", "-o", "out.zarr"]) == 0
    assert "1 of 7920 values are not finite" in capsys.readouterr().out
    data = ups.open_data("out.zarr")
    assert data.card["splits"] == {"train": 21, "valid": 3, "test": 6}
    assert [axis["boundary"] for axis in data.card["axes"]] == ["periodic"]


def test_chunks_of_other_names_are_no_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(_zarr(lambda metadata: None))
    (path / "u" / "2.0.0").rename(path / "u" / "2.0.0.part")
    assert run(["data", "import", str(path), "-o", "out.zarr"]) == 0
    assert "1 of 6 chunks of 'u', which are not stored" in capsys.readouterr().out


S = np.arange(64) / 64


def pulse_that_sways_about_the_seam(t: Any, c: Any) -> Any:
    return np.exp(8 * (np.cos(2 * np.pi * (S - 0.05 * c - 0.02 * np.sin(9 * t))) - 1))


def layers_at_the_seam(t: Any, c: Any) -> Any:
    return np.tanh(6 * np.sin(2 * np.pi * (S - 0.01 * c * np.cos(8 * t)))) + 0.1 * c * np.sin(2 * np.pi * (S - t))


def narrow_pulse_that_crosses_the_seam(t: Any, c: Any) -> Any:
    return np.exp(20 * (np.cos(2 * np.pi * (S - 0.02 * c - 0.03 * t)) - 1))


def pulse_that_leaves(t: Any, c: Any) -> Any:
    return np.exp(-(((S - 0.6 - 0.2 * c - 0.8 * t) / 0.08) ** 2))


def slope(t: Any, c: Any) -> Any:
    return np.sin(3 * (S - t) + 6 * c) + c * S


@pytest.mark.parametrize(
    ("field", "boundary", "most"),
    [
        (pulse_that_sways_about_the_seam, "periodic", 1.4),
        (layers_at_the_seam, "periodic", 1.4),
        (narrow_pulse_that_crosses_the_seam, "periodic", 1.4),
        (pulse_that_leaves, "unknown", 100.0),
        (slope, "unknown", 1e5),
    ],
)
def test_the_seam_is_compared_with_the_largest_step_inside(
    field: Callable[[Any, Any], Any], boundary: str, most: float, capsys: pytest.CaptureFixture[str]
) -> None:
    t, c = 0.05 * np.arange(12)[:, None], RNG.uniform(-1, 1, (12, 1, 1))
    np.savez("waves.npz", u=field(t, c), x=S, t=t.ravel())
    assert _init("waves.npz", "--dims", "trajectory,time,x", "--json") == 0
    (why,) = [g["why"] for g in json.loads(capsys.readouterr().out)["guesses"] if g["field"] == "axis x boundary"]
    assert ups.load_recipe("mine/recipe.yaml").data.tasks[0].description.axes[0].boundary == boundary  # type: ignore
    match = re.search(
        r"first is ([\d.e+]+) times the largest inside \(.*differences, RMS ([\d.e-]+) and ([\d.e-]+)\)", why
    )
    assert match, why
    factor, over, inside = map(float, match.groups())
    assert factor == pytest.approx(over / inside, rel=0.1)
    assert factor <= most


def _matlab(path: str, arrays: dict[str, Any], **options: Any) -> str:
    """A file as MATLAB 7.3 writes it: HDF5 after 512 bytes, the first dimension last, and no array of one dimension."""
    with h5py.File(path, "w", userblock_size=512) as file:
        for name, values in arrays.items():
            values = np.asarray(values)
            values = values.reshape(values.shape if values.ndim > 1 else (-1, 1))
            dataset = file.create_dataset(name, data=np.ascontiguousarray(values.T), **options)
            dataset.attrs["MATLAB_class"] = np.bytes_("double")
    with open(path, "r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64, HDF5 schema 1.00 .".ljust(124) + b"\x00\x02IM")
    return path


def _reader(capsys: pytest.CaptureFixture[str], path: str) -> tuple[Any, str]:
    assert _init(path) == 0, capsys.readouterr().err
    return open_task(ups.load_recipe("mine/recipe.yaml").data.tasks[0]), capsys.readouterr().out


WAVES_OF_MATLAB = WAVES.transpose(2, 1, 0)  # u(x, t, n)


@pytest.mark.parametrize(
    ("arrays", "options", "dims"),
    [
        ({"u": WAVES_OF_MATLAB, "x": X[None], "t": T[:, None], "nu": SPEED[:, 0], "dt": 0.05}, {}, "[x, time, traj"),
        ({"u": WAVES_OF_MATLAB, "x": X[None], "nu": SPEED[:, 0].T, "dt": 0.05}, {"compression": "gzip"}, "[x, time, t"),
        ({"u": WAVES, "x": X[:, None], "t": T[None], "nu": SPEED[:, 0]}, {"chunks": True}, "[trajectory, time, x"),
        ({"data/u": WAVES_OF_MATLAB, "data/x": X, "data/t": T, "par/nu": SPEED[:, 0], "par/dt": 0.05}, {}, "[x, time"),
    ],
)
def test_files_of_matlab_are_read(
    arrays: dict[str, Any], options: dict[str, Any], dims: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scalar = {name: values for name, values in arrays.items() if np.ndim(values) == 0}
    path = _matlab("waves.mat", {name: a for name, a in arrays.items() if name not in scalar}, **options)
    with h5py.File(path, "r+") as file:
        for name, value in scalar.items():
            file[name] = np.array([[value]])
            file[name].attrs["MATLAB_class"] = np.bytes_("double")
        file["text"] = np.frombuffer("run".encode("utf-16le"), np.uint16)[:, None]
        file["text"].attrs.update(MATLAB_class=np.bytes_("char"), MATLAB_int_decode=2)
    reader, out = _reader(capsys, path)
    assert dims in out
    assert "'text', which does not hold numbers" in out
    assert "not used" not in out
    assert reader.task.dt == pytest.approx(0.05)
    np.testing.assert_allclose(reader.coordinates[0], X)
    assert [p.name for p in reader.task.parameters] == ["nu"]
    window = reader.read("train", 3, 2, 4)
    np.testing.assert_allclose(window.state[:, 0], WAVES[3, 2:6], rtol=1e-6)
    np.testing.assert_allclose(window.parameters, SPEED[3, 0], rtol=1e-6)


def test_axes_of_equal_length_have_their_own_points_in_the_order_of_matlab(capsys: pytest.CaptureFixture[str]) -> None:
    t, grid = 0.1 * np.arange(9), np.arange(12)
    phase = RNG.uniform(0, 6, (3, 6, 1, 1, 1, 1))
    x, y, z = (2 * np.pi / 12 * grid.reshape(shape) for shape in ((-1, 1, 1), (-1, 1), (-1,)))
    moved = t.reshape(-1, 1, 1, 1)
    u = np.sin(x - moved + phase[0]) + np.sin(2 * y - moved + phase[1]) * np.cos(z) + np.sin(z - moved + phase[2])
    arrays = {"u": u.transpose(2, 3, 4, 1, 0), "x": grid, "y": 2.0 * grid, "z": 3.0 * grid, "t": t}
    reader, _ = _reader(capsys, _matlab("cube.mat", arrays))
    assert [axis.name for axis in reader.task.axes] == ["x", "y", "z"]
    for number, points in enumerate(reader.coordinates):
        np.testing.assert_allclose(points, (number + 1) * grid)
    np.testing.assert_allclose(reader.read("train", 0, 4, 1).state[0, 0], u[0, 4], rtol=1e-6)


def test_rows_and_columns_are_vectors_in_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("waves.npz", u=WAVES, x=X[None], t=T[:, None], nu=SPEED[:, 0], dt=[[0.05]], L=2.4)
    reader, out = _reader(capsys, "waves.npz")
    assert "not used" not in out
    assert [p.name for p in reader.task.parameters] == ["nu"]
    np.testing.assert_allclose(reader.coordinates[0], X)


@pytest.mark.parametrize("options", [{}, {"do_compression": True}, {"format": "4"}])
def test_older_files_of_matlab_are_refused_with_what_to_do(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    scipy.io.savemat("old.mat", {"u": WAVES[0].T, "x": X}, **options)
    for command in (["init", "mine", "--data", "old.mat"], ["data", "inspect", "old.mat"]):
        assert run(command) == 4
        assert "save('NAME.mat', '-v7.3')" in capsys.readouterr().err


def test_cells_of_matlab_are_refused_with_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    _matlab("cells.mat", {"x": X, "t": T})
    with h5py.File("cells.mat", "r+") as file:
        file["#refs#/a"] = WAVES[0]
        file["runs"] = np.array([[file["#refs#/a"].ref]], h5py.ref_dtype)
    assert _init("cells.mat") == 4
    assert "'runs', a cell or an array of structs of MATLAB: make one array, as cat(3, c{:})" in capsys.readouterr().err


POINTS = RNG.uniform(0, 1, (500, 2))
CELLS = np.stack([np.roll(np.arange(500), n) for n in range(3)], axis=1)[np.arange(986) % 500]
ON_POINTS = np.sin(6 * (POINTS[:, 0] - 0.1 * np.arange(20)[:, None]) + np.arange(12)[:, None, None])  # (12, 20, 500)


def mesh_of_numpy() -> str:
    np.savez("mesh.npz", points=POINTS, cells=CELLS, u=ON_POINTS[0])
    return "mesh.npz"


def mesh_of_hdf5() -> str:
    with h5py.File("mesh.h5", "w") as file:
        file["x"], file["y"], file["triangles"], file["T"] = POINTS[:, 0], POINTS[:, 1], CELLS + 1, ON_POINTS
    return "mesh.h5"


def mesh_of_vtk() -> str:
    with h5py.File("mesh.vtkhdf", "w") as file:
        file["VTKHDF/Points"], file["VTKHDF/Connectivity"] = np.c_[POINTS, np.zeros(500)], CELLS.reshape(-1)
        file["VTKHDF/PointData/u"] = ON_POINTS[0]
    return "mesh.vtkhdf"


def mesh_of_xdmf() -> str:
    with h5py.File("mesh.h5", "w") as file:
        file["Mesh/mesh/geometry"], file["Mesh/mesh/topology"] = POINTS, CELLS
        for number in range(20):
            file[f"Function/u/{number}"] = ON_POINTS[0, number][:, None]
    return "mesh.h5"


def mesh_without_names() -> str:
    labels = np.ones((1, len(CELLS)))
    return _matlab("mesh.mat", {"p": POINTS.T, "t": np.r_[CELLS.T + 1, labels], "u": ON_POINTS[0].T})


@pytest.mark.parametrize("write", [mesh_of_hdf5, mesh_of_xdmf, mesh_without_names], ids=lambda f: f.__name__)
def test_a_mesh_is_refused_with_what_to_do(write: Callable[[], str], capsys: pytest.CaptureFixture[str]) -> None:
    assert _init(write()) == 4
    error = capsys.readouterr().err
    assert "holds a mesh, which is not read" in error
    assert "griddata" in error
    assert not Path("mine").exists()


@pytest.mark.parametrize(
    ("write", "words"), [(mesh_of_numpy, "'times' for its frames"), (mesh_of_vtk, "UnstructuredGrid is read")]
)
def test_a_mesh_that_lacks_something_is_refused_with_what_it_lacks(
    write: Callable[[], str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _init(write()) == 4
    assert words in capsys.readouterr().err
    assert not Path("mine").exists()


@pytest.mark.parametrize("points", [{"x": POINTS[:, 0], "y": POINTS[:, 1]}, {"coords": POINTS}, {"pos": POINTS.T}])
@pytest.mark.parametrize("values", [ON_POINTS, ON_POINTS[0], ON_POINTS.transpose(2, 1, 0)])
def test_scattered_points_are_refused_with_what_to_do(
    points: dict[str, Any], values: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez("points.npz", u=values, **points)
    assert _init("points.npz") == 4
    assert "holds scattered points, which are not read" in capsys.readouterr().err


def test_positions_of_sources_and_whole_numbers_are_no_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    whole = RNG.integers(0, 11, (30, 3))
    np.savez("waves.npz", u=WAVES, x=X, t=T, pos=RNG.uniform(0, 1, (30, 2)), modes=whole)
    reader, _ = _reader(capsys, "waves.npz")
    assert [p.name for p in reader.task.parameters] == ["pos_0", "pos_1", "modes_0", "modes_1", "modes_2"]


FLOW = np.sin(np.linspace(0, 6, 16)[:, None] - T[:, None, None] + PHASE[:12, None]) * np.cos(np.linspace(0, 5, 20))
DISK = (np.arange(16)[:, None] - 8) ** 2 + (np.arange(20) - 9) ** 2 < 9


def obstacle(mark: float = np.nan) -> Any:
    return np.where(DISK, mark, FLOW)


def obstacle_of_each_run() -> Any:
    return np.stack([np.where(np.roll(DISK, n, 1), np.nan, run) for n, run in enumerate(FLOW)])


@pytest.mark.parametrize(
    ("values", "attributes"),
    [
        (obstacle(), {}),
        (obstacle_of_each_run(), {}),
        (obstacle(-9999), {"_FillValue": -9999.0}),
        (obstacle(1e20), {"missing_value": 1e20}),
    ],
)
def test_an_obstacle_is_a_mask(values: Any, attributes: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File("flow.h5", "w") as file:
        file["u"], file["t"] = values, T
        file["u"].attrs.update(attributes)
    assert _init("flow.h5") == 0
    reader = open_task(ups.load_recipe("mine/recipe.yaml").data.tasks[0])
    assert reader.task.mask == "mask"
    for trajectory in (0, 1):
        window = reader.read("train", trajectory, 3, 2)
        assert window.static.sum() == 25
        assert (window.state[:, :, window.static[0] > 0] == 0).all()
        assert np.count_nonzero(window.state[0]) >= 290
    ups.import_data("flow.h5", "s.zarr", task="mine/task.yaml")
    again = open_task(TaskConfig(name="flow", path="s.zarr"))
    assert again.task.mask == "mask"
    np.testing.assert_array_equal(again.read("train", 1, 3, 2).state, window.state)
    statistics = compute_statistics(reader)
    assert statistics.static_std == (0.0,)
    assert statistics.state_std[0] == pytest.approx(np.nanstd(obstacle()), rel=0.1)


def test_a_number_far_from_all_others_is_no_mask_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("flow.npz", u=obstacle(-9999), t=T)
    assert _init("flow.npz") == 4
    error = capsys.readouterr().err
    assert "25 of 320 values of a frame are -9999, far from all others, in every frame" in error
    assert "mask: mask" in error


def test_a_mask_may_be_an_array(capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("flow.npz", u=FLOW, t=T, land=DISK.astype(float))
    page = "fields: [{name: u}, {name: land, role: static, dims: [x, y]}]\naxes: [{name: x}, {name: y}]\n"
    Path("task.yaml").write_text(page + "dims: [trajectory, time, x, y]\ntimes: t\nmask: land\n")
    assert _init("flow.npz") == 0
    window = open_task(ups.load_recipe("mine/recipe.yaml").data.tasks[0]).read("train", 0, 0, 2)
    assert ((window.state[0, 0] == 0) == DISK).all()


def test_an_obstacle_of_a_static_field_is_recognized(capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("flow.npz", u=FLOW, t=T, depth=np.where(DISK, np.nan, 1.0))
    assert _init("flow.npz") == 4
    assert "static fields: 25 of 320 values of a frame are not finite" in capsys.readouterr().err


def test_training_says_what_to_do_with_an_obstacle_that_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("flow.npz", u=obstacle(), t=T)
    Path("task.yaml").write_text(
        "fields: [{name: u}]\naxes: [{name: x}, {name: y}]\ndims: [trajectory, time, x, y]\ntimes: t\n"
    )
    assert _init("flow.npz") == 0
    reader = open_task(ups.load_recipe("mine/recipe.yaml").data.tasks[0])
    with pytest.raises(DataError) as caught:
        compute_statistics(reader)
    assert "static field" in (caught.value.hint or "")
    with pytest.raises(CheckFailed) as failed:
        check_windows(reader, "train", 0)
    assert "static field" in (failed.value.hint or "")


def test_single_missing_values_do_not_lead_to_training(capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("waves.npz", u=np.where(np.arange(11)[:, None] == 5, np.nan, WAVES), x=X, t=T)
    assert _init("waves.npz") == 0
    out = capsys.readouterr().out
    assert "ups train" not in out
    assert "training refuses values that are not finite: ups data validate waves.npz --task mine/task.yaml" in out


def test_a_field_of_two_values_is_no_mask(capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("phase.npz", u=(WAVES > 0.2).astype(np.float32), x=X, t=T)
    assert _init("phase.npz") == 0


def _save(folder: str, arrays: dict[str, Any]) -> str:
    Path(folder).mkdir()
    for name, values in arrays.items():
        np.save(f"{folder}/{name}.npy", values)
    Path(folder, "notes.txt").write_text("not an array")
    return folder


RUNS = {f"run_{n}": WAVES[n] for n in range(12)}
FIELDS = {"u": WAVES, "w": WAVES**2, "x": X, "t": T, "nu": SPEED.ravel()}
TWO = {f"u_{n}": WAVES[n] for n in range(12)} | {f"w_{n}": WAVES[n] ** 2 for n in range(12)} | {"x": X, "t": T}


@pytest.mark.parametrize(
    ("arrays", "fields", "how"),
    [
        (RUNS, ["u"], "a trajectory each: run_0.npy to run_11.npy"),
        (FIELDS, ["u", "w"], "arrays of the same trajectories"),
        (TWO, ["u", "w"], "a trajectory each: u_0.npy to u_11.npy, w_0.npy to w_11.npy"),
        ({f"{n}": WAVES[n] for n in range(12)} | {"x": X}, ["u"], "a trajectory each: 0.npy to 11.npy"),
    ],
)
def test_a_folder_of_npy_files_is_read(
    arrays: dict[str, Any], fields: list[str], how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, out = _reader(capsys, _save("ring", arrays))
    assert out.startswith("ring: ")
    assert f"read as {how}" in out, out
    assert [field.name for field in reader.task.fields] == fields
    assert sum(reader.splits.values()) == (30 if arrays is FIELDS else 12)
    np.testing.assert_allclose(reader.read("train", 2, 4, 1).state[0, 0], WAVES[2, 4], rtol=1e-6)
    assert run(["data", "import", "ring", "-o", "ring.zarr"]) == 0
    assert ups.open_data("ring.zarr").card["task"] == "ring"
    identity = reader.identity()
    Path("ring/notes.txt").write_text("changed")
    assert open_task(ups.load_recipe("mine/recipe.yaml").data.tasks[0]).identity() == identity


def test_a_folder_without_arrays_and_one_that_is_ambiguous_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert _init(_save("none", {})) == 4
    assert "a folder holds .npy" in capsys.readouterr().err
    assert _init(_save("odd", {"u_0": WAVES[0], "u_1": WAVES[1], "u_2": WAVES[2], "w_0": X, "w_1": X})) == 4
    assert "3 like u_0.npy, 2 like w_0.npy" in capsys.readouterr().err


def test_a_pipe_or_an_archive_in_a_folder_does_no_harm(capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(f"{_save('runs', RUNS)}/run_12.npy")
    assert "a trajectory each: run_0.npy to run_11.npy" in _reader(capsys, "runs")[1]
    np.savez("runs/run_13.npz", u=WAVES, v=WAVES)
    Path("runs/run_13.npz").rename("runs/run_13.npy")
    assert run(["init", "other", "--data", "runs"]) == 4
    assert "run_13.npy holds 2 arrays" in capsys.readouterr().err


def test_a_recipe_may_hold_a_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").mkdir()
    for number in range(12):
        np.savez(f"runs/{number}.npz", u=WAVES[number], x=X, t=T)
    reader, out = _reader(capsys, "runs")
    assert out.startswith("runs: ")
    recipe = Path("mine/recipe.yaml")
    recipe.write_text(recipe.read_text().replace("path: runs ", 'path: "runs/*.npz" '))
    task = ups.load_recipe(recipe).data.tasks[0]
    assert task.path == "runs/*.npz"
    opened = open_task(task)
    ensure_statistics(opened, task.paths)
    assert Path("runs/0.npz.statistics.json").exists()
    np.testing.assert_allclose(opened.read("test", 1, 0, 1).state, reader.read("test", 1, 0, 1).state)
    np.testing.assert_allclose(opened.read("test", 1, 0, 1).state[0, 0], WAVES[11, 0], rtol=1e-6)
    assert open_paths("runs/*", description=task.description).splits == opened.splits, "statistics are no data"
    with pytest.raises(DataError, match=r"none/\*.npz of task 'runs' does not exist"):
        open_task(task.model_copy(update={"path": "none/*.npz"}))


def test_coordinates_for_every_point_of_a_grid_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = np.meshgrid(np.linspace(0, 1, 24), np.linspace(0, 2, 20), indexing="ij")
    u = np.sin(6 * x + RNG.uniform(0, 1, (12, 9, 1, 1))) * y
    np.savez("grid.npz", u=u, x=x, y=y)
    assert _init("grid.npz") == 4
    assert "x = X[:, 0] and y = Y[0, :]" in capsys.readouterr().err


def test_a_file_for_each_time_is_not_a_steady_task(capsys: pytest.CaptureFixture[str]) -> None:
    Path("times").mkdir()
    for number in range(9):
        np.save(f"times/t{number:04d}.npy", WAVES[:12, number])
    assert _init("times") == 4
    assert "np.stack" in capsys.readouterr().err


def test_an_array_with_a_value_for_each_file_is_a_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").mkdir()
    for number in range(12):
        np.save(f"runs/{number}.npy", WAVES[number % len(WAVES)])
    np.save("runs/nu.npy", np.linspace(0.1, 0.2, 12))
    assert _init("runs") == 0
    assert "parameter nu" in capsys.readouterr().out
