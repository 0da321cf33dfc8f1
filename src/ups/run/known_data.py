"""What a run or bundle knows about data: where its own is, and what the arrays of files of that kind mean. No torch."""

from __future__ import annotations

from pathlib import Path

from ups.buckets.path import data_path
from ups.config.description import TaskDescription, description_next_to, read_description
from ups.config.schema import TaskConfig
from ups.errors import BundleError, ConfigError, DataError
from ups.formats.open_container import needs_description
from ups.formats.zarr_store import is_own_store
from ups.run.directory import read_run_recipe


def own_data(bundle: Path, task: str) -> TaskConfig:
    """The data that a task was trained on. Raises BundleError where the bundle does not say so."""
    try:
        tasks = read_run_recipe(bundle).recipe.data.tasks
    except ConfigError:  # a bundle needs no recipe that this version reads
        tasks = []
    for known in tasks:
        if known.name == task:
            return known
    raise BundleError(f"{bundle} does not say on which data '{task}' was trained", hint="say where to start: INPUT")


def description_for(bundle: Path, source: str, task: str | None = None) -> TaskDescription | None:
    """What the arrays of a file mean: by the task.yaml next to it, else by what the run was told about its own data.

    task: of the bundle; without it the first whose description the file fits. None for what needs no description.
    """
    from ups.data.open import open_paths

    if not data_path(source).exists() or is_own_store(source):
        return None
    beside = description_next_to([source])
    if beside is not None:
        return read_description(beside)
    try:
        tasks = read_run_recipe(bundle).recipe.data.tasks
    except ConfigError:
        return None
    known = [one.description for one in tasks if task in (None, one.name) and one.description is not None]
    found = [one if isinstance(one, TaskDescription) else read_description(one) for one in known]
    if task is not None or not needs_description(data_path(source)):
        return found[0] if found and task is not None else None
    for one in found:
        try:
            open_paths(source, description=one).close()
        except DataError:
            continue
        return one
    return None
