"""The run directory before ranks start: resolved recipe, environment, statistics of the data. No torch.

`config.yaml` is the truth of a run. A run that exists is continued only by a recipe that means the same: a change of
what is learned would mix two experiments in one directory, silently.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ups.config.identity import first_difference, other_length, recipe_identity
from ups.config.recipe import ResolvedRecipe, resolve
from ups.config.schema import Recipe
from ups.errors import ConfigError, DataChangedError, DataError, StatisticsChangedError
from ups.record.files import load_object
from ups.record.manifest import write_file_atomically
from ups.record.run_dir import CONFIG_NAME, RUNS, RunDir
from ups.record.text import path_text
from ups.run.environment_record import environment_record
from ups.run.identity import check_recipe, known_identity, never_stepped
from ups.run.removal import is_ours, remove_records
from ups.spec.statistics import Statistics
from ups.supervise.run_file import TRAINED, note_extension, read_run, was_started

if TYPE_CHECKING:
    from ups.formats.base import Reader

logger = logging.getLogger(__name__)


def run_dir_of(resolved: ResolvedRecipe, argument: str, overrides: Sequence[str] = ()) -> Path:
    """Where the run lives: `run.dir` if it was given on the command line, the run directory that was named, the
    `run.dir` of the recipe, or runs/<name>.
    """
    moved = any(override.partition("=")[0].strip() == "run.dir" for override in overrides)
    if argument and (Path(argument) / CONFIG_NAME).is_file() and not moved:
        return Path(argument).resolve()
    run = resolved.recipe.run
    return Path(run.dir or Path(RUNS) / run.name).resolve()


def read_run_recipe(path: Path) -> ResolvedRecipe:
    """The resolved recipe that a run or a bundle holds. Raises ConfigError if it takes something from another file."""
    resolved = resolve(path / CONFIG_NAME)
    if len(resolved.files) > 1:
        raise ConfigError(f"{path / CONFIG_NAME} is not the recipe that ups wrote: it includes {resolved.files[1]}")
    return resolved


def last_step_of(recipe: Recipe) -> int | None:
    """The step at which a run of this recipe is done; None where time decides."""
    lengths = [stage.steps for stage in recipe.stages]
    return None if None in lengths else sum(length or 0 for length in lengths)


def check_ranks(recipe: Recipe, ranks: int) -> None:
    """Raises ConfigError, before anything starts, if a block or the copies of the model cannot be cut evenly over the
    ranks.
    """
    if ranks < 1:
        raise ConfigError(f"{ranks} ranks cannot train", hint="use 1 or more")
    problems: dict[str, str] = {}  # what is wrong -> what to do
    shard = recipe.engine.shard_ranks
    if shard is not None and ranks % shard:
        problems[f"engine.shard_ranks ({shard}) does not divide {ranks} ranks"] = (
            f"use --set engine.shard_ranks={_divisors(ranks)}, or a number of ranks that it divides"
        )
    data = recipe.data
    blocks = {
        "data.batch_size" if task.batch_size is None else f"data.tasks.{number}.batch_size": size
        for number, (task, size) in enumerate(zip(data.tasks, data.batch_sizes, strict=True))
        # of no meaning where every stage has its own
        if any(stage.batch_size is None for stage in recipe.stages)
    }
    blocks |= {f"stages.{n}.batch_size": s.batch_size for n, s in enumerate(recipe.stages) if s.batch_size}
    uneven = {setting: size for setting, size in blocks.items() if size % ranks}
    if uneven:
        named = ", ".join(f"{setting} ({size})" for setting, size in uneven.items())
        changes = " ".join(f"--set {setting}={-(-size // ranks) * ranks}" for setting, size in uneven.items())
        problems[f"{named} cannot be cut evenly over {ranks} ranks"] = (
            f"use {changes}, or --ranks {_divisors(math.gcd(*blocks.values()))}"
        )
    if problems:
        raise ConfigError("; ".join(problems), hint="; ".join(problems.values()))


def _divisors(number: int) -> str:
    return "|".join(str(n) for n in range(1, number + 1) if number % n == 0)


def prepare(run_dir: Path, resolved: ResolvedRecipe, ranks: int) -> None:
    """Make the run directory, or check that it is the same run. Raises ConfigError if it is another one.

    A run that never took a step is replaced: there is nothing that two recipes could mix. For who holds the run
    (`ups.supervise.run_file`): it writes what a living run reads.
    """
    config = RunDir(run_dir).config
    run_dir.mkdir(parents=True, exist_ok=True)
    if config.exists():
        difference = _difference(run_dir, resolved.recipe)
        if difference and is_ours(run_dir) and never_stepped(run_dir):
            logger.warning("%s is replaced: the run in it never took a step, and %s", run_dir, difference)
            remove_records(run_dir)
        elif difference and not _extended(run_dir, resolved.recipe):
            raise ConfigError(
                f"{run_dir} holds a run of another recipe: {difference}",
                hint="give this one its own place: --set run.name=NAME or --set run.dir=PATH; or remove the other one: "
                f"ups runs remove {path_text(run_dir)}",
            )
        elif not difference and is_ours(run_dir) and never_stepped(run_dir):
            RunDir(run_dir).statistics.unlink(missing_ok=True)  # of data that may have been corrected since
    elif RunDir(run_dir).checkpoints.exists():
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
    write_file_atomically(RunDir(run_dir).environment, (json.dumps(description, indent=1) + "\n").encode())


def _extended(run_dir: Path, recipe: Recipe) -> bool:
    """Whether `recipe` is that of the completed run in `run_dir` with a longer last stage; writes down that it is."""
    longer = other_length(read_run_recipe(run_dir).recipe, recipe)
    if longer is None or not was_started(run_dir):
        return False
    if longer[2] < longer[1]:
        raise ConfigError(
            f"{run_dir} can be trained longer, and not shorter: {longer[0]} was {longer[1]:g} and is {longer[2]:g}",
            hint="give the shorter one its own place: --set run.name=NAME or --set run.dir=PATH",
        )
    if read_run(run_dir)["state"] not in TRAINED:
        raise ConfigError(
            f"{run_dir} is not completed, and is to be longer: {longer[0]} was {longer[1]:g} and is {longer[2]:g}",
            hint="let the run finish first; a completed run is then trained longer by the same command",
        )
    logger.info("%s is trained longer: %s was %g and is %g", run_dir, *longer)
    note_extension(run_dir, *longer, recipe_identity(recipe))
    return True


def _difference(run_dir: Path, recipe: Recipe) -> str:
    """The first field in which the run's recipe learns something else; '' if there is none."""
    try:
        stored = read_run_recipe(run_dir).recipe
        check_recipe(run_dir, stored)
    except ConfigError as error:
        if is_ours(run_dir) and never_stepped(run_dir):
            return error.message
        raise
    return first_difference(stored, recipe)


def ensure_run_statistics(run_dir: Path, recipe: Recipe, readers: Sequence[Reader]) -> None:
    """Compute (or find) the statistics of every task, once and before any rank starts, and keep them in the run."""
    from ups.data.normalize import ensure_statistics

    path = RunDir(run_dir).statistics
    if path.exists():
        read_statistics(run_dir, readers)
        return
    found = {
        reader.task.name: ensure_statistics(reader, task.paths).to_json()
        for reader, task in zip(readers, recipe.data.tasks, strict=True)
    }
    content = (json.dumps(found, indent=1) + "\n").encode()
    known = known_identity(run_dir)
    if known is not None and known.statistics and hashlib.sha256(content).hexdigest() != known.statistics:
        # Before it is written: a refused start leaves the run directory as it was.
        raise StatisticsChangedError(
            f"{path} is missing, and what is measured now is not what the run was started with",
            hint="bring the old file back, or start a new run: --set run.dir=PATH",
        )
    write_file_atomically(path, content)


def read_statistics(run_dir: Path, readers: Sequence[Reader]) -> dict[str, Statistics]:
    """The statistics of the run by task. Raises DataError if the data is not what it was when the run started."""
    path = RunDir(run_dir).statistics
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
