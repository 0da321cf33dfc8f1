"""What a recipe learns decides its identity; how a run of it is done does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ups.config.identity import first_difference, learned, recipe_identity
from ups.config.recipe import resolve

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
