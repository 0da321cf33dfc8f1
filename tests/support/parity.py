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

from tests.support.mixture import MODELS, mixture_recipe
from ups.config.schema import Recipe
from ups.data.loader import Loader
from ups.distributed.runtime import Runtime
from ups.distributed.strategies import gathered
from ups.doctor.probes.parts import move_weights
from ups.run.assemble import assemble, open_data
from ups.spec.batch import Batch
from ups.training.engine import Engine
from ups.training.progress import Progress

BATCH_SIZE = 8
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
    def micro_batch_size(self) -> int:
        return self.micro_batch_of(BATCH_SIZE)

    def micro_batch_of(self, batch_size: int) -> int:
        return batch_size // self.ranks // self.accumulation


class Watched:
    """A loader that remembers which windows it gave."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self.batches_in_step, self.windows_in_step = loader.batches_in_step, loader.windows_in_step
        self.seen: list[tuple[int, str, list[int]]] = []

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(state)
        self.seen.clear()

    def __iter__(self) -> Iterator[tuple[Batch, ...]]:
        for group in self._loader:
            self.seen += [(b.stage_step, b.task.name, b.numbers.tolist()) for b in group if b.sample_weight]
            yield group


def run_variants(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Train each variant (see `_recipe`) on these ranks; weights go to files, windows come back.

    `strategy` and, where given, `engine` are settings of the engine.
    """
    tasks, folder = arguments["tasks"], Path(arguments["folder"])
    results = []
    engine = {"strategy": arguments["strategy"]} | arguments.get("engine", {})
    first = _recipe(folder, tasks, engine, arguments["steps"], arguments["variants"][0])
    with Runtime.start(first.engine) as runtime:
        for number, variant in enumerate(arguments["variants"]):
            recipe = _recipe(folder, tasks, engine, arguments["steps"], variant)
            at = Progress(stage_index=len(recipe.stages) - 1)
            # A student of an untrained corrector has nothing to learn.
            change = move_weights if recipe.stages[-1].type == "distill" else None
            with open_data(recipe) as opened, assemble(recipe, opened, runtime, at, change=change) as parts:
                parts.engine.loader = loader = Watched(parts.loader)
                before = whole_weights(parts.engine)
                parts.engine.run()
                weights = whole_weights(parts.engine)
            moved = float((weights - before).norm() / before.norm())
            path = folder / f"{arguments['label']}_{number}.npy"
            if runtime.is_first:
                np.save(path, weights.numpy())
            results.append({"weights": str(path), "windows": loader.seen, "moved": moved})
    return results


def _recipe(
    folder: Path, tasks: list[dict[str, Any]], engine: Mapping[str, Any], steps: int, variant: Mapping[str, Any]
) -> Recipe:
    joint = variant.get("joint", False)
    if joint:  # tasks share a micro-batch, have blocks of unequal size, and have balanced losses
        tasks = [task | ({"batch_size": BATCH_SIZE // 2} if number else {}) for number, task in enumerate(tasks)]
    model = MODELS["multiscale" if joint else variant.get("model", "latent_operator")]
    stage: dict[str, Any] = {
        "type": variant.get("stage", "operator"),
        "steps": variant.get("steps", steps),
        "unroll_steps": 2,
        "optim": {
            "type": variant["optimizer"],
            "learning_rate": RATES[variant["optimizer"]] * variant.get("rate", 1.0),
        },
    }
    if stage["type"] == "steady":
        del stage["unroll_steps"]
        stage["tasks"] = ["darcy2d"]
    if joint and stage["type"] == "operator":
        stage |= {"loss": "nrmse", "balance": 0.5}
    stage |= variant.get("settings", {})
    stages = [stage]
    if stage["type"] in ("corrector", "distill"):  # they train on; what is compared is the last stage alone
        model = model | ({"noise_size": 4} if joint else {})
        before = [{"type": "operator", "steps": 1}]
        before += [{"type": "corrector", "kind": "flow", "steps": 1}] if stage["type"] == "distill" else []
        stages = [*before, stage]
    return Recipe.model_validate(
        mixture_recipe(
            folder,
            tasks,
            data={"tasks": tasks, "batch_size": variant.get("batch_size", BATCH_SIZE)},
            model=model,
            stages=stages,
            engine={
                "device": variant.get("device", "cpu"),
                "compile": variant.get("compile", False),
                "threads": 1,
                **engine,
                "precision": variant["precision"],
                "micro_batch_size": variant["micro_batch_size"],
                "activation_checkpointing": variant.get("activation_checkpointing", False),
                "ema": {"enabled": False},
                "timeout_seconds": 60,
            },
        )
    )


def whole_weights(engine: Engine) -> torch.Tensor:
    """All weights as one float64 vector, gathered where they are sharded. Collective: all ranks."""
    parts = []
    for _, parameter in sorted(engine.strategy.stage.named_parameters()):
        parts.append(gathered(parameter).flatten().double().cpu())
    return torch.cat(parts)


def global_windows(results: list[list[dict[str, Any]]], variant: int, steps: int) -> dict[tuple[int, str], list[int]]:
    """(step, task) -> windows of the block, over all ranks."""
    windows: dict[tuple[int, str], list[int]] = {}
    for rank in results:
        for step, task, numbers in rank[variant]["windows"]:
            if step < steps:
                windows.setdefault((step, task), []).extend(numbers)
    return {key: sorted(numbers) for key, numbers in sorted(windows.items())}


def distance(first: str, second: str) -> float:
    """Global relative L2 distance of two weight files."""
    a, b = np.load(first), np.load(second)
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))
