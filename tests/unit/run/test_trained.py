"""A trained model from a bundle alone: what is missing is said in words that its reader can act on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ups
from ups.buckets.block_cache import DIRECTORY
from ups.cli.main import run
from ups.config.recipe import dump_recipe
from ups.errors import ConfigError, DataError, StatisticsChangedError
from ups.formats.store_writer import StoreWriter
from ups.formats.zarr_store import StoreReader
from ups.inference.bundle import load_bundle, write_bundle
from ups.inference.stored_scores import TOO_SHORT
from ups.run.trained import load_trained, too_short
from ups.training.progress import Progress

STORED = Path(__file__).parents[2] / "integration" / "runs"


def test_who_has_a_bundle_without_its_data_is_told_what_can_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(STORED / "data", "data")
    run = ups.fit(ups.load_recipe(STORED / "v1", stages__0__steps=1), progress=False)
    assert run.bundle is not None
    shutil.copytree(run.bundle, "elsewhere")
    shutil.rmtree("data")
    with pytest.raises(DataError, match="does not carry it") as caught:
        load_trained("elsewhere", recipe_data=True)
    assert "ups rollout elsewhere INPUT" in caught.value.hint


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A foreign bundle: its recipe names a private path, a cache, a mirror and a server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(DIRECTORY, raising=False)
    shutil.copytree(STORED / "data", "data")
    shutil.copytree("data/wave1d.zarr", "private.zarr")
    run = ups.fit(ups.load_recipe(STORED / "v1", stages__0__steps=1), progress=False)
    assert run.bundle is not None
    bundle = load_bundle(run.bundle)
    changes = {
        "data__tasks__0__path": str(tmp_path / "private.zarr"),
        "data__cache_dir": str(tmp_path / "planted-cache"),
        "checkpoint__mirror": "s3://planted/x",
        "tracking__trackers": [{"type": "mlflow", "uri": "http://127.0.0.1:9"}],
    }
    text = dump_recipe(ups.load_recipe(run.bundle, **changes))
    return write_bundle(tmp_path / "bundle", bundle.stepper, bundle.info, config_text=text, card="")


def test_a_bundle_is_scored_on_the_data_that_a_person_names(planted: Path) -> None:
    with pytest.raises(ConfigError, match="no data is named") as caught:
        ups.evaluate(planted)
    assert "private.zarr" in caught.value.command_hint
    with pytest.raises(ConfigError, match="no data is named"):
        ups.compare(planted, planted.parent / "runs" / "stored")
    shutil.rmtree("private.zarr")
    scores = ups.evaluate(planted, data={"wave1d": "data/wave1d.zarr"})
    assert scores.folder == planted.with_name("bundle-report"), "it is the data of the training"
    assert scores.results[0]["task"] == "wave1d"
    with pytest.raises(ConfigError, match="has no task 'x'"):
        ups.evaluate(planted, data={"x": "data/wave1d.zarr"})
    assert not Path("planted-cache").exists()
    assert DIRECTORY not in os.environ


def test_what_the_recipe_of_a_bundle_names_is_logged_before_it_is_opened(
    planted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_recipe = ups.evaluate(planted, recipe_data=True)
    assert "private.zarr" in caplog.text
    assert DIRECTORY not in os.environ, "the cache of a bundle is never used"
    by_name = ups.evaluate(planted, data={"wave1d": "data/wave1d.zarr"})
    assert by_name.to_json()["results"] == by_recipe.to_json()["results"], "the same data, and the same references"


def test_other_data_is_scored_into_a_folder_of_its_own(planted: Path) -> None:
    assert run(["data", "pack", "data/wave1d.zarr", "-o", "fewer.zarr", "--first-frame", "1"]) == 0
    scores = ups.evaluate(planted, data={"wave1d": "fewer.zarr"})
    assert scores.folder == planted.with_name("bundle-report-other-data")
    assert scores.identity["data wave1d"] != load_bundle(planted).info.provenance["data wave1d"]


def test_a_bundle_that_includes_a_file_of_ours_is_refused(planted: Path) -> None:
    bundle = load_bundle(planted)
    Path("ours.yaml").write_text("run: {name: ours}\n")
    text = f"include: {Path('ours.yaml').absolute()}\n" + (planted / "config.yaml").read_text()
    path = write_bundle(planted.with_name("including"), bundle.stepper, bundle.info, config_text=text, card="")
    with pytest.raises(ConfigError, match="names no other file"):
        ups.evaluate(path, data={"wave1d": "data/wave1d.zarr"})


def test_a_run_in_double_precision_is_scored_and_bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(STORED / "data", "data")
    recipe = ups.load_recipe(STORED / "v1", stages__0__steps=1, engine__precision="float64")
    run = ups.fit(recipe, progress=False)
    assert run.bundle is not None
    assert load_trained(str(run.path)).stepper.network.training is False


@pytest.mark.timeout(120)
def test_a_pipe_in_a_run_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(STORED / "data", "data")
    path = ups.fit(ups.load_recipe(STORED / "v1", stages__0__steps=1), progress=False).path
    (path / "metrics.jsonl").unlink()
    os.mkfifo(path / "metrics.jsonl")
    assert load_trained(str(path)).stages == []
    (path / "statistics.json").unlink()
    os.mkfifo(path / "statistics.json")
    with pytest.raises(StatisticsChangedError):
        load_trained(str(path))


def test_a_checkpoint_of_a_training_that_goes_on_is_too_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(STORED / "data", "data")
    recipe = ups.load_recipe(STORED / "v1", stages__0__steps=4, checkpoint__interval_steps=1, checkpoint__keep=10)
    run = ups.fit(recipe, progress=False)
    assert TOO_SHORT not in load_trained(str(run.path)).identity
    early = load_trained(str(run.path), run.path / "checkpoints" / "step_00000001").identity
    assert early[TOO_SHORT] == "the training has not ended: step 1 of 4, in stage 1 of 1"


def test_a_time_budget_that_was_computed_in_is_enough() -> None:
    """Progress of checkpoints from before idle time was counted has none."""
    recipe = ups.load_recipe(STORED / "v1", stages__0__steps=None, stages__0__budget_seconds=100.0)
    done = Progress(stage_step=9, step=9, total_steps=9, stage_finished=True, budget_used_seconds=100.0)
    assert too_short(recipe, done) == ""
    done.idle_seconds = 49.0
    assert too_short(recipe, done) == ""
    done.idle_seconds = 90.0
    assert "9; rank 0 computed in 10 s of a time budget of 100 s" in too_short(recipe, done)
    assert "about 10 times as many" in too_short(recipe, done)


@pytest.fixture
def busy_core() -> Iterator[int]:
    """The number of a core on which four others compute."""
    core = min(os.sched_getaffinity(0))
    compute = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", compute]) for _ in range(4)]
    try:
        yield core
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.long
@pytest.mark.processes
def test_a_time_budget_on_a_busy_machine_says_that_it_gave_far_too_few_steps(tmp_path: Path, busy_core: int) -> None:
    shutil.copytree(STORED / "data", tmp_path / "data")
    changes = "stages__0__steps=None, stages__0__budget_seconds=2.0, engine__threads=1"
    program = f"""
import os, ups, ups.run.assemble  # what takes long to import comes before the busy core
os.sched_setaffinity(0, {{{busy_core}}})
ups.fit(ups.load_recipe({str(STORED / "v1")!r}, {changes}, run__name='hasty'), progress=True)
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    last = done.stdout.splitlines()[-1]
    match = re.search(r"after (\d+) steps; .*WARNING: far fewer steps than the recipe means: (\d+); rank 0 ", last)
    assert match is not None, last
    assert match[1] == match[2]
    assert "**Warning:** far fewer steps" in (tmp_path / "runs" / "hasty" / "bundle" / "card.md").read_text()


def test_a_bundle_is_not_scored_on_another_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(STORED / "data", "data")
    run = ups.fit(ups.load_recipe(STORED / "v1", stages__0__steps=1), progress=False)
    store = Path("data/wave1d.zarr")
    reader = StoreReader(store)
    space = tuple(2 * n for n in reader.space)
    shutil.rmtree(store)
    axes = [axis.extent * (np.arange(n) + 0.5) / n for axis, n in zip(reader.task.axes, space, strict=True)]
    with StoreWriter(store, reader.task, axes, 3) as writer:
        for split in ("train", "valid", "test"):
            state = np.zeros((3, reader.task.num_channels("state"), *space), np.float32)
            writer.append(split, state=state, parameters=[p.maximum for p in reader.task.parameters])
    with pytest.raises(DataError, match="was trained on a grid of") as caught:
        ups.evaluate(run.bundle, recipe_data=True)
    assert "resamples" in caught.value.hint
