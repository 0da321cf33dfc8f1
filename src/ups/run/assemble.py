"""One stage of a run on one rank, put together: model, stage, strategy, loader and engine.

The same for a run (`ups.run.rank`), for the checks of the doctor and for tests, so that what is checked is what
trains. Restoring a state and choosing hooks is left to the caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ups.config.schema import DataConfig, Recipe
from ups.data.latent_cache import CacheKey, open_cache
from ups.data.loader import Loader, build_loader
from ups.data.normalize import ensure_statistics
from ups.data.open import check_conserved, open_tasks
from ups.distributed.runtime import Runtime
from ups.distributed.strategies import Strategy, spread
from ups.errors import ConfigError
from ups.formats.base import Reader
from ups.models.build import build_model
from ups.models.stepper import Stepper
from ups.record.blackbox import BlackBox
from ups.spec.keyed import key_of
from ups.spec.place import Place
from ups.spec.statistics import Statistics
from ups.training.engine import Engine, Hook
from ups.training.progress import Progress
from ups.training.stages import Stage, build_stage
from ups.training.stop_requests import StopRequests


@dataclass(frozen=True)
class OpenData:
    """Readers of a recipe's tasks in their order, and statistics by task."""

    readers: Sequence[Reader]
    statistics: Mapping[str, Statistics]

    def readers_of(self, recipe: Recipe, data: DataConfig) -> list[Reader]:
        """Those of the tasks of one stage, in their order."""
        names = {task.name for task in data.tasks}
        return [r for r, task in zip(self.readers, recipe.data.tasks, strict=True) if task.name in names]


@dataclass(frozen=True)
class Assembled:
    """One stage of a run, ready to train."""

    stepper: Stepper
    stage: Stage
    strategy: Strategy
    loader: Loader
    engine: Engine


@contextlib.contextmanager
def open_data(recipe: Recipe) -> Iterator[OpenData]:
    """Readers and statistics without a run directory; a task that was never measured is measured now."""
    tasks = recipe.data.tasks
    with open_tasks(recipe.data) as readers:
        statistics = {r.task.name: ensure_statistics(r, t.paths) for r, t in zip(readers, tasks, strict=True)}
        yield OpenData(readers, statistics)


def bare_stage(recipe: Recipe, opened: OpenData, index: int, device: str = "cpu") -> tuple[Stepper, Stage]:
    """Model and stage `index` as every rank builds them; device 'meta' needs no memory."""
    tasks = [reader.task for reader in opened.readers]
    for reader in opened.readers:
        check_conserved(recipe.model, reader)
    stepper = build_model(
        recipe.network_configs,
        tasks,
        opened.statistics,
        recipe.data.context_frames,
        seed=recipe.run.seed,
        device=device,
    )
    stage = build_stage(recipe.stages[index], stepper, recipe.run.seed)
    for reader in opened.readers_of(recipe, recipe.data_of(index)):
        if not stage.takes(reader.task):
            kind = "is steady" if reader.task.steady else "changes in time"
            raise ConfigError(
                f"stages.{index}: '{recipe.stages[index].type}' does not train task '{reader.task.name}', which {kind}",
                hint=f"name the tasks that it trains: stages.{index}.tasks",
            )
    return stepper, stage


def stage_loader(recipe: Recipe, opened: OpenData, place: Place, index: int, stage: Stage) -> Loader:
    """The loader of one rank for stage `index`; with a cache, which is checked, fields are read only if they count."""
    data, config = recipe.data_of(index), recipe.stages[index]
    readers = opened.readers_of(recipe, data)
    place_of_cache = config.cache_place
    cache = open_cache(place_of_cache, readers, cache_key(recipe, opened, index)) if place_of_cache else None
    return build_loader(
        data,
        readers,
        place,
        seed=key_of(recipe.run.seed, "stage", index) >> 1,
        window_frames=stage.window_frames(recipe.data.context_frames),
        micro_batch_size=recipe.engine.fixed_micro_batch_size,
        grouped=recipe.model.groups_tasks,
        cache=cache,
        fields=bool(getattr(config, "decode_weight", 1.0)),
    )


def cache_key(recipe: Recipe, opened: OpenData, index: int, *, dtype: str = "", encoder: str = "") -> CacheKey:
    """What decides the latents that stage `index` reads; the weights of the encoder only where they are given."""
    return CacheKey.of(
        opened.readers,
        opened.statistics,
        dtype=dtype or str(getattr(recipe.stages[index], "cache_dtype", "float32")),
        model=recipe.model.encoder_settings,
        context_frames=recipe.data.context_frames,
        encoder=encoder,
    )


@contextlib.contextmanager
def assemble(
    recipe: Recipe,
    opened: OpenData,
    runtime: Runtime,
    progress: Progress,
    *,
    hooks: Sequence[Hook] = (),
    stop_requests: StopRequests | None = None,
    box: BlackBox | None = None,
    change: Callable[[Stage], None] | None = None,
) -> Iterator[Assembled]:
    """Stage `progress.stage_index` on this rank, standing at `progress`. Collective: all ranks.

    change: called with the stage before it is spread over the ranks.
    """
    index = progress.stage_index
    stepper, stage = bare_stage(recipe, opened, index)
    if change is not None:
        change(stage)
    strategy = spread(stage, runtime, recipe.engine)
    with stage_loader(recipe, opened, runtime.place, index, stage) as loader:
        engine = Engine(
            runtime,
            strategy,
            loader,
            config=recipe.engine,
            length=recipe.stages[index],
            progress=progress,
            stop_requests=stop_requests,
            hooks=hooks,
            box=box,
        )
        yield Assembled(stepper, stage, strategy, loader, engine)
