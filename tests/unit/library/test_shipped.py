"""Models that come with the package: found by name where no directory is, listed, shown, and never written to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

import ups
from tests.support.calibrated_bundle import TASKS, make_shipped
from ups.cli.main import run
from ups.errors import BundleError, ConfigError
from ups.inference.bundle import load_bundle
from ups.record import run_dir
from ups.record.manifest import verify
from ups.record.run_dir import find_bundle, find_model

NAME = "ups-joint"
Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package") / "shipped"
    make_shipped(folder / NAME)
    return folder


@pytest.fixture
def bundle(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundle of the one shipped model; the current directory is empty."""
    monkeypatch.setattr(run_dir, "SHIPPED", package)
    monkeypatch.chdir(tmp_path)
    return package / NAME / "bundle"


def test_a_name_means_the_shipped_bundle(bundle: Path) -> None:
    assert find_bundle(NAME) == find_model(NAME) == bundle
    simulator = ups.Simulator.load(NAME)
    assert all(f"<td>{text}</td>" in simulator._repr_html_() for text in ("flow", "16 x 16", "steady", "beta 0.1 to 4"))
    assert [*simulator.tasks] == [task.name for task in TASKS]
    assert 'Simulator.load("PATH")' in simulator.card


@pytest.mark.parametrize("place", [NAME, f"runs/{NAME}"])
def test_a_directory_of_that_name_wins_with_a_bundle_or_without(bundle: Path, place: str) -> None:
    Path(place).mkdir(parents=True)
    assert find_bundle(NAME) == Path(NAME)
    with pytest.raises(ConfigError, match="there is no run or bundle"):
        find_model(NAME)
    shutil.copytree(bundle, place, dirs_exist_ok=True)
    if place == NAME:
        assert find_bundle(NAME) == find_model(NAME) == Path(NAME)
    else:
        assert find_model(NAME) == Path(place)


def test_an_unknown_name_is_answered_with_the_known_ones(bundle: Path, capsys: Output) -> None:
    with pytest.raises(BundleError) as error:
        ups.Simulator.load("ups-join")
    assert NAME in error.value.hint
    assert run(["eval", "ups-join"]) == 3
    assert f"the name of a model: {NAME}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ftp://host/bundle", "s3://bucket/bundle"])
def test_an_address_is_refused_in_words(bundle: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is an address"):
        ups.Simulator.load(name)


def test_models_are_listed_with_tasks_and_size(bundle: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["models"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{NAME}  ")
    assert all(task.name in text for task in TASKS)
    assert run(["models", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)[NAME]
    assert facts["calibrated"] is True
    assert facts["size_bytes"] == sum(file.stat().st_size for file in bundle.iterdir())
    assert [*facts["tasks"]] == [task.name for task in TASKS]
    monkeypatch.setattr(run_dir, "SHIPPED", Path("nowhere"))
    assert run(["models"]) == 0
    assert "without models" in capsys.readouterr().out
    assert run(["demo"]) == 3


@pytest.mark.parametrize("task", [task.name for task in TASKS])
def test_a_demo_says_what_it_did_and_draws_it(bundle: Path, task: str, capsys: Output) -> None:
    assert run(["demo", task]) == 0
    first, summary, *rest = capsys.readouterr().out.splitlines()
    assert first == f"{NAME}, one model for advection, flow, darcy"
    assert summary.startswith(f"{task}")
    assert "test trajectory 0" in summary
    assert "; measured " in rest[0]
    (written,) = Path().iterdir()
    assert rest[-1] == f"wrote {written}"
    assert written.suffix == (".png" if task == "darcy" else ".mp4")
    assert run(["demo", task, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["written"] == [str(written)]
    assert facts["seconds_per_step"] > 0


def test_a_demo_without_ffmpeg_is_a_gif(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ups.evaluation.figures.film_suffix", lambda: ".gif")
    assert run(["demo", "flow"]) == 0
    film = Image.open("ups-demo-flow.gif")
    assert (film.n_frames, film.info["loop"]) == (5, 0)
    frames = []
    for number in (0, 4):
        film.seek(number)
        frames.append(film.convert("RGB").tobytes())
    assert frames[0] != frames[1]


def test_commands_take_the_name_and_leave_the_package_alone(bundle: Path, capsys: Output) -> None:
    data = bundle.parent / "states" / "advection.zarr"
    before = {path: path.stat().st_mtime_ns for path in bundle.parent.rglob("*")}
    assert run(["rollout", NAME, "--task", "flow", "--level", "0.5", "-o", "out.nc"]) == 0
    assert run(["eval", NAME, "--data", f"advection={data}", "--no-report"]) == 0
    assert Path(f"{NAME}-report-other-data/scores.json").is_file()
    assert run(["calibrate", NAME, "--data", f"advection={data}"]) == 0
    assert {path: path.stat().st_mtime_ns for path in bundle.parent.rglob("*")} == before
    assert capsys.readouterr().out.endswith(f"wrote {NAME}\n")
    assert find_bundle(NAME) == Path(NAME), "the calibrated copy is what the name means here now"
    assert load_bundle(NAME).calibrations.keys() == {task.name for task in TASKS}
    verify(bundle)
    assert ups.finetune_recipe(bundle, data, task="advection").stages[0].start_from == str(bundle)
