"""What is trained on a scenario of APEBench, as recipes of ups.

`ups` is trained exactly as APEBench trains its networks; with it only the network differs. `ups+training` is the same
network for the same number of updates of the same batches, with the loss and the optimizer of ups-bench. `ups-large` is
the network of ups-bench in its usual size, trained as `ups+training`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.apebench.scenarios import BATCH, PEAK_RATE, SCENARIOS, UPDATES, WARMUP_UPDATES
from benchmarks.protocol.recipes import entries as entries_of_ups_bench

SMALL = {"type": "multiscale", "widths": [24, 32], "blocks": [1, 2], "attention": False}
LARGE = {"type": "multiscale"}

MODELS = {
    "ups": "multiscale network of this project, about 30,000 parameters, trained as APEBench trains",
    "ups+training": "the same network and number of updates, with the loss and optimizer of ups-bench",
    "ups-large": "the multiscale network in its usual size, trained as ups+training",
}
# Which of the protocol's settings each model keeps, for the page.
KEPT = {
    "ups": "all: data, batches, updates, loss, optimizer, schedule, last weights",
    "ups+training": "data, batches, number of updates, one step",
    "ups-large": "data, batches, number of updates, one step",
}
# Scenarios on which the large network is asked for.
OF_LARGE = ("ks", "kdv", "burgers")
# Part of the updates in which the linear law is fitted first, where the training is our own.
_LAW_SHARE = 0.01

# optax.adam has these; the mean square of a scaled difference is that of the frame but for a factor.
_PROTOCOL_STAGE: dict[str, Any] = {
    "type": "operator",
    "budget_clock": "cpu",
    "loss": "mse",
    "noise": 0.0,
    "augment": False,
    "optim": {
        "type": "adamw",
        "learning_rate": PEAK_RATE,
        "beta1": 0.9,
        "beta2": 0.999,
        "weight_decay": 0.0,
        "schedule": "cosine",
        "warmup_fraction": WARMUP_UPDATES / UPDATES,
        "final_fraction": 0.0,
        "clip_norm": 0.0,
        "clip_ratio": 0.0,
    },
}


@dataclass(frozen=True)
class Entry:
    """One training: its model, scenario and seed."""

    model: str
    scenario: str
    seed: int

    @property
    def name(self) -> str:
        """ups-ks-0, ups-plus-training-kdv-1."""
        return f"{self.model.replace('+', '-plus-')}-{self.scenario}-{self.seed}"

    def recipe(self, store: Path, run_dir: Path, updates: int = UPDATES) -> dict[str, Any]:
        """The training as a recipe. updates: fewer for a try, whose schedule is as much shorter."""
        return {
            "version": 1,
            "run": {"name": self.name, "dir": str(run_dir), "seed": self.seed},
            "data": {
                "context_frames": 1,
                "batch_size": BATCH,
                "tasks": [{"name": self.scenario, "path": str(store)}],
            },
            "model": dict(LARGE if self.model == "ups-large" else SMALL),
            **(_as_apebench(updates) if self.model == "ups" else _as_ups_bench(updates)),
            "checkpoint": {"interval_steps": 2500, "keep": 1},
            "tracking": {"log_interval_steps": 100},
        }


def entries(models: Iterable[str], scenarios: Sequence[str], seeds: Sequence[int] | None = None) -> list[Entry]:
    """Trainings that are asked for: every scenario with one seed first, and the large network last.

    The comparison is of `ups+training`, which alone gets more seeds.
    """
    found = []
    for model in models:
        for scenario in scenarios:
            if model == "ups-large" and scenario not in OF_LARGE:
                continue
            count = SCENARIOS[scenario].seeds if model == "ups+training" else 1
            found += [Entry(model, scenario, seed) for seed in (range(count) if seeds is None else seeds)]
    order = list(MODELS)
    return sorted(found, key=lambda entry: (entry.model == "ups-large", entry.seed, order.index(entry.model)))


def _as_apebench(updates: int) -> dict[str, Any]:
    """One stage, and the last weights instead of their average."""
    stage = copy.deepcopy(_PROTOCOL_STAGE) | {"steps": updates}
    return {"stages": [stage], "engine": {"threads": 1, "ema": {"enabled": False}}}


def _as_ups_bench(updates: int) -> dict[str, Any]:
    """The linear law first, then the rest, as `ups-alone` is trained; both count as updates."""
    known = entries_of_ups_bench(["ups-alone"], ["ks1d"], "data")[0]
    law, operator = copy.deepcopy(known.recipe["stages"])
    for stage in (law, operator):
        del stage["budget_seconds"]
    law["steps"] = max(1, round(_LAW_SHARE * updates))
    operator["steps"] = updates - law["steps"]
    return {"stages": [law, operator], "engine": copy.deepcopy(known.recipe["engine"])}
