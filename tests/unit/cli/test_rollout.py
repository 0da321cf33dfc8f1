"""`ups rollout` on the command line, with a stored bundle."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray

import ups
from tests.support.small_bundle import ADVECTION, DARCY, FLOW, grid, make_bundle
from tests.unit.inference.bundles.make import HERE
from ups.cli.main import run
from ups.formats.store_writer import StoreWriter
from ups.inference.bundle import load_bundle, write_bundle

FRAMES = 7


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a run that has a bundle, and a store for two of its tasks."""
    shutil.copytree(HERE / "v1" / "latent_operator", tmp_path / "runs" / "mine" / "bundle")
    draw = np.random.default_rng(0)
    (x,) = grid(ADVECTION)
    with StoreWriter(tmp_path / "wave.zarr", ADVECTION, [x], FRAMES) as writer:
        for split in ("train", "valid", "test"):
            position = x[None] - 0.05 * np.arange(FRAMES)[:, None] + draw.uniform()
            writer.append(split, state=np.sin(2 * np.pi * position)[:, None].astype(np.float32), parameters=[1.0])
    with StoreWriter(tmp_path / "darcy.zarr", DARCY, grid(DARCY), 0) as writer:
        for split in ("train", "valid", "test"):
            fields = draw.normal(size=(2, 1, 16, 16)).astype(np.float32)
            writer.append(split, static=fields[0], target=fields[1])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_rollout_says_what_it_did_with_its_error_next_to_persistence(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["rollout", "mine", "wave.zarr", "--task", "advection", "-o", "out.zarr"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("advection, 6 steps from test trajectory 0 (beta = 1): error ")
    # a wave that has moved by a part p of its length differs by 2 sin(pi p) times its RMS
    expected = np.mean(2 * np.sin(np.pi * 0.05 * np.arange(1, FRAMES)))
    assert f"(persistence {expected:.3g}, training mean " in first
    assert first.endswith("relative to the RMS of the trajectory")
    assert last == "wrote out.zarr"


def test_a_bundle_that_is_not_better_than_a_baseline_is_said_to_be_so_once(
    desk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = load_bundle("runs/mine/bundle")
    headline = [{"score": "one step", "verdict": "worse than persistence"}]
    predictors = {"model": {"one_step_trmse": 0.5}, "persistence": {"one_step_trmse": 0.4}}
    scores = {"advection": {"protocol": "", "headline": headline, "predictors": predictors}}
    write_bundle(desk / "bad", bundle.stepper, replace(bundle.info, scores=scores), config_text="", card="")
    assert run(["rollout", "bad", "wave.zarr", "--task", "advection", "-o", "out.zarr"]) == 0
    said = capfd.readouterr().err.splitlines()
    words = "warning: this simulator is worse than persistence: one step 0.5 (0.4)"
    assert [line for line in said if "this simulator" in line] == [words]
    assert run(["rollout", "bad", "wave.zarr", "--task", "advection", "-o", "more.zarr", "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["samples"] == [{"warnings": ["not_better"], "blew_up": False, "diverged_at": None}]
    assert facts["attributes"]["warnings"] == words.removeprefix("warning: ")


@pytest.mark.parametrize(("name", "option"), [("out.mp4", "--film"), ("Out.PNG", "--picture")])
def test_numbers_do_not_go_into_a_film_or_picture(
    desk: Path, capsys: pytest.CaptureFixture[str], name: str, option: str
) -> None:
    assert run(["rollout", "mine", "wave.zarr", "--task", "advection", "-o", name]) == 3
    assert f"{option} {name}" in capsys.readouterr().err
    assert not (desk / name).exists()


@pytest.mark.parametrize(
    ("option", "name", "end"),
    [("--film", "film.avi", ".mp4 or .gif"), ("--film", "", ".mp4"), ("--picture", "it.pdf", ".png")],
)
def test_a_file_is_what_its_name_says(
    desk: Path, capsys: pytest.CaptureFixture[str], option: str, name: str, end: str
) -> None:
    before = sorted(desk.iterdir())
    assert run(["rollout", "mine", "wave.zarr", "--task", "advection", option, name]) == 3
    assert f"give a name that ends in {end}" in capsys.readouterr().err
    assert sorted(desk.iterdir()) == before


def test_a_run_is_found_by_name_by_path_and_by_its_bundle(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for name in ("mine", "runs/mine", "runs/mine/bundle"):
        store = f"{name.replace('/', '-')}.zarr"
        assert run(["rollout", name, "wave.zarr", "--task", "advection", "-o", store, "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out)["errors"])
    assert answers[0] == answers[1] == answers[2]
    assert set(answers[0]) == {"model", "persistence", "training mean"}
    assert run(["rollout", "yours", "wave.zarr", "-o", "x.zarr"]) == 10
    assert "there is no bundle at 'yours'" in capsys.readouterr().err


def test_a_steady_task_and_steps_beyond_the_truth_have_no_persistence(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["rollout", "mine", "darcy.zarr", "--task", "darcy", "-o", "d.zarr"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("darcy from test trajectory 0: error ")
    assert "(training mean " in first
    assert run(["rollout", "mine", "wave.zarr", "--task", "advection", "--steps", "9", "-o", "w.zarr"]) == 0
    assert capsys.readouterr().out.startswith("advection, 9 steps from test trajectory 0 (beta = 1)\n")


def test_a_picture_shows_the_time_of_the_data(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From frame 3 on, the first predicted frame is that of four steps after the start of the trajectory."""
    pytest.importorskip("matplotlib")
    from ups.evaluation import figures

    drawn = []
    real = figures.fields_png
    monkeypatch.setattr(figures, "fields_png", lambda example, channel: drawn.append(example) or real(example, channel))
    options = ["--start-frame", "3", "--picture", "p.png", "-o", "w.nc"]
    assert run(["rollout", "mine", "wave.zarr", "--task", "advection", *options]) == 0
    assert (desk / "p.png").read_bytes().startswith(b"\x89PNG")
    assert drawn[0].time_of(0) == pytest.approx(4 * ADVECTION.dt)
    with xarray.open_dataset(desk / "w.nc", engine="h5netcdf") as written:
        assert written["time"].values.tolist() == pytest.approx([n * ADVECTION.dt for n in (4, 5, 6)])
    assert len(drawn[0].truth) == 3
    assert drawn[0].parameters == {"beta": 1.0}


def test_a_trajectory_of_its_own_length_and_time_step_is_shown_as_it_is(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from ups.evaluation import figures

    drawn = []
    real = figures.fields_png
    monkeypatch.setattr(figures, "fields_png", lambda example, channel: drawn.append(example) or real(example, channel))
    make_bundle(desk / "ranged", tasks=(replace(ADVECTION, dt_range=(0.05, 0.1)),))
    (x,) = grid(ADVECTION)
    with StoreWriter(desk / "two.zarr", ADVECTION, [x], FRAMES) as writer:
        for split in ("train", "test"):
            for frames, dt in ((FRAMES, 0.05), (4, 0.1)):
                position = x[None] - dt * np.arange(frames)[:, None]
                state = np.sin(2 * np.pi * position)[:, None].astype(np.float32)
                writer.append(split, state=state, parameters=[1.0], frames=frames, dt=dt)
    options = ["--task", "advection", "--trajectory", "1", "--picture", "p.png"]
    assert run(["rollout", "ranged", "two.zarr", *options]) == 0
    assert [drawn[0].time_of(step) for step in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    assert len(drawn[0].truth) == 3


def test_a_store_on_another_domain_is_refused_or_rescaled(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (x,) = grid(ADVECTION)
    for name, axis in (("long", 3 * x), ("irregular", x**2 + x)):
        with StoreWriter(desk / f"{name}.zarr", ADVECTION, [axis], FRAMES) as writer:
            for split in ("train", "valid", "test"):
                writer.append(split, state=np.ones((FRAMES, 1, 16), np.float32), parameters=[1.0])
        command = ["rollout", "mine", f"{name}.zarr", "--task", "advection"]
        assert run([*command, "-o", f"{name}-out.zarr"]) == 10
        error = capsys.readouterr().err
        assert "coordinate 'x' is" in error
        assert "16 points from 0 to 0.9375" in error
        assert error.count("\n") == 1
        code = run([*command, "-o", f"{name}-out.zarr", "--rescale-domain", "--json"])
        if name == "irregular":
            assert code == 10
            continue
        document = json.loads(capsys.readouterr().out)
        assert document["samples"] == [{"warnings": ["domain_rescaled"], "blew_up": False, "diverged_at": None}]
        assert "the physics was not rescaled" in document["attributes"]["warnings"]


def test_a_store_of_another_time_step_is_thinned_or_refused(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dataclasses import replace

    (x,) = grid(ADVECTION)
    for dt in (ADVECTION.dt / 2, ADVECTION.dt * 1.5):
        name = f"wave{dt:g}"
        with StoreWriter(desk / f"{name}.zarr", replace(ADVECTION, dt=dt), [x], FRAMES) as writer:
            for split in ("train", "valid", "test"):
                writer.append(split, state=np.ones((FRAMES, 1, 16), np.float32), parameters=[1.0])
        code = run(["rollout", "mine", f"{name}.zarr", "--task", "advection", "-o", f"{name}-out.zarr"])
        printed = capsys.readouterr()
        if dt < ADVECTION.dt:
            assert code == 0
            assert "one in 2 frames" in printed.err
            assert "advection, 3 steps" in printed.out
        else:
            assert code != 0
            assert "time step of 0.05" in printed.err


def drawn_examples(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """What is drawn, and which channel of it."""
    pytest.importorskip("matplotlib")
    from ups.evaluation import figures

    drawn: list[tuple[Any, int]] = []
    real = figures.fields_png

    def keep(example: Any, channel: int) -> bytes:
        drawn.append((example, channel))
        return real(example, channel)

    monkeypatch.setattr(figures, "fields_png", keep)
    return drawn


def test_a_picture_of_a_steady_task_shows_what_it_was_solved_for(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = drawn_examples(monkeypatch)
    assert run(["rollout", "mine", "darcy.zarr", "--task", "darcy", "--picture", "p.png"]) == 0
    example, channel = drawn[0]
    assert (list(example.given), channel) == (["a"], 0)
    stored = ups.open_data("darcy.zarr").trajectory("test", 0)["a"].values
    assert np.array_equal(example.given["a"], stored)


def test_a_field_is_drawn_by_name_and_others_are_named(
    desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = drawn_examples(monkeypatch)
    with StoreWriter(desk / "flow.zarr", FLOW, grid(FLOW), FRAMES) as writer:
        for split in ("train", "valid", "test"):
            state = np.ones((FRAMES, FLOW.num_channels("state"), *(16,) * len(FLOW.axes)), np.float32)
            static = np.ones((FLOW.num_channels("static"), 16, 16), np.float32)
            writer.append(split, state=state, static=static, parameters=[0.02, 1.5])
    channels = FLOW.channel_names("state")
    command = ["rollout", "mine", "flow.zarr", "--task", FLOW.name, "--picture", "p.png"]
    assert run([*command, "--field", channels[1]]) == 0
    assert drawn[0][1] == 1
    assert run(command) == 0
    assert drawn[1][1] == 0
    assert f"--field draws {', '.join(channels[1:])}" in capsys.readouterr().err
    assert run([*command, "--field", "nothing"]) == 3
    assert f"draw one of {', '.join(channels)}" in capsys.readouterr().err


def test_parameters_that_the_input_does_not_carry_are_given_on_the_command_line(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import xarray

    (x,) = grid(ADVECTION)
    xarray.Dataset({"u": (("x",), np.sin(2 * np.pi * x))}, {"x": x}).to_netcdf(desk / "wave.nc", engine="h5netcdf")
    command = ["rollout", "mine", "wave.nc", "--task", "advection", "--steps", "2"]
    assert run([*command, "-o", "a.zarr"]) == 10
    assert "--parameter beta=VALUE" in capsys.readouterr().err
    assert run([*command, "-o", "a.zarr", "--parameter", "beta=1.5"]) == 0
    assert float(xarray.open_zarr("a.zarr")["beta"]) == 1.5
    assert run([*command, "-o", "b.zarr", "--parameter", "bata=1.5"]) == 10
    assert "did you mean 'beta'" in capsys.readouterr().err
    assert run([*command, "-o", "b.zarr", "--parameter", "beta"]) == 3
    store = ["rollout", "mine", "wave.zarr", "--task", "advection", "-o", "c.zarr"]
    assert run([*store, "--parameter", "beta=3"]) == 3
    assert "says that beta is 1, and not 3" in capsys.readouterr().err
    assert run([*store, "--parameter", "beta=1"]) == 0


def test_a_file_of_frames_starts_where_it_is_told_to(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import xarray

    (x,) = grid(ADVECTION)
    dt = ADVECTION.dt
    waves = np.stack([np.sin(2 * np.pi * (x - 0.1 * n)) for n in range(5)])
    frames = xarray.Dataset({"u": (("time", "x"), waves)}, {"x": x, "time": dt * np.arange(5)})
    frames.to_netcdf(desk / "frames.nc", engine="h5netcdf")
    command = ["rollout", "mine", "frames.nc", "--task", "advection", "--steps", "2", "--parameter", "beta=1"]
    assert run([*command, "-o", "last.zarr"]) == 0
    assert "from the last of 5 frames; --start-frame" in capsys.readouterr().err
    assert run([*command, "-o", "first.zarr", "--start-frame", "1"]) == 0
    times = [float(xarray.open_zarr(name).time[0]) for name in ("last.zarr", "first.zarr")]
    np.testing.assert_allclose(times, [5 * dt, 2 * dt])
    assert run([*command, "-o", "no.zarr", "--start-frame", "5"]) == 4
    assert run([*command, "-o", "no.zarr", "--trajectory", "7"]) == 4


def test_hints_are_in_the_words_of_the_command_line(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import xarray

    (x,) = grid(ADVECTION)
    assert run(["rollout", "mine", "wave.zarr", "-o", "a.zarr", "--json"]) == 10
    printed = capsys.readouterr()
    assert "give its task: one of " in printed.err
    assert "give its task: one of " in json.loads(printed.out)["error"]["hint"]
    xarray.Dataset({"u": (("x",), x)}, {"x": 3 * x}).to_netcdf(desk / "long.nc", engine="h5netcdf")
    options = ["--task", "advection", "--parameter", "beta=1", "-o", "a.zarr"]
    assert run(["rollout", "mine", "long.nc", *options]) == 10
    text = capsys.readouterr().err
    assert "--rescale-domain" in text
    assert "rescale_domain" not in text


def test_who_has_only_a_bundle_gets_no_advice_about_recipes(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import xarray

    x = (np.arange(18) + 0.0) / 18  # not a multiple of the patch size
    xarray.Dataset({"u": (("x",), np.sin(2 * np.pi * x))}).to_netcdf(desk / "odd.nc", engine="h5netcdf")
    options = ["--task", "advection", "--parameter", "beta=1", "-o", "a.zarr"]
    if run(["rollout", "mine", "odd.nc", *options]) != 0:
        text = capsys.readouterr().err
        assert "model." not in text
        assert "16 points" in text


def test_members_of_an_ensemble_are_written_and_their_mean_is_judged(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_bundle(desk / "members", ensemble=True)
    command = ["rollout", "members", "wave.zarr", "--task", "advection", "--members", "3", "--seed", "1"]
    assert run([*command, "-o", "out.nc"]) == 0
    assert capsys.readouterr().out.startswith("advection, 6 steps, mean of 3 members from test trajectory 0")
    import xarray

    with xarray.open_dataset("out.nc") as result:
        assert result["u"].sizes == {"member": 3, "time": 6, "x": 16}
    assert run([*command, "-o", "again.nc", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == [{"warnings": [], "blew_up": False, "diverged_at": None}]
    assert run(["rollout", "mine", "wave.zarr", "--task", "advection", "--members", "3", "-o", "x.nc"]) != 0
    assert "leave --members out" in capsys.readouterr().err


@pytest.mark.parametrize("members", [(), ("--members", "2")])
def test_a_rollout_that_has_diverged_is_marked_in_print_json_picture_and_film(
    desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, members: tuple[str, ...]
) -> None:
    drawn = drawn_examples(monkeypatch)
    make_bundle(desk / "growing", ensemble=True)
    command = ["rollout", "growing", "wave.zarr", "--task", "advection", "--steps", "300", "--every", "10", *members]
    assert run([*command, "--picture", "p.png"]) == 0
    said = capsys.readouterr()
    assert "DIVERGED" in said.out.splitlines()[0]
    assert "is not a prediction from there on: sample 0" in said.err
    assert run([*command, "-o", "out.nc", "--json"]) == 0
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    assert sample["blew_up"]
    example, _ = drawn[0]
    assert example.diverged_at == -(-sample["diverged_at"] // 10) - 1
    with xarray.open_dataset("out.nc") as result:
        marked = result["diverged"].any("member") if members else result["diverged"]
        assert int(marked.values.argmax()) == example.diverged_at
