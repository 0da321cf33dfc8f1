"""A trained model, from a run directory or a bundle, and what each stage of its training brought.

A stage is judged by what it trains: errors of a step from true frames, or the CRPS of members next to the same score
without any (the absolute error), or that of a student next to its teacher, which needs more evaluations. A stage that
trains the operator itself as an ensemble is also compared with the operator that it began with.
"""

from __future__ import annotations

import json
import logging
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ups.buckets.block_cache import use_cache
from ups.buckets.path import data_path
from ups.config.schema import EngineConfig, Recipe
from ups.data.open import open_task
from ups.distributed.environment import RankEnvironment
from ups.distributed.runtime import Runtime
from ups.distributed.strategies import weight_dtype
from ups.errors import CheckpointError, ConfigError, DataError
from ups.formats.base import Reader
from ups.formats.held_out import HeldOutElsewhere
from ups.formats.zarr_store import is_own_store, read_store_attributes
from ups.inference.bundle import BundleInfo, load_bundle
from ups.inference.stored_scores import TOO_SHORT
from ups.models.build import build_model
from ups.models.stepper import Stepper
from ups.record.checkpoints import latest_verified, read_progress
from ups.record.files import read_object
from ups.record.manifest import verify
from ups.record.run_dir import RunDir, find_model, is_bundle
from ups.record.text import printable
from ups.run.directory import check_recipe, check_statistics, read_run_recipe, read_statistics
from ups.run.progress_line import read_rows
from ups.supervise.run_file import run_identity
from ups.training.checkpoint import read_weights
from ups.training.progress import Progress

# Part of a budget of wall time in which rank 0 computes, if nothing holds it up: 0.8 to 1.
LEAST_COMPUTED = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """A model with the data it is scored on.

    identity: label -> value, for reports and cards; step: optimizer steps of the run, 0 if not known. stages: as
    a bundle has them (`ups.inference.bundle`). elsewhere: the data is not that of the training. made_with: of a run,
    what decides the bits of its training besides recipe and data. training_seconds: of all ranks of a run, if they
    were counted.
    """

    name: str
    stepper: Stepper
    readers: list[Reader]
    recipe: Recipe
    config_text: str
    identity: dict[str, str]
    step: int
    stages: Sequence[Mapping[str, Any]] = ()
    elsewhere: bool = False
    made_with: Mapping[str, str] = field(default_factory=dict)
    training_seconds: float | None = None


def load_trained(
    name: str, checkpoint: Path | None = None, data: Mapping[str, str] | None = None, *, recipe_data: bool = False
) -> Trained:
    """The model of a run or of a bundle, with the data that it is scored on: that of its recipe.

    checkpoint: of the run; default its newest verified one. data: task -> a path instead, of which the held-out
    trajectories are scored; other tasks are left out. A bundle may come from anybody: what its recipe names is opened
    with `recipe_data` only, and logged before.
    """
    path = find_model(name)
    if is_bundle(path) and not recipe_data:
        return _from_bundle(path, data or {})
    trained = _from_bundle(path, None) if is_bundle(path) else _from_run(path, checkpoint)
    return _on_other_data(trained, data, name) if data else trained


def too_short(recipe: Recipe, progress: Progress) -> str:
    """In what way a model was trained far less than its recipe means; '' if it was not."""
    lengths = [stage.steps for stage in recipe.stages]
    stage = progress.stage_index + 1
    if stage < len(lengths) or not progress.stage_finished:
        whole = "" if None in lengths else f" of {sum(n or 0 for n in lengths)}"
        return f"the training has not ended: step {progress.step}{whole}, in stage {stage} of {len(lengths)}"
    seconds = progress.earlier_seconds + progress.budget_used_seconds
    computed = seconds - progress.idle_seconds
    if computed >= LEAST_COMPUTED * seconds:
        return ""
    return (
        f"far fewer steps than the recipe means: {progress.step}; rank 0 computed in {computed:.0f} s of a time budget "
        f"of {seconds:.0f} s (busy machine or slow data); an idle machine does about "
        f"{seconds / max(computed, 1e-9):.2g} times as many; give `steps` instead of `budget_seconds`"
    )


def check_tasks(known: Sequence[str], tasks: Iterable[str], name: str) -> None:
    """Raises ConfigError for a task that is not among those of the model, which the user calls `name`."""
    wrong = [task for task in tasks if task not in known]
    if wrong:
        raise ConfigError(f"'{name}' has no task '{wrong[0]}'", hint=f"its tasks are {', '.join(known)}")


def _on_other_data(trained: Trained, data: Mapping[str, str], name: str) -> Trained:
    """The same model with held-out trajectories from elsewhere, next to the train split that it knows."""
    known = {reader.task.name: reader for reader in trained.readers}
    check_tasks(list(known), data, name)
    settings = {task.name: task for task in trained.recipe.data.tasks}
    readers: list[Reader] = [
        HeldOutElsewhere(known[task], open_task(settings[task].model_copy(update={"path": path})))
        for task, path in data.items()
    ]
    identity = dict(trained.identity) | {f"data {r.task.name}": r.identity() for r in readers}
    return replace(trained, readers=readers, identity=identity, elsewhere=True)


def single_process_runtime() -> AbstractContextManager[Runtime]:
    """A runtime of one process on the CPU, whatever launch variables are set around it."""
    return Runtime.start(EngineConfig(device="cpu", strategy="single"), RankEnvironment())


def _from_bundle(path: Path, data: Mapping[str, str] | None) -> Trained:
    """The model of a bundle with data that the user names, train split included; with None that of its recipe.

    Never by the cache of its recipe.
    """
    bundle, resolved = load_bundle(path, stated=False), read_run_recipe(path)
    info, recipe = bundle.info, resolved.recipe
    named = printable("; ".join(f"{task.name}: {task.path}" for task in recipe.data.tasks))
    if data is None:
        logger.warning("the recipe of '%s' names data, which is opened: %s", path, named)
    elif not data:
        raise ConfigError(
            f"'{path}' is a bundle, and no data is named to score it on",
            hint=f"data={{'TASK': PATH}}; or recipe_data=True to open what its recipe names ({named})",
            command_hint=f"--data TASK=PATH; or --recipe-data to open what its recipe names ({named})",
        )
    readers = _recipe_data(path, info, recipe) if data is None else _named_data(path, info, recipe, data)
    data_identities = {f"data {reader.task.name}": reader.identity() for reader in readers}
    identity = {"bundle": bundle.hash, "recipe": resolved.hash, **info.provenance, **data_identities}
    model = (recipe.run.name, bundle.stepper, readers, recipe, resolved.text, identity)
    elsewhere = not data_identities.items() <= info.provenance.items()
    return Trained(*model, int(info.provenance.get("step", "0")), info.stages, elsewhere)


def _named_data(path: Path, info: BundleInfo, recipe: Recipe, data: Mapping[str, str]) -> list[Reader]:
    settings = {task.name: task for task in recipe.data.tasks}
    tasks = {task.name: task for task in info.tasks if task.name in settings}
    check_tasks(list(tasks), data, str(path))
    readers: list[Reader] = []
    for name, location in data.items():
        reader = open_task(settings[name].model_copy(update={"path": location, "source": None}))
        readers.append(HeldOutElsewhere(reader, reader, tasks[name], info.coordinates[name]))
    return readers


def _recipe_data(path: Path, info: BundleInfo, recipe: Recipe) -> list[Reader]:
    try:
        readers: list[Reader] = [open_task(task) for task in recipe.data.tasks]
    except DataError as error:
        raise DataError(
            f"{error.message}: the bundle is scored on the data that it was trained with, and does not carry it",
            hint=f"bring that data to this place; or simulate from data of your own with: ups rollout {path} INPUT",
        ) from error
    for reader in readers:
        name = reader.task.name
        if name in info.coordinates and reader.space != info.space(name):
            raise DataError(
                f"task '{name}' was trained on a grid of {info.space(name)}, and its data have {reader.space}",
                hint=f"score on data on the same grid; `ups rollout {path} INPUT` resamples where it can",
            )
    return readers


def _from_run(path: Path, checkpoint: Path | None = None) -> Trained:
    resolved = read_run_recipe(path)
    recipe = resolved.recipe
    check_recipe(path, recipe)
    known = run_identity(path)
    chosen = checkpoint or latest_verified(path, belongs=known.check if known is not None else None)
    if checkpoint is not None:
        verify(checkpoint)
        if known is not None:
            known.check(checkpoint, int(Progress.from_json(read_progress(checkpoint)["progress"]).step))
    if chosen is None:
        raise CheckpointError(
            f"run '{path}' has no checkpoint yet", hint=f"see what it is doing with: ups status {path}"
        )
    use_cache(recipe.data.cache_dir, recipe.data.cache_bytes)
    readers = [open_task(task) for task in recipe.data.tasks]
    if known is not None:
        check_statistics(path, known)
    statistics = read_statistics(path, readers)
    tasks = [reader.task for reader in readers]
    stepper = build_model(recipe.network_configs, tasks, statistics, recipe.data.context_frames, seed=recipe.run.seed)
    weights = {name.removeprefix("stepper."): tensor for name, tensor in read_weights(chosen).items()}
    dtype = weight_dtype(recipe.engine.precision)  # of a training; what is loaded here is in float32
    expected = {name: (tensor.shape, dtype) for name, tensor in stepper.named_parameters()}
    stored = {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()}
    wrong = [name for name in sorted(stored.keys() | expected.keys()) if stored.get(name) != expected.get(name)]
    if wrong:
        raise CheckpointError(f"{chosen} does not hold the model of the run's config.yaml: '{wrong[0]}' differs")
    stepper.load_state_dict(weights, strict=False)  # the statistics came with the run, not with the checkpoint
    stepper.requires_grad_(False)
    progress = Progress.from_json(read_progress(chosen)["progress"])
    name, step = recipe.run.name, progress.step
    identity = {"run": name, "recipe": resolved.hash, "checkpoint": chosen.name, "step": str(step)}
    identity |= {TOO_SHORT: text} if (text := too_short(recipe, progress)) else {}
    identity |= {f"data {reader.task.name}": reader.identity() for reader in readers}
    starts = {} if known is None else {n: text for n, text in known.data.items() if n.endswith(".start_from")}
    facts = made_with(path, recipe) | {f"weights {n}": sha256 for n, sha256 in starts.items()}
    model = (name, stepper.eval(), readers, recipe, resolved.text, identity, step)
    seconds = progress.earlier_seconds + progress.budget_used_seconds - progress.idle_seconds
    seconds *= int(facts.get("ranks", 1))
    return Trained(*model, stages=stage_gains(path, recipe), made_with=facts, training_seconds=seconds or None)


def made_with(run_dir: Path, recipe: Recipe) -> dict[str, str]:
    """What decides the bits of a training besides recipe and data. `solver TASK: ...`: what its store was asked for."""
    described = read_object(RunDir(run_dir).environment) or {}
    software, variables = (described.get(name) or {} for name in ("software", "variables"))
    versions = {"ups": software.get("ups"), **(software.get("libraries") or {})}
    ranks = described.get("ranks", 1)
    threads = recipe.engine.threads or (1 if ranks != 1 else variables.get("OMP_NUM_THREADS"))
    facts = {f"version {name}": versions.get(name) for name in ("ups", "python", "torch", "numpy")}
    facts |= {"ranks": ranks, "threads": threads or described.get("usable_cpus")}
    # Of this process: a run is scored on the kind of host that trained it.
    gpu = f" {torch.cuda.get_device_name()}" if torch.cuda.is_available() and recipe.engine.device != "cpu" else ""
    facts["processor"] = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}{gpu}"
    for task in recipe.data.tasks:
        (path, *more) = task.paths
        stored = {} if more or not is_own_store(path) else read_store_attributes(data_path(path)).get("generator")
        if isinstance(stored, dict) and isinstance(stored.get("request"), dict):
            libraries = {"generator": stored.get("version"), **(stored.get("libraries") or {})}
            facts = {f"version {name}": value for name, value in libraries.items()} | facts
            facts |= {f"solver {task.name}: {name}": json.dumps(value) for name, value in stored["request"].items()}
    return {name: str(value) for name, value in facts.items() if value is not None}


def stage_gains(run_dir: Path, recipe: Recipe) -> list[dict[str, Any]]:
    """Rows of stage, task, figure, against (what `before` is), before and after; none of a stage without validation."""
    ends = _last_validations(run_dir)
    rows = []
    for number, stage in enumerate(recipe.stages):
        row = ends.get(number)
        if row is None:
            continue
        label = stage.type if not getattr(stage, "kind", "") else f"{stage.type} ({stage.kind})"  # type: ignore[attr-defined]
        for task in recipe.data.tasks:
            if not stage.trains(task.name):
                continue
            # Every validation scores all tasks, also those that no stage has trained yet.
            trained = [n for n in range(number) if recipe.stages[n].trains(task.name)]
            earlier = [ends[n] for n in trained if n in ends]
            rows += [
                {"stage": label, "task": task.name} | one
                for one in _figures(stage.needs_noise, task.name, row, earlier)
            ]
    return [one for one in rows if math.isfinite(one["before"]) and math.isfinite(one["after"])]


def _figures(
    trains_operator: bool, task: str, row: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """trains_operator: as an ensemble, of which the score without members is that of the central one."""

    def value(name: str, of: Mapping[str, Any] = row) -> float | None:
        return of.get(f"valid/{task}/{name}")

    crps, single, after = value("crps"), value("absolute_error"), value("one_step")
    rows: list[dict[str, Any]] = []
    if crps is not None and single is not None:
        against = "its central member" if trains_operator else "operator alone"
        bars = [(against, single), ("its teacher", value("crps_teacher"))]
        rows = [{"figure": "CRPS", "against": w, "before": bar, "after": crps} for w, bar in bars if bar is not None]
        if not trains_operator:
            return rows
    references = [("the stage before", value("one_step", earlier[-1]) if earlier else None)]
    if not rows:
        references += [("persistence", value("persistence")), ("training mean", value("training_mean"))]
    for against, before in references:
        if before is not None and after is not None:
            return [*rows, {"figure": "one step", "against": against, "before": before, "after": after}]
    return rows


def _last_validations(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Stage -> the last row of its validations."""
    return {
        row["stage"]: row
        for row in read_rows(run_dir)
        if isinstance(row.get("stage"), int) and any(name.startswith("valid/") for name in row)
    }
