"""What a run writes into its directory, and how that is removed: a start that failed, a run that never took a step, or
a run that nobody needs any more. Files of others in the same directory are left alone. No torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from ups.errors import ConfigError, RunHeldError
from ups.launch.job import NAMES as LAUNCH_NAMES
from ups.record.files import TEMPORARY_PREFIX, machine_error, read_object
from ups.record.run_dir import RunDir, is_bundle, meant_by
from ups.run.tags import tags_of
from ups.supervise.run_file import find_run, hold_run, hold_steps, read_run, was_started

# What is written before a rank starts.
INPUTS = (RunDir.config.name, RunDir.statistics.name, RunDir.starts.name, RunDir.environment.name)
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


def remove_records(run_dir: Path) -> None:
    """Remove all that a run has written, but for the lock. For who holds the run.

    What says that this is a run goes last: an interrupted removal can be called again.
    """
    try:
        for folder, names in _IN_FOLDERS.items():
            _remove_from(run_dir / folder, names)
        if is_bundle(RunDir(run_dir).bundle):
            _remove(RunDir(run_dir).bundle)
        for pattern in (f"{TEMPORARY_PREFIX}*", ".doctor-*"):
            for path in run_dir.glob(pattern):
                _remove(path)
        for name in (*(entry.name for entry in _FILES), *INPUTS, RunDir.run_json.name):
            _remove(run_dir / name)
    except OSError as error:
        raise machine_error(f"cannot remove {error.filename or run_dir}", error) from error


def _remove_from(folder: Path, names: re.Pattern[str]) -> None:
    """Remove what a run has put into one of its folders. A link leads to what somebody else has: only it is removed."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.is_dir():
        for path in folder.iterdir():
            if names.fullmatch(path.name):
                _remove(path)
        with contextlib.suppress(OSError):  # somebody else has put something there
            folder.rmdir()


def is_ours(run_dir: Path) -> bool:
    """Whether a run was started or prepared here; a directory may have a config.yaml of somebody else."""
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
            _remove(run_dir / name)
        _remove_if_empty(run_dir)
    except OSError:
        return  # the error that is on its way says more


def remove_run(name: str) -> tuple[Path, list[str]]:
    """Remove a run by path or by its name under runs/; returns its directory and what is left in it of others.

    Raises RunHeldError if the run is alive, or may be: on another host; ConfigError if it has a tag.
    """
    run_dir = _find(name)
    tags = tags_of(run_dir)
    if tags:
        raise ConfigError(
            f"{run_dir} is promoted: {', '.join(tags)}",
            hint=f"give the tag to another run, or take it away: ups runs promote {run_dir.name} {tags[0]} --take-away",
        )
    if was_started(run_dir):
        document = read_run(run_dir)
        if document["state"] == "running":
            raise RunHeldError(
                f"{run_dir} is alive: process {document.get('supervisor_pid')} on {document.get('host')} supervises it",
                hint="stop it first (SIGTERM saves and leaves); if that host is gone, remove the directory by hand",
            )
    with hold_steps(run_dir), hold_run(run_dir):
        remove_records(run_dir)
        left = _remove_if_empty(run_dir, (RunDir.supervisor_lock.name, RunDir.steps_lock.name))
    return run_dir, left


def _find(name: str) -> Path:
    """A run that was started, or what is left of one: only what carries the marks of a run is ever removed."""
    given, named = meant_by(name)
    for path in (given, named):
        if is_ours(path):
            return path.resolve()
        if path == given and name.endswith("/") and given.is_dir():
            # Who writes a slash means that directory, and not a run of this name somewhere else.
            raise ConfigError(f"{name} is a directory without a run", hint="a run is named without the slash")
    found = find_run(name)  # raises if there is none
    raise ConfigError(
        f"{found} has a run*.json, but was not made by ups train", hint="remove it by hand if nobody needs it"
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_if_empty(run_dir: Path, locks: Collection[str] = (RunDir.supervisor_lock.name,)) -> list[str]:
    """Remove the directory if only the locks that the caller holds are left in it; returns what else is."""
    left = sorted(name for name in os.listdir(run_dir) if name not in locks)
    for name in locks:
        (run_dir / name).unlink(missing_ok=True)
    if not left:
        with contextlib.suppress(OSError):  # somebody starts a run here at this moment
            run_dir.rmdir()
    return left
