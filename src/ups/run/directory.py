"""The run directory: made, checked, identified, and cleared of what a run wrote. No torch.

`config.yaml` is the truth of a run. A run that exists is continued only by a recipe that means the same: a change of
what is learned would mix two experiments in one directory, silently. Recipe, statistics and data are checked when a run
is started or continued, before every restart, and before success is declared. Files of others in the same directory
are left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ups.config.identity import first_difference, other_length, recipe_identity
from ups.config.recipe import ResolvedRecipe, resolve
from ups.config.schema import Recipe, TaskConfig
from ups.errors import (
    ConfigError,
    DataChangedError,
    DataError,
    ForeignCheckpointError,
    RecipeChangedError,
    StatisticsChangedError,
    UpsError,
    errors_as,
)
from ups.launch.job import NAMES as LAUNCH_NAMES
from ups.record.checkpoints import list_checkpoints
from ups.record.files import TEMPORARY_PREFIX, load_object, machine_error, read_object, write_file_atomically
from ups.record.identity import RunIdentity, file_sha256
from ups.record.manifest import MANIFEST_NAME, remove_path, verify
from ups.record.run_dir import BUNDLE_FILE, CONFIG_NAME, RUNS, RunDir, is_bundle
from ups.record.text import path_text
from ups.registry import record_scripts
from ups.run.progress_line import read_rows
from ups.run.software import environment_record
from ups.spec.statistics import Statistics
from ups.supervise.checkpoints import missing_proof
from ups.supervise.run_file import TRAINED, is_unreadable, note_extension, read_run, run_identity, was_started

if TYPE_CHECKING:
    from ups.formats.base import Reader


logger = logging.getLogger(__name__)


def _bring_back(what: str) -> str:
    return f"bring the old {what} back, or start a new run: --set run.dir=PATH"


# What is written before a rank starts.
INPUTS = tuple(
    entry.name for entry in (RunDir.config, RunDir.statistics, RunDir.starts, RunDir.environment, RunDir.plugins)
)
# Files of a run besides these, and run.json, which goes last.
_FILES = (RunDir.metrics, RunDir.mirror_note, RunDir.steps, RunDir.plan, RunDir.link_secret)
# What comes later, folder -> names that a run puts into it: a run may live in a directory that is used for more.
_IN_FOLDERS = {
    RunDir.checkpoints.name: re.compile(rf"(broken_)?step_\d+|{re.escape(TEMPORARY_PREFIX)}.*"),
    RunDir.logs.name: re.compile(r"attempt_\d+"),
    RunDir.failures.name: re.compile(r"attempt_\d+"),
    RunDir.blackbox.name: re.compile(r"live(_\d+)?|rank_\d+.*"),
    RunDir.hosts.name: re.compile(r"\.?\d+\.json.*"),
    RunDir.launch.name: LAUNCH_NAMES,
    RunDir.report.name: re.compile(r"index\.html|scores\.json"),
    f"{RunDir.report.name}-other-data": re.compile(r"index\.html|scores\.json"),
    RunDir.tensorboard.name: re.compile(r"events\.out\.tfevents\..*"),
    RunDir.tracking.name: re.compile(r".*"),
}


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
    return resolve(path / CONFIG_NAME, other_files=False)


def last_step_of(recipe: Recipe) -> int | None:
    """The step at which a run of this recipe is done; None where time decides."""
    lengths = [stage.steps for stage in recipe.stages]
    return None if None in lengths else sum(length or 0 for length in lengths)


def earlier_stage(recipe: Recipe, index: int) -> int | None:
    """The stage whose weights stage `index` starts from by name: the last one of that type before it; None if none."""
    wanted = recipe.stages[index].start_from
    earlier = [number for number in range(index) if recipe.stages[number].type == wanted]
    return earlier[-1] if earlier else None


def from_outside(recipe: Recipe) -> list[int]:
    """Stages that start from another run, bundle or checkpoint."""
    stages = range(len(recipe.stages))
    return [n for n in stages if recipe.stages[n].start_from and earlier_stage(recipe, n) is None]


def check_start(run_dir: Path, index: int, known: Mapping[str, str]) -> tuple[str, str]:
    """Name and hash of what stage `index` starts from. Raises DataChangedError if the run began with something else."""
    start = RunDir(run_dir).start(index)
    name, sha256 = f"stages.{index}.start_from", file_sha256(start / MANIFEST_NAME)
    if known.get(name, sha256) != sha256:
        raise DataChangedError(f"{start} is not what the run was started with", hint=_bring_back("directory"))
    return name, sha256


def check_starts(run_dir: Path, recipe: Recipe, known: Mapping[str, str]) -> dict[str, str]:
    """Name -> hash of what the stages start from. Raises DataChangedError if one is not what the run began with."""
    return dict(check_start(run_dir, index, known) for index in from_outside(recipe))


def check_caches(recipe: Recipe, known: Mapping[str, str]) -> dict[str, str]:
    """Name -> hash of the latent caches that stages read. Raises DataChangedError if the run began with other ones.

    known: of a run that has begun, else empty.
    """
    caches: dict[str, str] = {}
    for index, stage in enumerate(recipe.stages):
        name = f"stages.{index}.cache"
        if stage.cache_place:
            caches[name] = file_sha256(Path(stage.cache_place) / MANIFEST_NAME)
        if known and known.get(name) != caches.get(name):
            cache = f"{name} ({stage.cache_place or 'none'})"
            raise DataChangedError(f"{cache} is not what the run was started with", hint=_bring_back("cache"))
    return caches


def check_ranks(recipe: Recipe, ranks: int) -> None:
    """Raises ConfigError, before anything starts, if the copies of the model cannot be cut evenly over the ranks."""
    if ranks < 1:
        raise ConfigError(f"{ranks} ranks cannot train", hint="use 1 or more")
    shard = recipe.engine.shard_ranks
    if shard is not None and ranks % shard:
        raise ConfigError(
            f"engine.shard_ranks ({shard}) does not divide {ranks} ranks",
            hint=f"use --set engine.shard_ranks={_divisors(ranks)}, or a number of ranks that it divides",
        )


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
    record_scripts(RunDir(run_dir).plugins)
    description = {"config_sha256": resolved.hash, "recipe_files": list(resolved.files), "ranks": ranks}
    description |= environment_record()
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
    measured = {
        reader.task.name: ensure_statistics(reader, task.paths).to_json()
        for reader, task in zip(readers, recipe.data.tasks, strict=True)
    }
    content = (json.dumps(measured, indent=1) + "\n").encode()
    known = known_identity(run_dir)
    if known is not None and known.statistics and hashlib.sha256(content).hexdigest() != known.statistics:
        # Before it is written: a refused start leaves the run directory as it was.
        raise StatisticsChangedError(
            f"{path} is missing, and what is measured now is not what the run was started with",
            hint=_bring_back("file"),
        )
    write_file_atomically(path, content)


def read_statistics(run_dir: Path, readers: Sequence[Reader]) -> dict[str, Statistics]:
    """The statistics of the run by task. Raises DataError if the data is not what it was when the run started."""
    path = RunDir(run_dir).statistics
    with errors_as(DataError, f"{path} cannot be read", OSError, ValueError, hint="start the run with `ups train`"):
        document = load_object(path)
    statistics: dict[str, Statistics] = {}
    for reader in readers:
        name = reader.task.name
        if name not in document:
            raise DataError(f"{path} has no statistics of task '{name}'", hint="start a new run: --set run.dir=PATH")
        statistics[name] = Statistics.from_json(document[name])
        if statistics[name].data_identity != reader.identity():
            raise DataChangedError(
                f"the data of task '{name}' has changed since the run in {run_dir} started", hint=_bring_back("data")
            )
    return statistics


def never_stepped(run_dir: Path) -> bool:
    """Whether nothing was ever learned here: no checkpoint, no row of metrics, no attempt that ended its first step."""
    if list_checkpoints(run_dir) or read_rows(run_dir):
        return False
    if not was_started(run_dir):
        return not is_unreadable(run_dir)
    document = read_run(run_dir)
    if document["state"] == "running" and document.get("host", os.uname().nodename) != os.uname().nodename:
        return False  # perhaps alive there; its lock may not be seen here
    # A rank that works on step 1 says 1. An attempt without a last step has lost its supervisor: its steps are unknown.
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
            hint="bring run.json of the run back, or start a new run: --set run.dir=PATH",
        )
    if earlier is None:
        identity = replace(RunIdentity.new(), unmarked=was_started(run_dir) and not never_stepped(run_dir))
    else:
        identity = earlier
        check_statistics(run_dir, identity)
    wanted = recipe_identity(recipe)
    data, times = dict(identity.data), dict(identity.data_changed_ns)
    for task in recipe.data.tasks:
        data[task.name], times[task.name] = check_data(task, identity)
    data |= check_starts(run_dir, recipe, data) | check_caches(recipe, identity.data)
    return replace(
        identity,
        recipes=(*(known for known in identity.recipes if known != wanted), wanted),
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
        hint=_bring_back("file"),
    )


def check_statistics(run_dir: Path, identity: RunIdentity) -> None:
    """Raise StatisticsChangedError if the run's statistics are not those that it was started with."""
    path = RunDir(run_dir).statistics
    if identity.statistics and file_sha256(path) != identity.statistics:
        raise StatisticsChangedError(f"{path} is not what the run was started with", hint=_bring_back("file"))


def check_data(task: TaskConfig, identity: RunIdentity) -> tuple[str, int]:
    """Sample and latest modification time of a task's data. Raises DataChangedError if it is not the run's data."""
    from ups.data.content import compare_changed, content_sample

    paths = task.paths
    sample, changed_ns = content_sample(paths)
    known = identity.data.get(task.name)
    if known is not None and known != sample:
        raise DataChangedError(
            f"the data of task '{task.name}' ({paths[0]}) is not the data that the run was started with",
            hint=_bring_back("data"),
        )
    if known is not None and changed_ns != identity.data_changed_ns.get(task.name):
        compare_changed(paths, identity.data_changed_ns.get(task.name, 0))
    return sample, changed_ns


def completed_step(run_dir: Path, recipe: Recipe, identity: RunIdentity, *, bundled: bool = True) -> int | None:
    """The last step of a run that needs nothing more; None if it has to be trained, proven or bundled (again).

    bundled: whether it needs a bundle, too.
    """
    if not was_started(run_dir):
        return None
    document = read_run(run_dir)
    step = document["checkpoint"]
    if document["state"] not in TRAINED or step is None or (bundled and not _has_bundle_of(run_dir, step)):
        return None
    if any(extension["step"] == step for extension in document.get("extensions", [])[-1:]):
        return None  # it was given a longer last stage since
    cause, _ = missing_proof(
        run_dir, step, last_step_of(recipe), identity, lambda: check_inputs(run_dir, recipe, identity)
    )
    return None if cause else step


def _has_bundle_of(run_dir: Path, step: int) -> bool:
    bundle = RunDir(run_dir).bundle
    try:
        verify(bundle)
        provenance = load_object(bundle / BUNDLE_FILE).get("provenance")
    except (UpsError, OSError, ValueError):
        return False
    return isinstance(provenance, dict) and provenance.get("step") == str(step)


def remove_records(run_dir: Path) -> None:
    """Remove all that a run has written, but for the lock. For who holds the run.

    What says that this is a run goes last: an interrupted removal can be called again.
    """
    try:
        for folder, names in _IN_FOLDERS.items():
            _remove_from(run_dir / folder, names)
        if is_bundle(RunDir(run_dir).bundle):
            remove_path(RunDir(run_dir).bundle)
        for pattern in (f"{TEMPORARY_PREFIX}*", ".doctor-*"):
            for path in run_dir.glob(pattern):
                remove_path(path)
        for name in (*(entry.name for entry in _FILES), *INPUTS, RunDir.run_json.name):
            remove_path(run_dir / name)
    except OSError as error:
        raise machine_error(f"cannot remove {error.filename or run_dir}", error) from error


def _remove_from(folder: Path, names: re.Pattern[str]) -> None:
    """Remove what a run has put into one of its folders. Of a link, only the link itself is removed."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.is_dir():
        for path in folder.iterdir():
            if names.fullmatch(path.name):
                remove_path(path)
        with contextlib.suppress(OSError):  # it holds files that no run wrote
            folder.rmdir()


def is_ours(run_dir: Path) -> bool:
    """Whether a run was started or prepared here; a config.yaml may also come from another program."""
    if was_started(run_dir):
        return True
    described = read_object(RunDir(run_dir).environment)
    return not is_bundle(run_dir) and described is not None and "config_sha256" in described


def leave_no_trace(run_dir: Path, before: Collection[str]) -> None:
    """After a first start that failed: the name is free again. For who holds the run; must not raise.

    before: what of INPUTS was there already.
    """
    try:
        for name in set(INPUTS) - set(before):
            remove_path(run_dir / name)
        remove_if_empty(run_dir)
    except OSError:
        return  # the error that is on its way says more


def remove_if_empty(run_dir: Path, locks: Collection[str] = (RunDir.supervisor_lock.name,)) -> list[str]:
    """Remove the directory if only the locks that the caller holds are left in it; returns what else is."""
    left = sorted(name for name in os.listdir(run_dir) if name not in locks)
    for name in locks:
        (run_dir / name).unlink(missing_ok=True)
    if not left:
        with contextlib.suppress(OSError):  # another process is starting a run here
            run_dir.rmdir()
    return left
