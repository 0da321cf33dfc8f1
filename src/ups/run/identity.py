"""The identity of a run from what it is started with: recipe, statistics, data. What it is: `ups.record.identity`.

Checked when a run is started or continued, before every restart, and before success is declared. No torch.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ups.config.identity import recipe_identity
from ups.config.recipe import resolve
from ups.config.schema import Recipe, TaskConfig
from ups.errors import DataChangedError, ForeignCheckpointError, RecipeChangedError, StatisticsChangedError
from ups.record.checkpoints import list_checkpoints
from ups.record.identity import RunIdentity, file_sha256
from ups.record.run_dir import RunDir
from ups.run.follow_metrics import read_rows
from ups.run.stage_starts import check_caches, check_starts
from ups.supervise.run_file import is_unreadable, read_run, run_identity, was_started

_NEW_RUN = "or start a new run: --set run.dir=PATH"


def never_stepped(run_dir: Path) -> bool:
    """Whether nothing was ever learned here: no checkpoint, no row of metrics, no attempt that ended its first step."""
    if list_checkpoints(run_dir) or read_rows(run_dir):
        return False
    if not was_started(run_dir):
        return not is_unreadable(run_dir)
    document = read_run(run_dir)
    if document["state"] == "running" and document.get("host", os.uname().nodename) != os.uname().nodename:
        return False  # perhaps alive there; its lock may not be seen here
    # A rank that works on step 1 says 1. An attempt without a last step has lost its supervisor: nobody knows.
    return all(attempt.get("last_step", 2) <= 1 for attempt in document["attempts"])


def known_identity(run_dir: Path) -> RunIdentity | None:
    """What a run that is continued is held to; None where nothing was learned yet, and all may be corrected."""
    return None if never_stepped(run_dir) else run_identity(run_dir)


def identify(run_dir: Path, recipe: Recipe) -> RunIdentity:
    """The identity of the run that is about to start or to continue, after its directory was prepared.

    Raises the error that names what has changed since the run was started.
    """
    earlier = known_identity(run_dir)
    if earlier is None and list_checkpoints(run_dir) and not was_started(run_dir):
        raise ForeignCheckpointError(
            f"{run_dir} has checkpoints, but no run.json that says whose they are",
            hint=f"bring run.json of the run back, {_NEW_RUN}",
        )
    if earlier is None:
        identity = replace(RunIdentity.new(), unmarked=was_started(run_dir) and not never_stepped(run_dir))
    else:
        identity = earlier
        check_statistics(run_dir, identity)
    found = recipe_identity(recipe)
    data = dict(identity.data)
    times = dict(identity.data_changed_ns)
    for task in recipe.data.tasks:
        data[task.name], times[task.name] = check_data(task, identity)
    data |= check_starts(run_dir, recipe, data) | check_caches(recipe, identity.data)
    return replace(
        identity,
        recipes=(*(known for known in identity.recipes if known != found), found),
        config=file_sha256(RunDir(run_dir).config),
        statistics=file_sha256(RunDir(run_dir).statistics),
        data=data,
        data_changed_ns=times,
    )


def check_inputs(run_dir: Path, recipe: Recipe, identity: RunIdentity) -> None:
    """Raise if recipe, statistics or data in their places are not those that `identity` was made from.

    recipe: what the run was started with. A config.yaml whose bytes are those of the start needs no second reading.
    """
    if not identity.config or file_sha256(RunDir(run_dir).config) != identity.config:
        recipe = resolve(RunDir(run_dir).config).recipe
        _check_recipe(run_dir, recipe, identity)
    check_statistics(run_dir, identity)
    check_starts(run_dir, recipe, identity.data)
    check_caches(recipe, identity.data)
    for task in recipe.data.tasks:
        check_data(task, identity)


def check_recipe(run_dir: Path, recipe: Recipe) -> None:
    """Raise RecipeChangedError if `recipe`, read from the run's config.yaml, is not what the run was started with."""
    identity = known_identity(run_dir)
    if identity is not None:
        _check_recipe(run_dir, recipe, identity)


def _check_recipe(run_dir: Path, recipe: Recipe, identity: RunIdentity) -> None:
    # Another version of ups may give the same file another identity: then its bytes must be the same.
    if recipe_identity(recipe) in identity.recipes or file_sha256(RunDir(run_dir).config) == identity.config:
        return
    raise RecipeChangedError(
        f"{RunDir(run_dir).config} was edited: it would learn something else than the run has learned so far",
        hint=f"bring the old file back, {_NEW_RUN}",
    )


def check_statistics(run_dir: Path, identity: RunIdentity) -> None:
    """Raise StatisticsChangedError if the run's statistics are not those that it was started with."""
    if identity.statistics and file_sha256(RunDir(run_dir).statistics) != identity.statistics:
        raise StatisticsChangedError(
            f"{RunDir(run_dir).statistics} is not what the run was started with",
            hint=f"bring the old file back, {_NEW_RUN}",
        )


def check_data(task: TaskConfig, identity: RunIdentity) -> tuple[str, int]:
    """Sample and latest modification time of a task's data. Raises DataChangedError if it is not the run's data."""
    from ups.data.content import compare_changed, content_sample

    paths = task.paths
    sample, changed_ns = content_sample(paths)
    known = identity.data.get(task.name)
    if known is not None and known != sample:
        raise DataChangedError(
            f"the data of task '{task.name}' ({paths[0]}) is not the data that the run was started with",
            hint=f"bring the old data back, {_NEW_RUN}",
        )
    if known is not None and changed_ns != identity.data_changed_ns.get(task.name):
        compare_changed(paths, identity.data_changed_ns.get(task.name, 0))
    return sample, changed_ns
