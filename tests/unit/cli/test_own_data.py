"""`ups init` and `ups data import` on the command line, and `ups.import_data`."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray

import ups
from ups.cli.main import run
from ups.config.description import read_description
from ups.data.open import open_task
from ups.errors import DataError
from ups.library.own_data import init_run

RNG = np.random.default_rng(0)
X, T = np.arange(64) / 64, np.arange(9) * 0.25
PHASE, SPEED = RNG.uniform(0, 1, (2, 20, 1, 1))
WAVES = np.sin(2 * np.pi * (X + PHASE + 0.3 * SPEED * T[None, :, None])) + 0.2 * np.cos(6 * np.pi * (X + 2 * PHASE))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.savez("waves.npz", u=WAVES, x=X, t=T, speed=SPEED.ravel(), note=np.array("text"))
    return tmp_path


def test_init_shows_what_it_guessed_and_writes_a_recipe_that_is_accepted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["init", "mine", "--data", "waves.npz"]) == 0
    out = capsys.readouterr().out
    for words in (
        "guess: the step from the last point to the first",
        "'speed'",
        "spacing of 't'",
        "'note'",
        "wrote mine/task.yaml",
    ):
        assert words in out
    assert run(["config", "check", "mine/recipe.yaml"]) == 0
    capsys.readouterr()
    assert run(["config", "show", "mine/recipe.yaml", "--json"]) == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert recipe["model"]["type"] == "multiscale"
    assert recipe["data"]["tasks"][0]["description"]["equation"] == ""
    assert recipe["data"]["tasks"][0]["description"]["axes"][0]["boundary"] == "periodic"
    assert run(["init", "mine", "--data", "waves.npz"]) == 3, "what a user has edited is not replaced"


def test_init_counts_steps_by_a_measured_step_time(folder: Path) -> None:
    """Not seconds of wall time: on a busy machine they are few steps."""
    np.save("plane.npy", np.broadcast_to(WAVES[:, :, None, :], (20, 9, 128, 64)))
    np.save("cube.npy", np.zeros((20, 3, 128, 128, 32), np.float32))
    steps = {}
    for name, axes in (("waves.npz", ""), ("plane.npy", "xy"), ("cube.npy", "xyz")):
        dims = ("trajectory", "time", *axes) if axes else ()
        text = init_run(name.partition(".")[0], name, dims).recipe.read_text()
        match = re.search(r"^    steps: (\d+) # (.*)$", text, re.M)
        assert match is not None
        steps[name] = (int(match[1]), match[2])
        stage = ups.load_recipe(f"{name.partition('.')[0]}/recipe.yaml").stages[0]
        assert (stage.steps, stage.budget_seconds) == (int(match[1]), None)
    assert re.fullmatch(r"about \d+ (s|min): a step took \S+ s on one core here", steps["waves.npz"][1])
    assert steps["waves.npz"][0] > steps["plane.npy"][0] >= 500
    assert steps["cube.npy"] == (500, "not measured: a step on 524,288 points takes long; ups plan --measure tells")


def test_init_writes_a_recipe_where_a_step_cannot_be_measured(folder: Path) -> None:
    np.save("bad.npy", np.full((20, 9, 64), np.nan))
    text = init_run("bad", "bad.npy", ("trajectory", "time", "x")).recipe.read_text()
    assert re.search(r"^    steps: \d+ # ", text, re.M)


def test_init_takes_a_description_that_is_there_already(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "fields: [{name: u}]\naxes: [{name: x, boundary: open}]\ndims: [trajectory, time, x]\n"
    (folder / "waves.task.yaml").write_text(text)
    assert run(["init", "mine", "--data", "waves.npz"]) == 0
    assert "described by" in capsys.readouterr().out
    assert not (folder / "mine" / "task.yaml").exists()
    description = ups.load_recipe("mine/recipe.yaml").data.tasks[0].description
    assert description is not None
    assert not isinstance(description, str)
    assert description.axes[0].boundary == "open"


def test_init_works_for_a_store_and_for_many_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["data", "import", "waves.npz", "-o", "waves.zarr"]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["path", "waves.zarr"] in printed
    assert any(line[0] == "size" and line[-1] in ("kB", "MB") for line in printed)
    assert any(line[0] == "trajectories" and line[2:5:2] == ["train,", "valid,"] for line in printed)
    assert run(["init", "of_store", "--data", "waves.zarr"]) == 0
    assert run(["config", "check", "of_store/recipe.yaml"]) == 0
    for number in range(12):
        np.save(f"run_{number}.npy", WAVES[number])
    assert run(["init", "of_files", "--data", "run_*.npy"]) == 0
    assert run(["config", "check", "of_files/recipe.yaml"]) == 0
    assert ups.load_recipe("of_files/recipe.yaml").data.tasks[0].path == [f"run_{n}.npy" for n in range(12)]


def test_many_files_have_one_name_and_their_lengths_are_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(12):
        np.save(f"run_{number:02}.npy", WAVES[number, : 9 - number % 4])
    assert run(["init", "mine", "--data", "run_*.npy"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("run: 8 train, 2 valid, 2 test trajectories of 6 to 9 frames on 64 points")
    page = (folder / "mine" / "task.yaml").read_text()
    assert "arrays of run_00.npy, run_01.npy, run_02.npy and 9 more mean" in page
    assert "name: run\n" in page
    assert "  - name: u #" in page
    assert "dataset" not in page
    assert run(["data", "inspect", "run_03.npy", "--task", "mine/task.yaml"]) == 0


@pytest.mark.parametrize(("count", "tests"), [(12, 2), (24, 6), (50, 6), (70, 7)])
def test_every_command_holds_out_the_same_and_enough_to_tell_models_apart(
    folder: Path, count: int, tests: int, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez("some.npz", u=np.resize(WAVES, (count, 9, 64)), x=X, t=T)
    started = init_run("mine", "some.npz", ["trajectory", "time", "x"])
    assert started.reader.splits["test"] == tests
    task = ups.load_recipe("mine/recipe.yaml").data.tasks[0]
    splits = [open_task(task).splits]
    for command in (["data", "inspect", "some.npz"], ["data", "import", "some.npz", "-o", "some.zarr"]):
        capsys.readouterr()
        assert run([*command, "--task", "mine/task.yaml", "--json"]) == 0
        splits.append(json.loads(capsys.readouterr().out)["splits"])
    held_out = [{name: counts[name] for name in ("valid", "test")} for counts in (*splits, started.reader.splits)]
    assert held_out == held_out[:1] * 4
    # A recipe sets some of the others aside for error bars; a file or a store by itself does not.
    assert sum(splits[0].values()) + started.reader.splits.get("calibration", 0) == sum(splits[1].values()) == count


def test_dims_of_a_person_let_the_rest_be_guessed_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("turned.npz", u=WAVES.transpose(2, 1, 0), aa=X, bb=T, cc=SPEED.ravel())
    assert run(["init", "mine", "--data", "turned.npz", "--dims", "x, time, trajectory"]) == 0
    assert "[x, time, trajectory]  (as you said)" in capsys.readouterr().out
    description = read_description(folder / "mine" / "task.yaml")
    assert (description.axes[0].dataset, description.axes[0].boundary, description.times) == ("aa", "periodic", "bb")
    assert [p.name for p in description.parameters] == ["cc"]
    (folder / "mine" / "recipe.yaml").unlink()
    assert run(["init", "mine", "--data", "turned.npz", "--dims", "time,x,trajectory"]) == 3
    assert "remove it" in capsys.readouterr().err
    assert run(["init", "other", "--data", "turned.npz", "--dims", "time,x"]) == 3


def test_names_from_a_file_cannot_write_into_the_recipe(folder: Path) -> None:
    evil = "u\nrun: {name: evil}\n#"
    with h5py.File("evil.h5", "w") as file:
        file[evil], file["x"] = WAVES, X
        file.attrs["nu\nequation: made up"] = 1.0
        file[evil].attrs["units"] = "m\nsteady: true"
    assert run(["init", "mine", "--data", "evil.h5"]) == 0
    recipe = ups.load_recipe("mine/recipe.yaml")
    described = recipe.data.tasks[0].description
    assert recipe.run.name == "mine"
    assert described is not None
    assert not isinstance(described, str)
    assert (described.equation, described.steady, len(described.fields), len(described.parameters)) == ("", False, 1, 1)


def test_import_keeps_units_coordinates_and_parameters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = xarray.Dataset(
        {
            "temperature": (("time", "case", "lon"), WAVES.transpose(1, 0, 2), {"units": "K"}),
            "c": ("case", SPEED.ravel()),
        },
        {"lon": ("lon", X * 360, {"units": "degrees_east"}), "time": ("time", T, {"units": "hours since 2000-01-01"})},
    )
    dataset.to_netcdf("waves.nc", engine="h5netcdf")
    assert run(["data", "import", "waves.nc", "-o", "nc.zarr", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["splits"] == {"train": 16, "valid": 2, "test": 2}
    assert any("boundary periodic (guess" in text for text in facts["assumptions"])
    first = ups.open_data("nc.zarr")
    second = ups.import_data(dataset, "again.zarr")
    for data in (first, second):
        task = data.task
        assert (task.fields[0].name, task.fields[0].unit, task.axes[0].unit) == ("temperature", "K", "degrees_east")
        assert (task.time_unit, task.dt, task.axes[0].boundary, task.equation) == ("hours", 0.25, "periodic", "")
        assert [p.name for p in task.parameters] == ["c"]
        trajectory = data.trajectory("test", 1)
        np.testing.assert_allclose(trajectory["temperature"], WAVES[19], atol=1e-6)
        np.testing.assert_allclose(trajectory["lon"], X * 360)
        assert float(trajectory["c"]) == pytest.approx(SPEED[19, 0, 0])
    assert run(["data", "validate", "nc.zarr"]) == 0


def test_what_is_said_overrides_what_is_guessed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "name: mine\nfields: [{name: w, dataset: u, unit: m}]\naxes: [{name: x, boundary: wall, extent: 3.0}]\n"
        "dims: [trajectory, time, x]\ndt: 7.0\nequation: w_t = 0\n"
    )
    (folder / "said.yaml").write_text(text)
    for command in ("import", "pack"):
        assert run(["data", command, "waves.npz", "-o", f"{command}.zarr", "--task", "said.yaml"]) == 0
        out = capsys.readouterr().out
        assert "'speed' (20,)" in out, "a parameter that is not described is named"
        task = ups.open_data(f"{command}.zarr").task
        assert (task.name, task.dt, task.equation) == ("mine", 7.0, "w_t = 0")
        assert (task.axes[0].boundary, task.axes[0].extent) == ("wall", 3.0)
    assert run(["data", "pack", "pack.zarr", "-o", "no.zarr", "--task", "said.yaml"]) == 4
    assert "says itself what it holds" in capsys.readouterr().err


def test_import_takes_arrays_and_plain_values(tmp_path: Path) -> None:
    task = {
        "fields": [{"name": "u"}],
        "axes": [{"name": "x", "boundary": "periodic"}],
        "dims": ["trajectory", "time", "x"],
        "dt": 0.25,
    }
    data = ups.import_data({"u": WAVES}, tmp_path / "a.zarr", task)
    assert dict(data.splits) == {"train": 16, "valid": 2, "test": 2}
    alone = ups.import_data(WAVES, tmp_path / "b.zarr", task, valid_fraction=0.25)
    assert dict(alone.splits) == {"train": 13, "valid": 5, "test": 2}


def test_what_cannot_be_read_is_an_error_with_a_hint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.txt").write_text("1 2 3")
    assert run(["init", "mine", "--data", "a.txt"]) == 4
    assert run(["init", "mine", "--data", "none.npy"]) == 4
    assert run(["data", "import", "waves.npz", "-o", "a.zarr", "--task", "none.yaml"]) == 3
    assert not (folder / "mine").exists()
    assert "none of the formats" in capsys.readouterr().err


def test_dates_of_xarray_become_seconds(tmp_path: Path) -> None:
    dates = np.datetime64("2020-01-01", "ns") + np.arange(9) * np.timedelta64(6, "h")
    dataset = xarray.Dataset({"u": (("sample", "time", "x"), WAVES)}, {"x": X, "time": dates})
    task = ups.import_data(dataset, tmp_path / "a.zarr").task
    assert (task.dt, task.time_unit) == (21600, "s")


def test_frames_at_unequal_distances_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="differs between frames"):
        ups.import_data({"u": WAVES, "x": X, "t": np.append(T[:-1], T[-2] + 1)}, tmp_path / "a.zarr")


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "large.npy"
    large = np.lib.format.open_memmap(path, "w+", np.float32, (12, 40, 256, 256))
    large[:, :, ::7, ::5] = RNG.normal(size=(12, 1, 37, 52))
    large.flush()
    size = large.nbytes
    del large
    task = {"fields": [{"name": "u"}], "axes": [{"name": "x"}, {"name": "y"}], "dt": 1.0}
    tracemalloc.start()
    ups.import_data(path, tmp_path / "large.zarr", task | {"dims": ["trajectory", "time", "x", "y"]})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 120e6
    assert peak < 0.4 * size, peak  # a chunk and its copies, whatever the size


def test_groups_of_unequal_length_are_trajectories_of_their_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with h5py.File("groups.h5", "w") as file:
        for number in range(12):
            file[f"run_{number}/u"] = WAVES[number, : 9 - number % 4]
            file[f"run_{number}/t"] = T[: 9 - number % 4]
            file[f"run_{number}"].attrs["speed"] = SPEED.ravel()[number]
        file["x"] = X
    assert run(["init", "mine", "--data", "groups.h5"]) == 0
    assert "8 train, 2 valid, 2 test trajectories of 6 to 9 frames on 64 points" in capsys.readouterr().out
    description = read_description(folder / "mine" / "task.yaml")
    assert (description.dims, description.times) == (["trajectory", "time", "x"], "*/t")
    assert [p.dataset for p in description.parameters] == ["*@speed"]
    assert run(["config", "check", "mine/recipe.yaml"]) == 0
    data = ups.import_data("groups.h5", folder / "groups.zarr", folder / "mine" / "task.yaml")
    assert dict(data.splits) == {"train": 8, "valid": 2, "test": 2}
    assert run(["data", "validate", "groups.zarr"]) == 0


def test_durations_of_xarray_stay_durations(tmp_path: Path) -> None:
    period = np.arange(5, 25).astype("timedelta64[s]").astype("timedelta64[ns]")
    dataset = xarray.Dataset({"u": (("sample", "time", "x"), WAVES), "period": ("sample", period)}, {"x": X})
    parameter = ups.import_data(dataset, tmp_path / "a.zarr").task.parameters[0]
    assert (parameter.name, parameter.unit, parameter.minimum, parameter.maximum) == ("period", "s", 5, 24)


def test_a_data_array_says_what_its_dimensions_are(tmp_path: Path) -> None:
    array = xarray.DataArray(WAVES.T, {"x": X, "time": T}, ("x", "time", "sample"), name="q")
    data = ups.import_data(array, tmp_path / "a.zarr")
    assert (data.task.fields[0].name, data.task.dt) == ("q", 0.25)
    assert sum(data.splits.values()) == 20


@pytest.mark.parametrize("name", ["_und", "été", "日本", "2d"])
def test_every_directory_gives_a_recipe_that_is_accepted(folder: Path, name: str) -> None:
    assert run(["init", name, "--data", "waves.npz"]) == 0
    assert run(["config", "check", f"{name}/recipe.yaml"]) == 0
