"""ups-bench v1: which models are trained how long on what, and the tables that come out. No training here.

Every task has a budget of CPU-seconds of one thread; a model of one task gets it, a model of all tasks gets the sum.
All go through one engine. FNO and U-Net are there twice: as their authors train them, and (`fno+`, `unet+`) with every
feature of training that our own model has and conserved integrals kept, so that the table shows what the network is
worth and what the training.
`ups-alone` is our network trained on one task. Next to them stands a predictor that learned nothing (persistence; for a
steady task the training mean).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ups.solvers.tasks import TASKS

VERSION = "ups-bench v1"
CPU_SECONDS = 240.0
# Of the second test split, a store of its own: nothing was ever chosen by it.
SECOND_SEED = 3
REFERENCE = "reference"
# model -> what it is, for the table
MODELS = {
    REFERENCE: "learns nothing: persistence, and for a steady task the training mean",
    "fno": "Fourier neural operator of neuraloperator, one model per task",
    "unet": "U-Net of ConvNeXt blocks with kernel 7, one model per task",
    "fno+": "the FNO with the training of ups: loss, optimizer, noise, schedule, integrals kept",
    "unet+": "the U-Net with the same",
    "fno+law": "fno+ with the linear law of ups-alone in front, fitted first",
    "unet+law": "unet+ with the same",
    "dilated+": "residual network of dilated convolutions, trained as fno+ and unet+",
    "law": "the linear law of ups-alone, and nothing else",
    "ups-alone": "multiscale network of this project, one model per task",
    "ups": "multiscale network of this project, one model for all tasks with the sum of their budgets",
    "ups=windows": "ups with as many windows of each task as ups-alone has, instead of equal CPU time",
}
JOINT = frozenset({"ups", "ups=windows"})
# What is compared most is trained several times; tables show the median, and the spread after it.
SEEDS = dict.fromkeys(("fno+", "unet+", "ups-alone", "ups"), (0, 1, 2))
# Models that `more_models.py` brings, a plugin of these recipes.
PLUGIN = Path(__file__).with_name("more_models.py")
OF_PLUGIN = frozenset({"fno_law", "unet_law", "dilated"})
# (heading, key of a row's scores): the tables of the page, in this order
METRICS = (
    ("One step, relative to the trajectory", "one_step_trmse"),
    ("One step, nRMSE", "one_step_nrmse"),
    ("One step, VRMSE", "one_step_vrmse"),
    ("Whole rollout, relative to the trajectory", "trmse"),
    ("Whole rollout, nRMSE (mean)", "nrmse"),
    ("Whole rollout, nRMSE (median over trajectories)", "nrmse_median"),
    ("Whole rollout, VRMSE (mean)", "vrmse"),
    ("Whole rollout, VRMSE (median over trajectories)", "vrmse_median"),
)
KEPT = (*(key for _, key in METRICS), "num_blown_up", "num_samples")

_COMMON: dict[str, Any] = {
    "version": 1,
    "data": {"context_frames": 1},
    "engine": {"threads": 1},
    "checkpoint": {"interval_steps": 2000, "keep": 1},
}
# One step of training on the scaled difference, AdamW with warm-up and cosine. The baselines are trained as their
# authors do, on clean frames, which gives them their best single step.
_PLAIN: dict[str, Any] = {
    "type": "operator",
    "budget_clock": "cpu",
    "noise": 0.0,
    "optim": {"learning_rate": 2e-3},
}
# What our own model is trained with: AdamW's rate, and Muon's for matrices.
OWN_RATES = {"learning_rate": 2e-3, "matrix_learning_rate": 5e-3}
_OURS: dict[str, Any] = {
    "type": "operator",
    "budget_clock": "cpu",
    "loss": "nrmse",
    "balance": 0.5,
    "noise": 0.005,
    "optim": {
        "type": "muon",
        **OWN_RATES,
        "warmup_fraction": 0.02,
        "final_fraction": 0.001,
        "weight_decay": 0.0,
        "clip_norm": 0.0,
        "clip_ratio": 3.0,
    },
}
_OUR_ENGINE: dict[str, Any] = {"ema": {"decay": 0.998}}
# Part of the budget in which the linear part is fitted first.
_LINEAR_SHARE = 0.01
# Of a model that is nothing else.
_LAW_SHARE = 0.1
_FNO = {
    1: {"type": "fno", "width": 32, "modes": 64, "depth": 4},
    2: {"type": "fno", "width": 32, "modes": 16, "depth": 4},
}
_UNET = {
    1: {"type": "unet", "width": 32, "levels": 3, "blocks": 2},
    2: {"type": "unet", "width": 32, "levels": 3, "blocks": 1},
}
_DILATED = {dims: {"type": "dilated", "width": 32, "blocks": 2} for dims in (1, 2)}
_MULTISCALE = {1: {"type": "multiscale"}, 2: {"type": "multiscale"}}
_OF_ALL_TASKS = {2: {"type": "multiscale", "own_kernels": True}}


def _conserving(networks: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """With integrals kept exactly, as our own network keeps them."""
    return {dims: {**settings, "conserve": True} for dims, settings in networks.items()}


def _with_law(networks: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    return {dims: {**settings, "type": f"{settings['type']}_law"} for dims, settings in networks.items()}


@dataclass(frozen=True)
class Training:
    """How one model of the table is trained.

    stage: of the whole network; empty for a model that is only its linear law. networks, windows: by number of spatial
    dimensions; windows of a task in a step. A window in 2D costs as much as several in 1D: with 32 of them too few
    steps fit into the budget (diffreact2d: twice the error). steady_windows: of a steady task, where it is not that.
    task_windows: of tasks that need more than others do. rates: times those of `ups`. weight_decay: of matrices. What
    of this was chosen on validation, and what was not varied: docs/ablations.md. steps: of the last stage, instead of
    as many as the budget pays for.
    """

    networks: Mapping[int, Mapping[str, Any]]
    windows: Mapping[int, int]
    stage: Mapping[str, Any]
    engine: Mapping[str, Any]
    linear: bool = False
    steady_windows: int | None = None
    task_windows: Mapping[str, int] = field(default_factory=dict)
    rates: float = 1.0
    weight_decay: float = 0.0
    steps: int | None = None

    def windows_of(self, task: str) -> int:
        if task in self.task_windows:
            return self.task_windows[task]
        spec = TASKS[task].spec
        if spec.steady and self.steady_windows is not None:
            return self.steady_windows
        return self.windows[spec.num_spatial_dims]


_TRAININGS = {
    "fno": Training(_FNO, {1: 32, 2: 8}, _PLAIN, {}),
    "unet": Training(_UNET, {1: 32, 2: 8}, _PLAIN, {}),
    "fno+": Training(_conserving(_FNO), {1: 32, 2: 8}, _OURS, _OUR_ENGINE, rates=2.0),
    "unet+": Training(_conserving(_UNET), {1: 16, 2: 4}, _OURS, _OUR_ENGINE, rates=2.0),
    "fno+law": Training(_with_law(_conserving(_FNO)), {1: 32, 2: 8}, _OURS, _OUR_ENGINE, linear=True, rates=2.0),
    "unet+law": Training(_with_law(_conserving(_UNET)), {1: 16, 2: 4}, _OURS, _OUR_ENGINE, linear=True, rates=2.0),
    "dilated+": Training(_conserving(_DILATED), {1: 16, 2: 4}, _OURS, _OUR_ENGINE, rates=2.0),
    "law": Training(_MULTISCALE, {1: 16, 2: 4}, {}, _OUR_ENGINE, linear=True),
    "ups-alone": Training(_MULTISCALE, {1: 16, 2: 4}, _OURS, _OUR_ENGINE, linear=True, weight_decay=0.1),
    # Many small steps: chosen on validation over 20 and 5 windows (`ups-alone`: over 48 and 12, `unet+`: 32 and 8).
    "ups": Training(
        _OF_ALL_TASKS,
        {1: 10, 2: 3},
        _OURS,
        _OUR_ENGINE,
        linear=True,
        steady_windows=4,
        task_windows={"reacdiff1d": 15, "euler1d": 15, "diffreact2d": 4},
        weight_decay=0.075,
    ),
    "ups=windows": Training(
        _OF_ALL_TASKS, {1: 16, 2: 3}, _OURS, _OUR_ENGINE, linear=True, weight_decay=0.075, steps=2300
    ),
}


@dataclass(frozen=True)
class Entry:
    """One training of the benchmark: a model, the tasks it learns, the seed, and its recipe as plain data."""

    model: str
    tasks: tuple[str, ...]
    seed: int
    recipe: dict[str, Any]

    @property
    def name(self) -> str:
        """fno-ks1d, fno-plus-ks1d, fno-plus-law-ks1d, or ups-all-1 for another seed than 0."""
        model = self.model.replace("+law", "-plus-law").replace("+", "-plus").replace("=", "-equal-")
        name = f"{model}-{self.tasks[0] if self.model not in JOINT else 'all'}"
        return f"{name}-{self.seed}" if self.seed else name


def entries(models: Sequence[str], tasks: Sequence[str], data: str, cpu_seconds: float = CPU_SECONDS) -> list[Entry]:
    """Every training that the asked models and tasks need. data: directory of the stores, as the recipes name it."""
    found = []
    for model in models:
        if model == REFERENCE:
            continue
        groups = [tuple(tasks)] if model in JOINT else [(task,) for task in tasks if _learns(model, task)]
        found += [
            Entry(model, group, seed, _recipe(model, group, seed, data, cpu_seconds))
            for group in groups
            for seed in SEEDS.get(model, (0,))
        ]
    return found


def _learns(model: str, task: str) -> bool:
    """A linear law in time says nothing of a steady task."""
    return bool(_TRAININGS[model].stage) or not TASKS[task].spec.steady


def _recipe(model: str, tasks: tuple[str, ...], seed: int, data: str, cpu_seconds: float) -> dict[str, Any]:
    training = _TRAININGS[model]
    dims = {task: TASKS[task].spec.num_spatial_dims for task in tasks}
    recipe = copy.deepcopy(_COMMON)
    name = Entry(model, tasks, seed, {}).name
    recipe["run"] = {"name": name, "dir": f"runs/{name}", "seed": seed}
    recipe["data"]["tasks"] = [
        {"name": task, "path": f"{data}/{task}.zarr", "batch_size": training.windows_of(task)} for task in tasks
    ]
    recipe["data"]["tasks_per_step"] = len(tasks)
    recipe["model"] = dict(training.networks[max(dims.values())])
    recipe["engine"] |= copy.deepcopy(dict(training.engine))
    budget = cpu_seconds * len(tasks)
    stages: list[dict[str, Any]] = []
    # A steady task alone has nothing that is linear in time.
    if training.linear and not all(TASKS[task].spec.steady for task in tasks):
        share = _LINEAR_SHARE if training.stage else _LAW_SHARE
        stages.append({"type": "linear", "budget_clock": "cpu", "budget_seconds": share * budget})
    if not training.stage:
        return recipe | {"stages": stages}
    rest = budget - sum(stage["budget_seconds"] for stage in stages)
    stage = copy.deepcopy(dict(training.stage)) | {"budget_seconds": rest}
    for rate in OWN_RATES:
        if rate in stage["optim"]:
            stage["optim"][rate] *= training.rates
    if training.steps:
        del stage["budget_seconds"]
        stage["steps"] = training.steps
    if training.weight_decay:
        stage["optim"]["weight_decay"] = training.weight_decay
    recipe["stages"] = [*stages, stage]
    return recipe


def kept_scores(summary: Mapping[str, Any]) -> dict[str, float]:
    """What is kept of the scores of a model on a task, as `ups.evaluation.results` summarizes them."""
    return {key: float(summary[key]) for key in KEPT}


def row(model: str, task: str, summary: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """One line of the result."""
    return {"model": model, "task": task, "scores": kept_scores(summary), **more}
