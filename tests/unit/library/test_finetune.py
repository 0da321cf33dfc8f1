"""Fine-tuning from a bundle: its model and weights, your data, one command."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ups
from ups.cli.main import run as command
from ups.data.open import open_paths
from ups.errors import BundleError, ConfigError
from ups.formats.store_writer import StoreWriter
from ups.spec.task import FieldSpec

STORED = Path(__file__).parents[2] / "integration" / "runs"


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ups.Run:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(STORED / "data", "data")
    return ups.fit(ups.load_recipe(STORED / "v1", run__name="base", stages__0__steps=2), progress=False)


def write_own(path: str, **changes: object) -> None:
    """Data of one's own: the stored waves, smaller, under another name."""
    source = open_paths("data/wave1d.zarr")
    task = replace(source.task, **{"name": "mine", **changes})  # type: ignore[arg-type]
    with StoreWriter(path, task, source.coordinates, source.num_frames) as writer:
        for split in ("train", "valid", "test"):
            for number in range(source.splits[split]):
                window = source.read(split, number, 0, source.num_frames)
                writer.append(split, state=0.5 * window.state, parameters=window.parameters)


def test_every_weight_of_a_bundle_is_taken_for_data_that_fits_its_task(base: ups.Run) -> None:
    write_own("mine.zarr")
    recipe = ups.finetune_recipe(base.path, "mine.zarr", stages__0__steps=2, stages__0__budget_seconds=None)
    assert recipe.data.tasks[0].name == "wave1d"
    assert recipe.model == base.recipe.model
    assert recipe.stages[0].optim.learning_rate == 0.5 * base.recipe.stages[-1].optim.learning_rate
    tuned = ups.fit(recipe, progress=False)
    assert (tuned.state, tuned.name) == ("completed", "wave1d-finetuned")
    transfer = json.loads((tuned.path / "start" / "0.json").read_text())
    assert (transfer["new"], transfer["taken"]) == ([], transfer["weights"])


def test_data_with_another_field_keeps_its_name_and_the_learning_rate(
    base: ups.Run, caplog: pytest.LogCaptureFixture
) -> None:
    fields = tuple(replace(field, name=f"my_{field.name}") for field in ups.open_data("data/wave1d.zarr").task.fields)
    assert isinstance(fields[0], FieldSpec)
    write_own("mine.zarr", fields=fields, conserved=())
    recipe = ups.finetune_recipe("base", "mine.zarr", stages__0__steps=1, stages__0__budget_seconds=None)
    assert recipe.data.tasks[0].name == "mine"
    assert "it is trained as a new task" in caplog.text
    known = ups.finetune_recipe("base", "data/wave1d.zarr", stages__0__steps=1, stages__0__budget_seconds=None)
    rates = [one.stages[0].optim.learning_rate for one in (known, recipe)]
    assert rates[0] == pytest.approx(rates[1] / 2)  # near a good place only where the task is known
    tuned = ups.fit(recipe, progress=False)
    assert tuned.state == "completed"
    write_own("clash.zarr", name="wave1d", fields=fields, conserved=())
    with pytest.raises(ConfigError, match="calls its task 'wave1d'"):
        ups.finetune_recipe("base", "clash.zarr")
    assert ups.finetune_recipe("base", "clash.zarr", task="other").data.tasks[0].name == "other"


def test_a_file_is_read_as_the_run_read_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle knows what the arrays mean; so does `ups rollout`, with and without an input."""
    monkeypatch.chdir(tmp_path)
    phase = 2 * np.pi * (np.arange(32) / 32 - 0.02 * np.arange(6)[:, None] + np.linspace(0, 1, 12)[:, None, None])
    np.savez("first.npz", hoehe=np.sin(phase))
    np.savez("second.npz", hoehe=0.5 * np.sin(phase))
    words = {
        "fields": [{"name": "height", "dataset": "hoehe"}],
        "axes": [{"name": "x", "extent": 2.0}],
        "dims": ["trajectory", "time", "x"],
        "dt": 0.1,
    }
    task = {"name": "sea", "path": "first.npz", "description": words}
    base = {
        "version": 1,
        "run": {"name": "sea"},
        "data": {"tasks": [task], "batch_size": 4},
        "model": {"type": "fno", "width": 4, "modes": 4, "depth": 1},
        "stages": [{"type": "operator", "steps": 1}],
    }
    ups.fit(base, progress=False)
    recipe = ups.finetune_recipe("sea", "second.npz", stages__0__steps=1, stages__0__budget_seconds=None)
    assert (recipe.data.tasks[0].name, recipe.data.tasks[0].description.axes[0].extent) == ("sea", 2.0)
    assert ups.fit(recipe, progress=False).state == "completed"
    assert command(["rollout", "sea", "second.npz", "-o", "a.nc"]) == 0
    assert command(["rollout", "sea", "-o", "b.nc"]) == 0
    Path("first.npz").unlink()
    assert command(["rollout", "sea", "-o", "c.nc"]) == 4


def test_what_is_no_bundle_is_refused(base: ups.Run) -> None:
    with pytest.raises(BundleError, match="there is no bundle at 'nothing'"):
        ups.finetune_recipe("nothing", "data/wave1d.zarr")


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_one_command_from_a_bundle_and_data_to_a_bundle(base: ups.Run, capfd: pytest.CaptureFixture[str]) -> None:
    write_own("mine.zarr")
    assert command(["finetune", "runs/base/bundle", "mine.zarr", "--budget", "0.5", "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert (facts["name"], facts["state"]) == ("wave1d-finetuned", "completed")
    ups.Simulator.load(facts["bundle"], "cpu")
