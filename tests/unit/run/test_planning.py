"""A rehearsal without data holds the bytes and does the arithmetic of the real step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.mixture import MODELS, mixture_recipe, write_mixture
from ups.config.schema import Recipe
from ups.distributed.runtime import Runtime
from ups.plan.operations import OperationTrace
from ups.plan.rehearsal import Rehearsal
from ups.run.assemble import OpenData, assemble, open_data
from ups.run.planning import kinds_of, largest_micro_batch, rehearse_stage
from ups.training.progress import Progress

pytestmark = pytest.mark.timeout(400)

# Large enough that a few kilobytes of counters and metrics do not show.
WIDER: dict[str, dict[str, Any]] = {"latent_operator": {"width": 64}, "multiscale": {"widths": [32, 32]}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plan")


@pytest.fixture(scope="module")
def tasks(folder: Path) -> list[dict[str, Any]]:
    return write_mixture(folder)


def recipe_of(folder: Path, tasks: list[dict[str, Any]], model: str = "multiscale", **engine: Any) -> Recipe:
    optimizer = engine.pop("optimizer", "adamw")
    return Recipe.model_validate(
        mixture_recipe(
            folder,
            tasks[:2],
            data={"tasks": tasks[:2], "batch_size": 8},
            model=MODELS[model] | WIDER[model],
            # Without noise: how many samples get some, and so a little of the memory, is drawn anew in each step.
            stages=[{"type": "operator", "steps": 2, "noise": 0.0, "optim": {"type": optimizer}}],
            engine={"device": "cpu", "threads": 1, **engine},
        )
    )


def rehearsed(recipe: Recipe, opened: OpenData, ranks: int = 1) -> Rehearsal:
    return rehearse_stage(recipe, opened, 0, ranks, kinds_of(recipe, opened, 0, ranks))


@pytest.mark.parametrize(("model", "optimizer"), [("latent_operator", "adamw"), ("multiscale", "muon")])
def test_a_rehearsal_holds_what_the_real_step_holds(
    folder: Path, tasks: list[dict[str, Any]], model: str, optimizer: str
) -> None:
    recipe = recipe_of(folder, tasks, model, optimizer=optimizer)
    with open_data(recipe) as opened:
        planned = rehearsed(recipe, opened)
        with (
            Runtime.start(recipe.engine) as runtime,
            assemble(recipe, opened, runtime, Progress()) as parts,
            OperationTrace() as watch,
        ):
            for tensor in (*parts.stage.parameters(), *parts.stage.buffers(), *parts.engine.state_tensors().values()):
                watch.hold(tensor)
            with torch.no_grad():
                # Behind outputs that are zero nothing has a gradient, and Muon saves the work for it.
                for parameter in parts.stage.parameters():
                    parameter.add_(1e-3)
            parts.engine.run()
    assert planned.peak_bytes == pytest.approx(watch.peak_bytes, rel=0.03)
    per_step = sum(op.flops for op in watch.operations) / recipe.stages[0].steps
    assert sum(op.flops for one in (*planned.forward, *planned.backward, planned.update) for op in one) == (
        pytest.approx(per_step, rel=0.01)
    )


def test_tasks_that_are_weighed_by_their_losses_can_be_planned(folder: Path, tasks: list[dict[str, Any]]) -> None:
    plain = recipe_of(folder, tasks, "latent_operator")
    stage = plain.stages[0].model_copy(update={"balance": 0.5})
    with open_data(plain) as opened:
        weighed = rehearsed(plain.model_copy(update={"stages": [stage]}), opened)
        assert weighed.peak_bytes == pytest.approx(rehearsed(plain, opened).peak_bytes, rel=0.01)


def test_what_costs_less_memory_is_seen_to(folder: Path, tasks: list[dict[str, Any]]) -> None:
    plain = recipe_of(folder, tasks)
    with open_data(plain) as opened:
        usual = rehearsed(plain, opened)
        assert usual.optimizer_bytes == pytest.approx(2 * usual.parameter_bytes, rel=0.05)
        assert rehearsed(recipe_of(folder, tasks, optimizer="muon"), opened).optimizer_bytes < usual.optimizer_bytes
        less = rehearsed(recipe_of(folder, tasks, activation_checkpointing=True), opened)
        assert less.activation_bytes < usual.activation_bytes
        assert less.parameters == usual.parameters
        sharded = rehearsed(recipe_of(folder, tasks, strategy="fsdp"), opened, ranks=2)
        assert sharded.optimizer_bytes == pytest.approx(usual.optimizer_bytes / 2, rel=0.1)
        assert not torch.distributed.is_initialized()


@pytest.mark.long
def test_the_largest_micro_batch_is_the_last_that_fits(folder: Path, tasks: list[dict[str, Any]]) -> None:
    recipe = recipe_of(folder, tasks)
    with open_data(recipe) as opened:

        def needed(size: int) -> int:
            cut = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"micro_batch_size": size})})
            return rehearsed(cut, opened).needed_bytes

        assert largest_micro_batch(recipe, opened, 0, 1, needed(8)) == 8
        assert largest_micro_batch(recipe, opened, 0, 1, needed(8) - 1) == 4
        assert largest_micro_batch(recipe, opened, 0, 1, needed(2)) == 2
        assert largest_micro_batch(recipe, opened, 0, 1, 1000) is None
