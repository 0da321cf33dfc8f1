"""Data that resemble a task of the shipped model: `ups init` starts from it, `ups finetune` reads the file as it is."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

import ups
from ups.cli.main import run
from ups.library import own_data

RNG = np.random.default_rng(0)
X, T = np.arange(64) * 0.1, np.arange(9) * 0.05
Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_waves() -> None:
    """Advection under other names, on another domain and with other speeds than those of advection1d."""
    velocity = RNG.uniform(0.5, 2.0, 40)
    place = 2 * np.pi / 6.4 * (X - velocity[:, None, None] * T[:, None])
    phase = RNG.uniform(0, 2 * np.pi, (2, 40, 1, 1))
    height = np.sin(place + phase[0]) + 0.5 * np.sin(3 * place + phase[1])
    np.savez("waves.npz", height=height, x=X, t=T, velocity=velocity)


def test_init_starts_from_the_shipped_model_and_says_why_and_how_not_to(capsys: Output) -> None:
    write_waves()
    started = time.process_time()
    assert run(["init", "waves", "--data", "waves.npz"]) == 0
    assert time.process_time() - started < 10
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("training starts from ")]
    assert "ups-joint: its task advection1d explains 100% of a change" in line
    assert "to train from scratch, remove start_from and start_task" in line
    page = Path("waves/recipe.yaml").read_text()
    (stage,) = ups.load_recipe("waves/recipe.yaml").stages
    assert (stage.start_from, stage.start_task) == ("ups-joint", "advection1d")
    # What the line says brings back what is written without a model.
    without = "".join(line for line in page.splitlines(keepends=True) if "start_" not in line)
    Path("waves/recipe.yaml").write_text(without)
    (stage,) = ups.load_recipe("waves/recipe.yaml").stages
    assert (stage.start_from, stage.start_task) == (None, None)


def test_a_start_is_at_once_better_than_no_change() -> None:
    write_waves()
    own_data.init_run("waves", "waves.npz")
    short = {
        "stages__0__steps": 1,
        "stages__0__optim__learning_rate": 1e-9,
        "stages__0__optim__matrix_learning_rate": 1e-9,
    }
    tuned = ups.fit("waves/recipe.yaml", progress=False, **short)
    (scores,) = json.loads((tuned.path / "bundle" / "bundle.json").read_text())["scores"].values()
    errors = {name: one["one_step_trmse"] for name, one in scores["predictors"].items()}
    assert errors["model"] < 0.3 * errors["persistence"]
    assert json.loads((tuned.path / "start" / "0.json").read_text())["like"] == {"waves": "advection1d"}


@pytest.mark.parametrize("kind", ["noise", "still", "not finite", "two fields", "cube", "huge"])
def test_data_unlike_all_tasks_change_nothing(
    kind: str, folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = RNG.normal(size=(20, 9, 64))
    if kind == "still":
        values[:] = values[:, :1]
    elif kind == "not finite":
        values[0, 0, 0] = np.nan
    elif kind == "cube":
        values = values[..., None, None].reshape(20, 9, 4, 4, 4)
    elif kind == "huge":
        monkeypatch.setattr(own_data, "_MOST_COMPARED", 1000)
    arrays = {"u": values} | ({"v": values} if kind == "two fields" else {})
    np.savez("data.npz", **arrays)
    dims = ",".join(["trajectory", "time", *"xyz"[: values.ndim - 2]])
    assert run(["init", "mine", "--data", "data.npz", "--dims", dims]) == 0
    assert "training starts" not in capsys.readouterr().out
    assert "start_" not in Path("mine/recipe.yaml").read_text()


def test_a_plain_file_is_fine_tuned_by_the_name_of_the_model(caplog: pytest.LogCaptureFixture) -> None:
    write_waves()
    recipe = ups.finetune_recipe("ups-joint", "waves.npz")
    assert "waves.npz does not say what its arrays mean; guessed" in caplog.text
    assert "it begins as 'advection1d', whose step explains 100% of a change" in caplog.text
    (stage,), (task,) = recipe.stages, recipe.data.tasks
    assert (task.name, stage.start_task) == ("waves", "advection1d")
    assert stage.optim.learning_rate == pytest.approx(2e-3)  # as the bundle was trained
    path = Path(ups.__file__).parent / "shipped" / "ups-joint" / "bundle"
    assert ups.finetune_recipe(path, "waves.npz") == recipe


def test_start_task_needs_other_weights() -> None:
    write_waves()
    own_data.init_run("waves", "waves.npz")
    with pytest.raises(ups.errors.ConfigError, match="start_task is a task of other weights"):
        ups.load_recipe("waves/recipe.yaml", stages__0__start_from=None)
