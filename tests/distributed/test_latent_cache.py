"""From a trained encoder over `ups data cache` to runs that read it: the same bytes from any number of processes, the
errors of encoding in every step, and no start with latents of something else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import ups
from tests.support.command_line import ups_here
from tests.support.latents import latent_recipe
from tests.support.mixture import MODELS, mixture_recipe, write_mixture
from ups.errors import ConfigError, DataChangedError, DataError
from ups.record.manifest import read_manifest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("latents")


@pytest.fixture(scope="module")
def recipe(folder: Path) -> dict[str, Any]:
    """A recipe that starts from the encoder of a run, which is trained here."""
    tasks = write_mixture(folder)
    stages = [{"type": "autoencode", "steps": 4}]
    ups.fit(mixture_recipe(folder / "autoencoder", tasks, model=MODELS["deep_encoder"], stages=stages), progress=False)
    document = latent_recipe(folder, tasks, augment=False, start_from=str(folder / "autoencoder"))
    document["tracking"] = {"log_interval_steps": 1}
    return document


def command(folder: Path, recipe: dict[str, Any], *options: str) -> Any:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return ups_here(folder, "data", "cache", str(path), *options)


@pytest.fixture(scope="module")
def written(folder: Path, recipe: dict[str, Any]) -> dict[str, Any]:
    done = command(folder, recipe, "--processes", "2", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def losses(run: ups.Run) -> list[float]:
    return [row["loss"] for row in run.rows() if "loss" in row]


def test_the_command_says_what_it_wrote_and_what_it_brings(
    folder: Path, recipe: dict[str, Any], written: dict[str, Any]
) -> None:
    assert written["path"] == str(folder / "latents")
    assert written["manifest"] == read_manifest(folder / "latents").sha256
    assert written["expected_gain"] > 1
    assert written["errors"]["wave1d"]["of_latent"] == 0.0  # float32
    done = command(folder, recipe, "--processes", "1", "--out", str(folder / "one"))
    assert done.returncode == 0, done.stderr
    assert "times that of the fields" in done.stdout
    assert "as many steps in the same time" in done.stdout
    assert read_manifest(folder / "one").sha256 == written["manifest"]
    assert command(folder, recipe, "--check").returncode == 0
    (folder / "one" / "wave1d" / "0000000.bin").write_bytes(b"")
    done = command(folder, recipe, "--check", "--out", str(folder / "one"))
    assert done.returncode == DataError.exit_code
    assert "truncated" in done.stderr


def test_a_run_from_the_cache_learns_what_a_run_that_encodes_does(
    folder: Path, recipe: dict[str, Any], written: dict[str, Any]
) -> None:
    kept = ups.fit(recipe, progress=False)
    stage = recipe["stages"][0] | {"cache": None}
    fresh = ups.fit(recipe | {"run": {"name": "fresh", "dir": str(folder / "fresh"), "seed": 3}, "stages": [stage]})
    assert losses(kept) == pytest.approx(losses(fresh), rel=1e-4)
    assert (kept.path / "bundle").is_dir()


def test_a_run_does_not_start_with_latents_of_another_encoder(
    folder: Path, recipe: dict[str, Any], written: dict[str, Any]
) -> None:
    other = latent_recipe(folder, recipe["data"]["tasks"], name="trained")
    other["stages"] = [{"type": "autoencode", "steps": 3, "start_from": str(folder / "autoencoder")}]
    trained = ups.fit(other, progress=False)
    wrong = recipe | {"run": {"name": "wrong", "dir": str(folder / "wrong"), "seed": 3}}
    wrong["stages"] = [recipe["stages"][0] | {"start_from": str(trained.path)}]
    with pytest.raises(DataError, match="stale: it is of an encoder with other weights"):
        ups.fit(wrong, progress=False)
    assert not (folder / "wrong").exists()


def test_a_run_goes_on_with_a_moved_cache_and_not_with_another_or_none(
    folder: Path, recipe: dict[str, Any], written: dict[str, Any]
) -> None:
    document = recipe | {"run": {"name": "moved", "dir": str(folder / "moved"), "seed": 3}}
    ups.fit(document, progress=False)
    longer = recipe["stages"][0] | {"steps": 6}
    for cache in (str(folder / "half"), None):
        if cache is not None:
            done = command(folder, recipe, "--out", cache, "--dtype", "bfloat16", "--processes", "1")
            assert done.returncode == 0, done.stderr
        with pytest.raises((DataChangedError, DataError, ConfigError)):
            ups.fit(document | {"stages": [longer | {"cache": cache}]}, progress=False)
    shutil.copytree(folder / "latents", folder / "elsewhere")
    run = ups.fit(document | {"stages": [longer | {"cache": str(folder / "elsewhere")}]}, progress=False)
    assert run.state == "completed"
    assert len(losses(run)) == 6
