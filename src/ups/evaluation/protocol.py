"""ups-bench v1: which models are trained how long on what, and the tables that come out. No training here.

Every task has a budget of CPU-seconds of one thread; a model of one task gets it, a model of all tasks gets the sum.
All go through one engine with the same loss and schedule: what differs is the network. Next to them stands a predictor
that learned nothing (persistence; for a steady task the mean over the train split).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ups.solvers.tasks import BENCH_TASKS, TASKS

VERSION = "ups-bench v1"
CPU_SECONDS = 240.0
REFERENCE = "reference"
# model -> what it is, for the table
MODELS = {
    REFERENCE: "learns nothing: persistence, and for a steady task the mean over the train split",
    "fno": "Fourier neural operator of neuraloperator, one model per task",
    "unet": "U-Net of ConvNeXt blocks with kernel 7, one model per task",
    "ups": "latent operator of this project, one model for all tasks with the sum of their budgets",
}
JOINT = frozenset({"ups"})
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

# One step of training on the scaled difference, AdamW with warm-up and cosine, one thread. A window in 2D costs as
# much as several in 1D: with 32 of them too few steps fit into the budget (diffreact2d: twice the error).
_WINDOWS = {1: 32, 2: 8}
_COMMON: dict[str, Any] = {
    "version": 1,
    "data": {"context_frames": 1},
    "engine": {"threads": 1},
    "checkpoint": {"interval_steps": 2000, "keep": 1},
}
_STAGE: dict[str, Any] = {"type": "operator", "budget_clock": "cpu", "optim": {"learning_rate": 2e-3}}
# The baselines are trained as their authors do, on clean frames, which gives them their best single step.
_STAGE_OF: dict[str, dict[str, Any]] = {"fno": {"noise": 0.0}, "unet": {"noise": 0.0}, "ups": {}}
_NETWORKS: dict[str, dict[int, dict[str, Any]]] = {
    # space dimensions -> network
    "fno": {
        1: {"type": "fno", "width": 32, "modes": 64, "depth": 4},
        2: {"type": "fno", "width": 32, "modes": 16, "depth": 4},
    },
    "unet": {
        1: {"type": "unet", "width": 32, "levels": 3, "blocks": 2},
        2: {"type": "unet", "width": 32, "levels": 3, "blocks": 1},
    },
    "ups": {
        0: {
            "type": "latent_operator",
            "width": 96,
            "depth": 4,
            "num_heads": 4,
            "patch_size": 4,
            "attention": "global",
        }
    },
}


@dataclass(frozen=True)
class Entry:
    """One training of the benchmark: a model, the tasks it learns, and its recipe as plain data."""

    model: str
    tasks: tuple[str, ...]
    recipe: dict[str, Any]

    @property
    def name(self) -> str:
        """fno-ks1d, or ups-all."""
        return f"{self.model}-{self.tasks[0] if self.model not in JOINT else 'all'}"


def entries(models: Sequence[str], tasks: Sequence[str], data: str, cpu_seconds: float = CPU_SECONDS) -> list[Entry]:
    """Every training that the asked models and tasks need. data: directory of the stores, as the recipes name it."""
    found = []
    for model in models:
        if model == REFERENCE:
            continue
        groups = [tuple(tasks)] if model in JOINT else [(task,) for task in tasks]
        found += [Entry(model, group, _recipe(model, group, data, cpu_seconds)) for group in groups]
    return found


def _recipe(model: str, tasks: tuple[str, ...], data: str, cpu_seconds: float) -> dict[str, Any]:
    networks = _NETWORKS[model]
    recipe = copy.deepcopy(_COMMON)
    name = Entry(model, tasks, {}).name
    recipe["run"] = {"name": name, "dir": f"runs/{name}", "seed": 0}
    recipe["data"]["tasks"] = [{"name": task, "path": f"{data}/{task}.zarr"} for task in tasks]
    dims = TASKS[tasks[0]].spec.num_spatial_dims
    recipe["data"]["block_size"] = _WINDOWS[dims]
    if model in JOINT:
        recipe["data"] |= {"block_size": 16, "tasks_per_step": min(3, len(tasks))}
    recipe["model"] = copy.deepcopy(networks.get(dims) or networks[0])
    recipe["stages"] = [{**copy.deepcopy(_STAGE), **_STAGE_OF[model], "budget_seconds": cpu_seconds * len(tasks)}]
    return recipe


def row(model: str, task: str, summary: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """One line of the result: scores of a model on a task, as `ups.evaluation.results` summarizes them."""
    return {"model": model, "task": task, "scores": {key: float(summary[key]) for key in KEPT}, **more}


def markdown(document: Mapping[str, Any]) -> str:
    """The result as a page of tables. document: rows, command, machine, data, failures (see `ups bench`)."""
    rows: Sequence[Mapping[str, Any]] = document["rows"]
    tasks = [task for task in BENCH_TASKS if any(r["task"] == task for r in rows)]
    models = [model for model in MODELS if any(r["model"] == model for r in rows)]
    by_place = {(r["task"], r["model"]): r for r in rows}
    machine = ", ".join(f"{key} {value}" for key, value in document["machine"].items())
    parts = [
        f"{document['protocol']}: {document['cpu_seconds_per_task']:g} CPU-seconds of one thread for each task.",
        f"Made by `{document['command']}` on {machine}.",
        "",
        *_table(["model", "what it is"], ([model, MODELS[model]] for model in models)),
    ]
    for heading, key in METRICS:
        parts += ["", f"### {heading}", ""]
        parts += _table(["task", *models], (_cells(task, models, key, by_place) for task in tasks))
    parts += ["", "### What was trained", ""]
    trained = [r for r in rows if r["model"] != REFERENCE]
    parts += _table(
        ["model", "task", "parameters", "steps", "CPU-seconds", "blown up"],
        (
            [
                r["model"],
                r["task"],
                f"{r['parameters']:,}",
                f"{r['steps']:,}",
                f"{r['cpu_seconds']:.0f}",
                f"{r['scores']['num_blown_up']:.0f} of {r['scores']['num_samples']:.0f}",
            ]
            for r in sorted(trained, key=lambda r: (models.index(r["model"]), tasks.index(r["task"])))
        ),
    )
    parts += ["", "### Data", ""]
    parts += _table(["task", "identity"], ([task, f"`{document['data'][task][:16]}`"] for task in tasks))
    parts += [f"\nFailed: {name}, see its log." for name in document["failures"]]
    return "\n".join(parts) + "\n"


def _cells(task: str, models: Sequence[str], key: str, by_place: Mapping[tuple[str, str], Mapping[str, Any]]) -> Any:
    """A line of a table: the best value in bold."""
    values = {m: by_place[task, m]["scores"][key] for m in models if (task, m) in by_place}
    best = min(values, key=lambda m: values[m])
    texts = (number(values[m]) if m in values else "-" for m in models)
    return [task, *(f"**{text}**" if m == best else text for m, text in zip(models, texts, strict=True))]


def number(value: float) -> str:
    """Three significant digits; a blow-up is written as such."""
    if not math.isfinite(value):
        return "blew up"
    return f"{value:.3g}" if 1e-4 <= abs(value) < 1e4 or not value else f"{value:.1e}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *(f"| {' | '.join(r)} |" for r in rows)]
