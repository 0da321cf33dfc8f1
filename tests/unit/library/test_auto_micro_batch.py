"""`engine.micro_batch_size: auto` is what a rehearsal says fits, and a refusal where nothing does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.mixture import MODELS, mixture_recipe, write_mixture
from ups.config.recipe import resolve_data
from ups.config.schema import Recipe
from ups.errors import MachineError
from ups.library.recipe import RecipeLike
from ups.library.train import auto_micro_batch, prepared, train
from ups.plan.devices import OF_FREE_MEMORY
from ups.run.assemble import open_data
from ups.run.planning import _PROCESS_BYTES, kinds_of, rehearse_stage

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.fixture
def recipe(tmp_path: Path) -> RecipeLike:
    tasks = write_mixture(tmp_path)[:1]
    model = MODELS["multiscale"]
    stages = [{"type": "operator", "steps": 2}]
    engine = {"device": "cpu", "threads": 1, "micro_batch_size": "auto"}
    data = {"tasks": tasks, "batch_size": 8}
    return mixture_recipe(tmp_path / "run", tasks, data=data, model=model, stages=stages, engine=engine)


def needed(recipe: Recipe, size: int) -> int:
    """Memory of a rank with which so many windows just fit."""
    cut = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"micro_batch_size": size})})
    with open_data(cut) as opened:
        tensors = rehearse_stage(cut, opened, 0, 1, kinds_of(cut, opened, 0, 1)).needed_bytes
    return int((tensors + _PROCESS_BYTES) / OF_FREE_MEMORY) + 2


@pytest.mark.long
def test_as_many_windows_as_fit(recipe: dict[str, object], tmp_path: Path) -> None:
    resolved = resolve_data(recipe)
    run_dir = tmp_path / "run"
    with prepared(resolved, run_dir, 1):
        assert auto_micro_batch(run_dir, 1, 2**34) == 8
        assert auto_micro_batch(run_dir, 1, needed(resolved.recipe, 2)) == 2
        with pytest.raises(MachineError, match="stage 0 does not fit with one sample"):
            auto_micro_batch(run_dir, 1, _PROCESS_BYTES)


def test_a_run_notes_what_it_chose_and_trains_with_it(recipe: dict[str, object]) -> None:
    run = train(recipe)
    assert run.state == "completed"
    document = json.loads((run.path / "run.json").read_text())
    assert document["overrides"] == {"engine.micro_batch_size": 8}
    assert document["attempts"][0]["overrides"] == {"engine.micro_batch_size": 8}
