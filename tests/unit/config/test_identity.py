"""What a recipe learns decides its identity; how a run of it is done does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ups.config.identity import first_difference, learned, recipe_identity
from ups.config.recipe import resolve
from ups.config.setting import REQUIRED, Section, setting

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
        "engine.micro_batch=1",
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
        "data.block_size=64",
        "model.width=24",
        "stages.0.optim.learning_rate=0.5",
        "engine.precision=float64",
    ],
)
def test_what_is_learned_is_not(change: str) -> None:
    one, other = resolve(RECIPE).recipe, resolve(RECIPE, [change]).recipe
    assert recipe_identity(one) != recipe_identity(other)
    assert first_difference(one, other).startswith(change.partition("=")[0] + " was ")


def test_the_identity_holds_no_free_field() -> None:
    found = learned(resolve(RECIPE).recipe)
    assert "checkpoint" not in found
    assert "path" not in str(found["data"])


class Old(Section):
    kind: str = setting(REQUIRED, "A name.")
    rate: float = setting(0.1, "A rate.")


class New(Section):
    kind: str = setting(REQUIRED, "A name.")
    learning_rate: float = setting(0.1, "A rate.", formerly="rate")
    added: int = setting(3, "A new setting.")
    free: int = setting(3, "A setting of how.", may_change=True)


def test_new_and_renamed_settings_keep_the_identity() -> None:
    old, new = Old.model_validate({"kind": "a", "rate": 0.5}), New.model_validate({"kind": "a", "rate": 0.5, "free": 9})
    assert new.learning_rate == 0.5
    assert recipe_identity(old) == recipe_identity(new)  # type: ignore[arg-type]
    assert recipe_identity(new) != recipe_identity(New(kind="a", learning_rate=0.5, added=4))  # type: ignore[arg-type]


def test_a_setting_under_both_names_is_refused() -> None:
    with pytest.raises(ValueError, match="rate is now called learning_rate"):
        New.model_validate({"kind": "a", "rate": 0.5, "learning_rate": 0.5})
