"""The run directory before ranks start: resolved recipe, environment, statistics of the data. No torch.

`config.yaml` is the truth of a run. A run that exists is continued only by a recipe that means the same: a change of
what is learned would mix two experiments in one directory, silently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ups.config.identity import first_difference
from ups.config.recipe import ResolvedRecipe, resolve
from ups.config.schema import DataConfig, Recipe
from ups.errors import ConfigError, DataChangedError, DataError, StatisticsChangedError
from ups.record.manifest import write_file_atomically
from ups.record.places import CONFIG_NAME, RUNS
from ups.record.untrusted_files import load_object
from ups.run.environment_record import environment_record
from ups.run.identity import STATISTICS_NAME, check_recipe
from ups.spec.statistics import Statistics
from ups.supervise.run_file import run_identity

if TYPE_CHECKING:
    from ups.formats.base import Reader

ENVIRONMENT_NAME = "env.json"


def run_dir_of(resolved: ResolvedRecipe, argument: str, overrides: Sequence[str] = ()) -> Path:
    """Where the run lives: `run.dir` if it was given on the command line, the run directory that was named, the
    `run.dir` of the recipe, or runs/<name>.
    """
    moved = any(override.partition("=")[0].strip() == "run.dir" for override in overrides)
    if argument and Path(argument).is_dir() and not moved:
        return Path(argument).resolve()
    run = resolved.recipe.run
    return Path(run.dir or Path(RUNS) / run.name).resolve()


def read_run_recipe(path: Path) -> ResolvedRecipe:
    """The resolved recipe that a run or a bundle holds."""
    return resolve(path / CONFIG_NAME)


def last_step_of(recipe: Recipe) -> int | None:
    """The step at which a run of this recipe is done; None where time decides."""
    lengths = [stage.steps for stage in recipe.stages]
    return None if None in lengths else sum(length or 0 for length in lengths)


def check_ranks(data: DataConfig, ranks: int) -> None:
    """Raises ConfigError, before anything starts, if a block cannot be cut evenly over the ranks."""
    if ranks < 1:
        raise ConfigError(f"{ranks} ranks cannot train", hint="use 1 or more")
    for number, (task, size) in enumerate(zip(data.tasks, data.block_sizes, strict=True)):
        if size % ranks:
            setting = "data.block_size" if task.block_size is None else f"data.tasks.{number}.block_size"
            raise ConfigError(
                f"{setting} ({size}) cannot be cut evenly over {ranks} ranks",
                hint=f"use --set {setting}={-(-size // ranks) * ranks}, or a number of ranks that divides it",
            )


def prepare(run_dir: Path, resolved: ResolvedRecipe, ranks: int) -> None:
    """Make the run directory, or check that it is the same run. Raises ConfigError if it is another one.

    For who holds the run (`ups.supervise.run_lock`): it writes what a living run reads.
    """
    config = run_dir / CONFIG_NAME
    run_dir.mkdir(parents=True, exist_ok=True)
    if config.exists():
        stored = read_run_recipe(run_dir).recipe
        check_recipe(run_dir, stored)
        difference = first_difference(stored, resolved.recipe)
        if difference:
            raise ConfigError(
                f"{run_dir} holds a run of another recipe: {difference}",
                hint="give this one its own place: --set run.name=NAME or --set run.dir=PATH",
            )
    elif (run_dir / "checkpoints").exists():
        raise ConfigError(
            f"{run_dir} has checkpoints but no {CONFIG_NAME}", hint="choose another place: --set run.dir=PATH"
        )
    write_file_atomically(config, resolved.text.encode())
    description = {
        "config_sha256": resolved.hash,
        "recipe_files": list(resolved.files),
        "ranks": ranks,
        **environment_record(),
    }
    write_file_atomically(run_dir / ENVIRONMENT_NAME, (json.dumps(description, indent=1) + "\n").encode())


def ensure_run_statistics(run_dir: Path, recipe: Recipe, readers: Sequence[Reader]) -> None:
    """Compute (or find) the statistics of every task, once and before any rank starts, and keep them in the run."""
    from ups.data.normalize import ensure_statistics

    path = run_dir / STATISTICS_NAME
    if path.exists():
        read_statistics(run_dir, readers)
        return
    found = {
        reader.task.name: ensure_statistics(reader, task.path).to_json()
        for reader, task in zip(readers, recipe.data.tasks, strict=True)
    }
    content = (json.dumps(found, indent=1) + "\n").encode()
    known = run_identity(run_dir)
    if known is not None and known.statistics and hashlib.sha256(content).hexdigest() != known.statistics:
        # Before it is written: a refused start leaves the run directory as it was.
        raise StatisticsChangedError(
            f"{path} is missing, and what is measured now is not what the run was started with",
            hint="bring the old file back, or start a new run: --set run.dir=PATH",
        )
    write_file_atomically(path, content)


def read_statistics(run_dir: Path, readers: Sequence[Reader]) -> dict[str, Statistics]:
    """The statistics of the run by task. Raises DataError if the data is not what it was when the run started."""
    path = run_dir / STATISTICS_NAME
    try:
        document = load_object(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", hint="start the run with `ups train`") from error
    found: dict[str, Statistics] = {}
    for reader in readers:
        name = reader.task.name
        if name not in document:
            raise DataError(f"{path} has no statistics of task '{name}'", hint="start a new run: --set run.dir=PATH")
        found[name] = Statistics.from_json(document[name])
        if found[name].data_identity != reader.identity():
            raise DataChangedError(
                f"the data of task '{name}' has changed since the run in {run_dir} started",
                hint="bring the old data back, or start a new run: --set run.dir=PATH",
            )
    return found
