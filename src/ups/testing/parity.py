"""Real training runs on the mixture of tasks, in every arrangement of ranks, strategy and micro-batches.

One launch runs many variants in the same ranks, because starting a rank costs more than a variant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ups.config.schema import Recipe
from ups.data.loader import Loader, build_loader
from ups.data.normalize import ensure_statistics
from ups.data.open import open_task
from ups.distributed.runtime import Runtime
from ups.distributed.strategies import spread
from ups.models.build import build_model
from ups.spec.batch import Batch
from ups.testing.mixture import MODELS, mixture_recipe
from ups.training.engine import Engine
from ups.training.stages import build_stage

BLOCK_SIZE = 8
# So that 20 steps move the weights by percents: weights that stay where they are agree for nothing.
RATES = {"adamw": 1e-3, "sgd": 0.3}
# Largest global relative L2 distance of all parameters after 20 steps.
LIMITS = {
    ("float64", "sgd"): 1e-10,
    ("float64", "adamw"): 1e-10,
    ("float32", "sgd"): 1e-5,
    ("float32", "adamw"): 1e-4,
}


@dataclass(frozen=True)
class Arrangement:
    """Who computes the global batch: ranks, strategy, and in how many micro-batches a rank cuts its share."""

    ranks: int
    strategy: str
    accumulation: int

    @property
    def micro_batch(self) -> int:
        return BLOCK_SIZE // self.ranks // self.accumulation


class Watched:
    """A loader that remembers which windows it gave."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.batches_per_step = loader.batches_per_step
        self.seen: list[tuple[int, str, list[int]]] = []

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(state)
        self.seen.clear()

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            self.seen.append((batch.stage_step, batch.task.name, batch.numbers.tolist()))
            yield batch


def run_variants(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Train each variant (see `_recipe`) on these ranks; weights go to files, windows come back."""
    tasks, folder = arguments["tasks"], Path(arguments["folder"])
    results = []
    first = _recipe(folder, tasks, arguments["strategy"], arguments["steps"], arguments["variants"][0])
    with Runtime.start(first.engine) as runtime:
        for number, variant in enumerate(arguments["variants"]):
            recipe = _recipe(folder, tasks, arguments["strategy"], arguments["steps"], variant)
            engine, loader = build_engine(runtime, recipe, tasks)
            before = whole_weights(engine)
            engine.run()
            weights = whole_weights(engine)
            moved = float((weights - before).norm() / before.norm())
            path = folder / f"{arguments['label']}_{number}.npy"
            if runtime.is_first:
                np.save(path, weights.numpy())
            results.append({"weights": str(path), "windows": loader.seen, "moved": moved})
    return results


def _recipe(folder: Path, tasks: list[dict[str, Any]], strategy: str, steps: int, variant: Mapping[str, Any]) -> Recipe:
    return Recipe.model_validate(
        mixture_recipe(
            folder,
            tasks,
            data={"tasks": tasks, "block_size": BLOCK_SIZE},
            model=MODELS[variant.get("model", "latent_operator")],
            stages=[
                {
                    "type": "operator",
                    "steps": steps,
                    "unroll_steps": 2,
                    "optim": {"type": variant["optimizer"], "learning_rate": RATES[variant["optimizer"]]},
                }
            ],
            engine={
                "device": variant.get("device", "cpu"),
                "compile": variant.get("compile", False),
                "threads": 1,
                "strategy": strategy,
                "precision": variant["precision"],
                "micro_batch": variant["micro_batch"],
                "activation_checkpointing": variant.get("activation_checkpointing", False),
                "ema": {"enabled": False},
                "timeout_seconds": 60,
            },
        )
    )


def build_engine(runtime: Runtime, recipe: Recipe, tasks: list[dict[str, Any]]) -> tuple[Engine, Watched]:
    """The engine of the first stage of a recipe, with real readers, loader and model."""
    readers = [open_task(task) for task in recipe.data.tasks]
    statistics = {r.task.name: ensure_statistics(r, t["path"]) for r, t in zip(readers, tasks, strict=True)}
    config = recipe.stages[0]
    stepper = build_model(
        recipe.model, [r.task for r in readers], statistics, recipe.data.context_frames, seed=recipe.run.seed
    )
    stage = build_stage(config, stepper, recipe.run.seed)
    loader = Watched(
        build_loader(
            recipe.data,
            readers,
            runtime.place,
            seed=recipe.run.seed,
            window_frames=stage.window_frames(recipe.data.context_frames),
            micro_batch=recipe.engine.micro_batch,
        )
    )
    strategy = spread(stage, runtime, recipe.engine)
    global_batch = recipe.data.block_size * recipe.data.blocks_per_step
    return (
        Engine(runtime, strategy, loader, config=recipe.engine, length=config, global_batch=global_batch),
        loader,
    )


def whole_weights(engine: Engine) -> torch.Tensor:
    """All weights as one float64 vector, gathered where they are sharded. Collective: all ranks."""
    parts = []
    for _, parameter in sorted(engine.strategy.stage.named_parameters()):
        detached = parameter.detach()
        parts.append((detached.full_tensor() if isinstance(detached, DTensor) else detached).flatten().double().cpu())
    return torch.cat(parts)


def global_windows(results: list[list[dict[str, Any]]], variant: int, steps: int) -> dict[tuple[int, str], list[int]]:
    """(step, task) -> windows of the block, over all ranks."""
    found: dict[tuple[int, str], list[int]] = {}
    for rank in results:
        for step, task, numbers in rank[variant]["windows"]:
            if step < steps:
                found.setdefault((step, task), []).extend(numbers)
    return {key: sorted(numbers) for key, numbers in sorted(found.items())}


def distance(first: str, second: str) -> float:
    """Global relative L2 distance of two weight files."""
    a, b = np.load(first), np.load(second)
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))
