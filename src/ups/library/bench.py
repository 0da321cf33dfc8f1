"""`ups bench RECIPE`: the model of a recipe beside baselines with the same CPU time, on the data of the recipe.

Only `ups.train` and `ups.compare`: each model is an ordinary run in the directory of the benchmark. The recipe's own
model is trained first, on one thread, and the CPU time that it used is the budget of the others.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ups.config.recipe import plain_data
from ups.config.schema import Recipe
from ups.data.open import open_task
from ups.errors import ConfigError, MissingExtraError, TrainingError
from ups.library.run import Run
from ups.library.scores import Comparison, compare
from ups.library.train import train
from ups.record.checkpoints import latest_verified, read_progress

# By number of dimensions: samples in a step, and settings. Where a step is dearer, more and smaller steps learn more in
# the same time (docs/decisions/0008).
BASELINES: dict[str, dict[int, tuple[int, dict[str, int]]]] = {
    "fno": {1: (32, {"modes": 64}), 2: (8, {"modes": 16}), 3: (2, {"modes": 8})},
    "unet": {1: (16, {"blocks": 2}), 2: (4, {"blocks": 1}), 3: (2, {"blocks": 1})},
}
# The training of `fno+` and `unet+` in docs/benchmark.md, chosen on validation: about half the error of a plain one.
OPTIMIZER = {
    "type": "muon",
    "learning_rate": 4e-3,
    "matrix_learning_rate": 1e-2,
    "warmup_fraction": 0.02,
    "final_fraction": 0.001,
    "weight_decay": 0.0,
    "clip_norm": 0.0,
    "clip_ratio": 3.0,
}
STAGE = {"type": "operator", "budget_clock": "cpu", "loss": "nrmse", "noise": 0.005, "optim": OPTIMIZER}


def bench_recipe(recipe: Recipe, out: Path, models: Sequence[str] = (), *, progress: bool = False) -> Comparison:
    """Train and compare the recipe's model and the baselines `models` (default all); finished trainings are kept.

    Baselines learn one task: with several tasks each gets its own, and an equal part of the CPU time. A baseline that
    cannot be built here is named in the notes. Raises TrainingError for a training that fails, and KeyboardInterrupt
    after an interrupt: the run in work has saved, and the same call continues.
    """
    names, notes = _baselines(models)
    tasks = [task.name for task in recipe.data.tasks]
    labels = {
        (name, n): name if len(tasks) == 1 else f"{name}-{task}" for name in names for n, task in enumerate(tasks)
    }
    label = recipe.run.name if recipe.run.name not in labels.values() else f"{recipe.run.name}-own"
    plain = _placed(recipe, label, out)
    plain["stages"] = [stage | {"budget_clock": "cpu"} for stage in plain["stages"]]
    runs = [_trained(plain, progress)]
    seconds = _cost(runs[0])["CPU seconds"] / len(tasks)
    for (name, number), run_name in labels.items():
        plain = _baseline(recipe, name, number, seconds, _placed(recipe, run_name, out))
        runs.append(_trained(plain, progress))
    comparison = compare(*runs, progress=progress)
    costs = dict(zip(comparison.models, map(_cost, runs), strict=True))
    return replace(comparison, notes=[*notes, *comparison.notes], costs=costs)


def _baselines(models: Sequence[str]) -> tuple[list[str], list[str]]:
    """The baselines to train, and a note about one that this environment cannot build."""
    unknown = [name for name in models if name not in BASELINES]
    if unknown:
        raise ConfigError(f"there is no baseline '{unknown[0]}' for a recipe", hint=f"use {' or '.join(BASELINES)}")
    names = [name for name in BASELINES if name in (models or BASELINES)]
    if "fno" not in names or importlib.util.find_spec("neuralop") is not None:
        return names, []
    error = MissingExtraError.of("baselines", "neuraloperator", "the baseline 'fno'")
    if models:
        raise error
    return names[1:], [f"fno is left out: {error.message} -> {error.hint}"]


def _trained(recipe: dict[str, Any], progress: bool) -> Run:
    """The completed run of a recipe. A signal that made it save and leave ends the benchmark, too."""
    run = train(recipe, progress=progress)
    if run.state in ("stopped", "preempted"):
        raise KeyboardInterrupt if run.state == "stopped" else SystemExit(run.exit_code)
    if run.state != "completed":
        raise TrainingError(f"{run.name} is not trained: {run.verdict}", hint=f"ups why {run.path}; or use --model")
    return run


def _baseline(recipe: Recipe, name: str, number: int, seconds: float, plain: dict[str, Any]) -> dict[str, Any]:
    """The recipe in `plain` for a baseline of task `number`."""
    with contextlib.closing(open_task(recipe.data.tasks[number])) as reader:
        most, settings = BASELINES[name][reader.task.num_spatial_dims]
        windows = min(most, reader.splits["train"] * max(1, reader.num_frames - recipe.data.context_frames))
    task = plain["data"]["tasks"][number] | {"batch_size": windows}
    plain["data"] |= {"tasks": [task], "tasks_per_step": None}
    plain["model"] = {"type": name, "conserve": True} | settings
    plain["engine"]["ema"] = {"decay": 0.998}
    return plain | {"networks": {}, "gate": [], "stages": [STAGE | {"budget_seconds": round(seconds, 3)}]}


def _placed(recipe: Recipe, label: str, out: Path) -> dict[str, Any]:
    """The recipe with a separate run in `out`, on one thread."""
    plain = plain_data(recipe)
    plain["run"] |= {"name": label, "dir": str(out / label)}
    plain["engine"]["threads"] = recipe.engine.threads or 1
    if recipe.checkpoint.mirror:
        plain["checkpoint"]["mirror"] += f"/{out.name}/{label}"
    return plain


def _cost(run: Run) -> dict[str, float]:
    """What the training of a completed run took, by its last checkpoint."""
    checkpoint = latest_verified(run.path)
    assert checkpoint is not None
    progress = read_progress(checkpoint)["progress"]
    return {"CPU seconds": progress["budget_used_seconds"] + progress["earlier_seconds"], "steps": progress["step"]}
