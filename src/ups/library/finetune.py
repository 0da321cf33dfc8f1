"""`ups.finetune_recipe`: the recipe that trains the model of a bundle further, on the user's data. No torch here."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ups.buckets.path import data_path
from ups.config.description import TaskDescription, description_next_to, read_description
from ups.config.recipe import ResolvedRecipe, plain_data, resolve_data
from ups.config.schema import Recipe, TaskConfig
from ups.data.open import open_paths
from ups.errors import BundleError, ConfigError, DataError, errors_as
from ups.formats.open_container import needs_description
from ups.formats.zarr_store import is_own_store
from ups.inference.hub import local_bundle
from ups.library.own_data import guessed_description, similar_task
from ups.library.recipe import override_text
from ups.record.files import load_object
from ups.record.run_dir import BUNDLE_FILE, is_bundle
from ups.run.directory import read_run_recipe
from ups.spec.task import TaskSpec

logger = logging.getLogger(__name__)

BUDGET_SECONDS = 300.0
# Of the peak rates that the model was trained with: on a task that it knows it is near a good place already.
RATE = 0.5


def finetune_recipe(
    bundle: str | os.PathLike[str],
    data: str | os.PathLike[str],
    *,
    task: str | None = None,
    budget_seconds: float = BUDGET_SECONDS,
    **overrides: Any,
) -> Recipe:
    """A recipe for `train` or `fit` that starts from the weights of a bundle (or of a run that has one).

    data: a store, or any file that `ups.open_data` or `ups init` reads. task: what to call the data; by default as the
    task of the bundle that has the same fields, axes and parameters, so that all of its weights are taken, and after
    the file if there is none: then it begins as a task that it resembles. overrides as in `load_recipe`.
    """
    changes = [override_text(name, value) for name, value in overrides.items()]
    return resolve_finetuning(bundle, data, task, budget_seconds, changes).recipe


def resolve_finetuning(
    bundle: str | os.PathLike[str],
    data: str | os.PathLike[str],
    task: str | None,
    budget_seconds: float,
    changes: list[str],
) -> ResolvedRecipe:
    """The same with its canonical text and hash; changes as `ups train --set` takes them."""
    source = local_bundle(bundle)
    if not is_bundle(source):
        raise BundleError(
            f"there is no bundle at '{bundle}'", hint="give a bundle, or a run that is completed, such as runs/NAME"
        )
    recipe = read_run_recipe(source).recipe
    trained: dict[str, Any] = plain_data(recipe)
    described = description_for(source, os.fspath(data)) or guessed_description(os.fspath(data))
    with contextlib.closing(open_paths(os.fspath(data), description=described)) as reader:
        new_task = reader.task
        name = task or _name_for(source, os.fspath(data), new_task)
        known = name in {one.name for one in _tasks_of(source)}
        like = None if known else similar_task(source, reader)
    if like is not None:
        logger.warning("it begins as '%s', whose step explains %.0f%% of a change in the data", like[0], 100 * like[1])
    start = {"start_from": str(source), "start_task": like and like[0]}
    plain = {} if described is None else {"description": described.model_dump(exclude_none=True, mode="json")}
    rate = RATE if known else 1.0
    own = new_task.steady and recipe.networks.steady is not None  # which is the model where steady tasks are alone
    section: Any = trained["data"]
    engine: Any = trained["engine"]
    document: dict[str, Any] = {
        **{key: trained[key] for key in ("version", "evaluate")},
        "model": trained["networks"]["steady"] if own else trained["model"],
        "run": {"name": f"{name}-finetuned"},
        "data": {
            "tasks": [{"name": name, "path": os.fspath(data), **plain}],
            **{key: section[key] for key in ("batch_size", "context_frames")},
        },
        # Devices, ranks and precision are of the machine that made the bundle.
        "engine": {"ema": engine["ema"]},
        "stages": [_stage(trained["stages"][_last_stage(recipe, new_task.steady)], start, budget_seconds, rate)],
    }
    return resolve_data(document, changes, name="the recipe of the bundle")


def _last_stage(recipe: Recipe, steady: bool) -> int:
    """The last one that trained what predicts such a task: later ones may have trained a corrector, or a network of
    steady tasks."""
    own = recipe.networks.steady is not None
    wanted = [
        number
        for number, stage in enumerate(recipe.stages)
        if not stage.networks
        and (stage.type == "steady" or not (steady and own))
        and (steady or stage.type != "steady")
    ]
    if not wanted:
        kind = "is steady" if steady else "changes in time"
        raise ConfigError(f"no stage of the bundle has trained what predicts a task that {kind}")
    return wanted[-1]


def _stage(last: Mapping[str, Any], start: Mapping[str, Any], budget_seconds: float, rate: float) -> dict[str, Any]:
    """That stage of what the bundle was trained with, from the weights of the bundle, at its rates times `rate`."""
    length = {"steps": None, "budget_seconds": budget_seconds, "budget_clock": "wall"}
    stage: dict[str, Any] = {**last, **start, "tasks": None, **length}
    stage.pop("cache", None)
    if stage.get("space") == "latent":
        stage["space"] = "physical"  # the fields count now, and the decoder goes along
    optim = stage["optim"]
    rates = {key: rate * optim[key] for key in ("learning_rate", "matrix_learning_rate") if key in optim}
    return {**stage, "optim": {**optim, **rates}}


def _name_for(source: Path, data: str, new_task: TaskSpec) -> str:
    """The name of the bundle's task that the data fits; that of the data where there is none, or more than one."""
    known = _tasks_of(source)
    fitting = [one for one in known if _interface(one) == _interface(new_task)]
    if len(fitting) > 1:
        fitting = [one for one in fitting if one.name == new_task.name]
    if not fitting:
        names = ", ".join(one.name for one in known)
        logger.warning(
            "no task of the bundle (%s) has the fields, axes and parameters of '%s': it is trained as a new task",
            names,
            data,
        )
        if new_task.name in {one.name for one in known}:
            raise ConfigError(
                f"'{data}' calls its task '{new_task.name}', which has other fields, axes or parameters in the bundle",
                hint="give it another name: task=NAME",
                command_hint="give it another name: --task NAME",
            )
        return new_task.name
    (task,) = fitting
    if not task.steady and abs(task.dt - new_task.dt) > 1e-3 * task.dt:
        logger.warning(
            "'%s' has a time step of %g, and the bundle was trained with %g: the step has to be learned anew; "
            "with data.tasks.0.time_stride frames can be left out",
            data,
            new_task.dt,
            task.dt,
        )
    return task.name


def _tasks_of(source: Path) -> list[TaskSpec]:
    with errors_as(BundleError, f"{source / BUNDLE_FILE} cannot be read", OSError, ValueError, KeyError, TypeError):
        return [TaskSpec.from_json(one) for one in load_object(source / BUNDLE_FILE, 2**26)["tasks"]]


def _interface(task: TaskSpec) -> Mapping[str, object]:
    """What decides which weights of a model are for a task."""
    return {
        "steady": task.steady,
        "fields": [(field.name, field.role, field.tensor_rank) for field in task.fields],
        "axes": [(axis.name, axis.boundary) for axis in task.axes],
        "parameters": [parameter.name for parameter in task.parameters],
    }


def own_data(bundle: Path, task: str) -> TaskConfig:
    """The data that a task was trained on. Raises BundleError where the bundle does not say so."""
    for known in _recipe_tasks(bundle):
        if known.name == task:
            return known
    raise BundleError(f"{bundle} does not say on which data '{task}' was trained", hint="say where to start: INPUT")


def _recipe_tasks(bundle: Path) -> list[TaskConfig]:
    """The tasks of a bundle's recipe; none where this version cannot read it, which a bundle does not need."""
    try:
        return read_run_recipe(bundle).recipe.data.tasks
    except ConfigError:
        return []


def description_for(bundle: Path, source: str, task: str | None = None) -> TaskDescription | None:
    """What the arrays of a file mean: by the task.yaml next to it, else by what the run's recipe says about its data.

    task: of the bundle; without it the first whose description the file fits. None for what needs no description.
    """
    if not data_path(source).exists() or is_own_store(source):
        return None
    beside = description_next_to([source])
    if beside is not None:
        return read_description(beside)
    tasks = _recipe_tasks(bundle)
    known = [one.description for one in tasks if task in (None, one.name) and one.description is not None]
    descriptions = [one if isinstance(one, TaskDescription) else read_description(one) for one in known]
    if task is not None or not needs_description(data_path(source)):
        return descriptions[0] if descriptions and task is not None else None
    for one in descriptions:
        try:
            open_paths(source, description=one).close()
        except DataError:
            continue
        return one
    return None
