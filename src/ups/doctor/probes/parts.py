"""The parts of a run, put together as a rank does it, and the changes to a recipe that make a check quick or exact.

Mirrors `ups.run.stage_run` with the parts that a check wants to see. Imports torch: checks import this module
after they have begun.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ups.config.schema import Recipe
from ups.data.loader import Loader, build_loader
from ups.data.normalize import ensure_statistics
from ups.data.open import open_task
from ups.distributed.agreement import Status
from ups.distributed.runtime import Runtime
from ups.distributed.strategies import Strategy, spread
from ups.doctor.probes.check import TIMEOUT_SECONDS, Assignment
from ups.doctor.probes.statistics import STATISTICS_NAME, read_statistics
from ups.formats.base import Reader
from ups.models.build import build_model
from ups.models.stepper import Stepper
from ups.spec.keyed import key_of
from ups.spec.place import Place
from ups.spec.statistics import Statistics
from ups.training.engine import Engine, Hook
from ups.training.stages import Stage, build_stage
from ups.training.stop_requests import StopRequests


class Enough(Exception):
    """Leaves the engine between two steps, on all ranks after the same one."""


@dataclass(frozen=True)
class OpenData:
    """Tasks, readers and statistics of a recipe."""

    readers: Sequence[Reader]
    statistics: Mapping[str, Statistics]


@dataclass(frozen=True)
class Assembled:
    """One stage of a run, ready to train."""

    stepper: Stepper
    stage: Stage
    strategy: Strategy
    loader: Loader
    engine: Engine


def quick(recipe: Recipe, **engine: Any) -> Recipe:
    """The recipe with a short time-out on collectives, and with other settings of the engine where given."""
    seconds = min(recipe.engine.timeout_seconds, TIMEOUT_SECONDS)
    changes = {"timeout_seconds": seconds, "max_seconds": None, **engine}
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update=changes)})


def exact(recipe: Recipe, ranks: int) -> Recipe:
    """The recipe in float64 with a small global batch that every rank reads in two micro-batches where it can.

    Gradients of any number of ranks then agree to rounding, and accumulation is at work whatever the recipe says. No
    compilation, which would take a minute and changes no mathematics; no clipping, which would hide a wrong scale.
    """
    share = min(4, max(1, recipe.data.block_size // ranks))
    micro = share // 2 if share % 2 == 0 else share
    unlimited = {"clip_norm": 0.0, "clip_ratio": 0.0}
    stages = [s.model_copy(update={"optim": s.optim.model_copy(update=unlimited)}) for s in recipe.stages]
    data = recipe.data.model_copy(
        update={"block_size": share * ranks, "loader": recipe.data.loader.model_copy(update={"workers": 0})}
    )
    changed = quick(recipe, precision="float64", micro_batch=micro, compile=False)
    return changed.model_copy(update={"data": data, "stages": stages})


@contextlib.contextmanager
def open_run_data(assignment: Assignment) -> Iterator[OpenData]:
    """Readers and statistics; what the check `data` measured is used again."""
    recipe = assignment.run
    readers = [open_task(task) for task in recipe.data.tasks]
    try:
        if (assignment.work_dir / STATISTICS_NAME).exists():
            found = read_statistics(assignment.work_dir)
            statistics = {name: Statistics.from_json(value) for name, value in found.items()}
        else:
            statistics = {
                r.task.name: ensure_statistics(r, t.path) for r, t in zip(readers, recipe.data.tasks, strict=True)
            }
        yield OpenData(readers, statistics)
    finally:
        for reader in readers:
            reader.close()


def build_bare(recipe: Recipe, opened: OpenData, index: int, device: str = "cpu") -> tuple[Stepper, Stage]:
    """Model and stage `index` as every rank builds them; device 'meta' needs no memory."""
    tasks = [reader.task for reader in opened.readers]
    stepper = build_model(
        recipe.model, tasks, opened.statistics, recipe.data.context_frames, seed=recipe.run.seed, device=device
    )
    return stepper, build_stage(recipe.stages[index], stepper, recipe.run.seed)


def build_reading(recipe: Recipe, opened: OpenData, place: Place, index: int, window_frames: int) -> Loader:
    """The loader of one rank for stage `index`."""
    return build_loader(
        recipe.data,
        opened.readers,
        place,
        seed=key_of(recipe.run.seed, "stage", index) >> 1,
        window_frames=window_frames,
        micro_batch=recipe.engine.micro_batch,
    )


@torch.no_grad()
def move_weights(stage: Stage, seed: int) -> None:
    """Add a little to every weight, by its name: a gate that starts at zero hides the gradients of all behind it."""
    for name, parameter in stage.named_parameters():
        generator = torch.Generator().manual_seed(key_of(seed, "doctor", name) >> 1)
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


@contextlib.contextmanager
def assemble(
    recipe: Recipe, opened: OpenData, runtime: Runtime, index: int, hooks: Sequence[Hook] = (), *, moved: bool = False
) -> Iterator[Assembled]:
    """Stage `index` on this rank, from its first step, with `moved` weights if asked. Collective: all ranks."""
    stepper, stage = build_bare(recipe, opened, index)
    if moved:
        move_weights(stage, recipe.run.seed)
    strategy = spread(stage, runtime, recipe.engine)
    frames = stage.window_frames(recipe.data.context_frames)
    with build_reading(recipe, opened, runtime.place, index, frames) as loader:
        engine = Engine(
            runtime,
            strategy,
            loader,
            config=recipe.engine,
            length=recipe.stages[index],
            global_batch=recipe.data.block_size * recipe.data.blocks_per_step,
            stop_requests=StopRequests(),
            hooks=hooks,
        )
        yield Assembled(stepper, stage, strategy, loader, engine)


class StopAfter:
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
