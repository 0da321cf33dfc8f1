"""What a recipe learns decides its identity; how a run of it is done does not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from ups.config.identity import first_difference, learned, recipe_identity
from ups.config.recipe import resolve, resolve_data
from ups.config.setting import REQUIRED, Section, setting
from ups.errors import ConfigError

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny.yaml"


@pytest.mark.parametrize(
    "change",
    [
        "checkpoint.keep=9",
        "evaluate.interval_steps=3",
        "tracking.log_interval_steps=1",
        "supervise.max_restarts=0",
        "run.name=other",
        "run.dir=/elsewhere",
        "data.loader.workers=2",
        "data.tasks.0.path=/moved/data.zarr",
        "engine.strategy=fsdp",
        "engine.micro_batch_size=1",
        "engine.compile=true",
        "engine.threads=2",
    ],
)
def test_how_a_run_is_done_is_free(change: str) -> None:
    one, other = resolve(RECIPE).recipe, resolve(RECIPE, [change]).recipe
    assert recipe_identity(one) == recipe_identity(other)
    assert first_difference(one, other) == ""


@pytest.mark.parametrize(
    "change",
    [
        "run.seed=7",
        "data.batch_size=64",
        "model.kernel_size=5",
        "stages.0.optim.learning_rate=0.5",
        "engine.precision=float64",
    ],
)
def test_what_is_learned_is_not(change: str) -> None:
    one, other = resolve(RECIPE).recipe, resolve(RECIPE, [change]).recipe
    assert recipe_identity(one) != recipe_identity(other)
    assert first_difference(one, other).startswith(change.partition("=")[0] + " was ")


def test_the_identity_holds_no_free_field() -> None:
    fields = learned(resolve(RECIPE).recipe)
    assert "checkpoint" not in fields
    assert "path" not in str(fields["data"])


STORED = Path(__file__).parents[2] / "integration" / "runs"
DATA = {"tasks": [{"name": "a", "path": "a.zarr"}]}
PLAIN: dict[str, Any] = {"version": 1, "run": {"name": "x"}, "data": DATA, "stages": [{"type": "operator", "steps": 1}]}


@pytest.mark.parametrize("without_type", [False, True])
def test_a_stored_recipe_without_a_type_keeps_model_and_identity(tmp_path: Path, without_type: bool) -> None:
    text = (STORED / "v2" / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace("  type: latent_operator\n", "") if without_type else text)
    recipe = resolve(tmp_path / "config.yaml").recipe
    assert recipe.model.type == "latent_operator"
    stored = json.loads((STORED / "v2" / "run.json").read_text())["identity"]["recipes"]
    assert [recipe_identity(recipe)] == stored


def test_a_stored_recipe_without_a_model_is_of_the_former_default(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(json.dumps(PLAIN | {"networks": {"steady": {}}}))
    recipe = resolve(tmp_path / "config.yaml").recipe
    assert recipe.model.type == "latent_operator"
    assert recipe.networks.steady is not None
    assert recipe.networks.steady.type == "latent_operator"
    assert resolve(tmp_path / "config.yaml", ["model.type=multiscale"]).recipe.model.type == "multiscale"


def test_a_new_recipe_without_a_type_is_multiscale_and_says_so_in_its_identity() -> None:
    plain, named, former = (
        resolve_data(PLAIN | {"model": model}).recipe
        for model in ({}, {"type": "multiscale"}, {"type": "latent_operator"})
    )
    assert plain.model.type == "multiscale"
    assert recipe_identity(plain) == recipe_identity(named)
    assert recipe_identity(named) != recipe_identity(former)


def test_sizes_of_the_former_default_still_mean_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        recipe = resolve_data(PLAIN | {"model": {"width": 32, "neighbor_mixing": False}}).recipe
    assert recipe.model.type == "latent_operator"
    assert "add 'type: latent_operator'" in caplog.text


class Old(Section):
    kind: str = setting(REQUIRED, "A name.")
    rate: float = setting(0.1, "A rate.")


class New(Section):
    kind: str = setting(REQUIRED, "A name.")
    learning_rate: float = setting(0.1, "A rate.", formerly="rate")
    added: int = setting(3, "A new setting.")
    free: int = setting(3, "A setting of how.", may_change=True)


def test_new_and_renamed_settings_keep_the_identity() -> None:
    old, new = Old.model_validate({"kind": "a", "rate": 0.5}), New(kind="a", learning_rate=0.5, free=9)
    assert recipe_identity(old) == recipe_identity(new)  # type: ignore[arg-type]
    assert recipe_identity(new) != recipe_identity(New(kind="a", learning_rate=0.5, added=4))  # type: ignore[arg-type]


def test_a_stored_recipe_that_lacks_a_setting_means_what_its_version_did(tmp_path: Path) -> None:
    """`smooth` came later: a run from before continues without it, under the identity that it had."""
    now, stored = resolve(RECIPE, ["model.type=multiscale"]), tmp_path / "config.yaml"
    assert "  smooth: true\n" in now.text
    stored.write_text(now.text.replace("  smooth: true\n", ""))
    before = resolve(stored).recipe
    assert not before.model.smooth
    assert recipe_identity(before) != recipe_identity(now.recipe)
    said = resolve(RECIPE, ["model.type=multiscale", "model.smooth=false"]).recipe
    assert recipe_identity(before) == recipe_identity(said)


def test_old_names_are_read_in_stored_recipes_only(tmp_path: Path) -> None:
    now, stored, own = resolve(RECIPE), tmp_path / "config.yaml", tmp_path / "own.yaml"
    stored.write_text(now.text.replace(" batch_size:", " block_size:"))
    assert resolve(stored).text == now.text
    assert resolve(stored, ["data.batch_size=8"]).recipe.data.batch_size == 8
    stored.rename(own)
    with pytest.raises(ConfigError, match="block_size"):
        resolve(own)
