"""A trained model from a bundle alone: what is missing is said in words that its reader can act on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ups
from ups.errors import DataError
from ups.run.trained import load_trained

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
        load_trained("elsewhere")
    assert "ups rollout elsewhere INPUT" in caught.value.hint


def test_a_run_in_double_precision_is_scored_and_bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(STORED / "data", "data")
    recipe = ups.load_recipe(STORED / "v1", stages__0__steps=1, engine__precision="float64")
    run = ups.fit(recipe, progress=False)
    assert run.bundle is not None
    assert load_trained(str(run.path)).stepper.network.training is False
