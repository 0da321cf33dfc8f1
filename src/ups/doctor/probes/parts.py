"""What checks of a run share: its data, hooks that leave early, and the changes that make a recipe quick or exact.

A stage itself is put together by `ups.run.assemble`, as in a run. Imports torch: checks import this module after they
have begun.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ups.config.schema import Recipe
from ups.data.open import open_tasks
from ups.distributed.agreement import Status
from ups.doctor.probes.check import TIMEOUT_SECONDS, Assignment
from ups.doctor.probes.statistics import STATISTICS_NAME, read_statistics
from ups.run.assemble import Assembled, OpenData, open_data
from ups.spec.keyed import key_of
from ups.spec.statistics import Statistics
from ups.training.engine import Engine, Hook
from ups.training.stages import Stage

_STEPS_OF_A_BUDGET = 1000


class Enough(Exception):
    """Leaves the engine between two steps, on all ranks after the same one."""


def quick(recipe: Recipe, **engine: Any) -> Recipe:
    """The recipe with a short time-out on collectives, and with other settings of the engine where given."""
    seconds = min(recipe.engine.timeout_seconds, TIMEOUT_SECONDS)
    changes = {"timeout_seconds": seconds, "max_seconds": None, **engine}
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update=changes)})


def exact(recipe: Recipe, ranks: int) -> Recipe:
    """The recipe in float64 with a small global batch that every rank reads in two micro-batches where it can.

    Gradients of any number of ranks then agree to rounding, and accumulation is at work whatever the recipe says. No
    compilation, which would take a minute and changes no mathematics; no clipping, which would hide a wrong scale. A
    budget of seconds becomes a number of steps: rates that follow a clock differ between any two runs. Scores are of a
    few trajectories, and not of as many for each rank: whole rollouts in float64 can take minutes.
    """
    share = min(4, max(1, recipe.data.batch_size // ranks))
    micro = share // 2 if share % 2 == 0 else share
    unlimited = {"clip_norm": 0.0, "clip_ratio": 0.0}
    counted = {"steps": _STEPS_OF_A_BUDGET, "budget_seconds": None, "budget_clock": "wall"}
    stages = [
        s.model_copy(
            update={"optim": s.optim.model_copy(update=unlimited), "batch_size": None}
            | (counted if s.budget_seconds is not None else {})
        )
        for s in recipe.stages
    ]
    data = recipe.data.model_copy(
        update={
            "tasks": [task.model_copy(update={"batch_size": None}) for task in recipe.data.tasks],
            "batch_size": share * ranks,
            "loader": recipe.data.loader.model_copy(update={"workers": 0}),
        }
    )
    changed = quick(recipe, precision="float64", micro_batch_size=micro, compile=False)
    few = recipe.evaluate.model_copy(update={"max_trajectories": min(recipe.evaluate.max_trajectories, 4 * ranks + 1)})
    return changed.model_copy(update={"data": data, "stages": stages, "evaluate": few})


@contextlib.contextmanager
def open_run_data(assignment: Assignment) -> Iterator[OpenData]:
    """Readers and statistics; what the check `data` measured is used again."""
    if not (assignment.work_dir / STATISTICS_NAME).exists():
        with open_data(assignment.run) as opened:
            yield opened
        return
    found = read_statistics(assignment.work_dir)
    with open_tasks(assignment.run.data) as readers:
        yield OpenData(readers, {name: Statistics.from_json(value) for name, value in found.items()})


@torch.no_grad()
def move_weights(stage: Stage) -> None:
    """Add a little to every weight, by its name: a gate that starts at zero hides the gradients of all behind it."""
    for name, parameter in stage.named_parameters():
        generator = torch.Generator().manual_seed(key_of(stage.seed, "doctor", name) >> 1)
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


class StopAfter(Hook):
    """A hook that leaves after so many steps."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def after_step(self, engine: Engine, agreed: Status) -> None:
        if engine.progress.stage_step >= self._steps:
            raise Enough

    def at_end(self, engine: Engine) -> None:
        raise Enough


def run_steps(parts: Assembled) -> None:
    """Train until a hook has had enough. Collective: all ranks."""
    try:
        parts.engine.run()
    except Enough:
        return


def stage_name(recipe: Recipe, index: int) -> str:
    """'stage 0 (operator)'."""
    return f"stage {index} ({recipe.stages[index].type})"
