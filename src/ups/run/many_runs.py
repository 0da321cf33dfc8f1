"""Tags of runs, and which runs are removed: `ups runs promote`, `ups runs remove` and `ups runs clean`. No torch.

`tags.json` lies next to the runs, so that moving a tag from one run to another is one write. It names the bundle by its
hash: a tag stands for exactly these bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ups.errors import ConfigError, IntegrityError, RunHeldError
from ups.record.files import machine_errors, read_object, write_file_atomically
from ups.record.manifest import verify
from ups.record.run_dir import RunDir, is_bundle, meant_by
from ups.record.text import path_text
from ups.run.directory import is_ours, remove_if_empty, remove_records
from ups.supervise.run_file import find_run, hold_run, hold_steps, is_held, read_run, survey_runs, was_started

TAGS_NAME = "tags.json"
FORMAT_VERSION = 1
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


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
        left = remove_if_empty(run_dir, (RunDir.supervisor_lock.name, RunDir.steps_lock.name))
    return run_dir, left


def _find(name: str) -> Path:
    """A run that was started, or what is left of one: only what carries the marks of a run is ever removed."""
    typed, named = meant_by(name)
    for path in (typed, named):
        if is_ours(path):
            return path.resolve()
        if path == typed and name.endswith("/") and typed.is_dir():
            # Who writes a slash means that directory, and not a run of this name somewhere else.
            raise ConfigError(f"{name} is a directory without a run", hint="a run is named without the slash")
    run_dir = find_run(name)  # raises if there is none
    raise ConfigError(
        f"{run_dir} has a run.json, but was not made by ups train", hint="remove it by hand if it is not needed"
    )


def read_tags(directory: Path) -> dict[str, dict[str, Any]]:
    """Tag -> run (name of its directory), hash of its bundle, time; of the runs in `directory`."""
    document = read_object(directory / TAGS_NAME) or {}
    tags = document.get("tags")
    if document.get("format") != FORMAT_VERSION or not isinstance(tags, dict):
        return {}
    return {
        tag: one
        for tag, one in tags.items()
        if _TAG.fullmatch(tag)
        and isinstance(one, dict)
        and all(isinstance(one.get(key), str) for key in ("run", "bundle_sha256"))
    }


def tags_of(run_dir: Path) -> list[str]:
    """The tags of a run."""
    return sorted(tag for tag, one in read_tags(run_dir.parent).items() if one["run"] == run_dir.name)


def promote(run: str, tag: str) -> dict[str, Any]:
    """Give a tag to a run; another run of the directory that had it loses it. Returns what was written.

    Raises ConfigError for a run that is not completed or has not passed its gate, IntegrityError for a bundle that is
    not whole.
    """
    run_dir = find_run(run)
    if not _TAG.fullmatch(tag):
        raise ConfigError(
            f"'{tag[:80]}' is no name for a tag", hint="use letters, digits, '_', '.' and '-', at most 64, such as best"
        )
    state = read_run(run_dir)["state"]
    if state != "completed":
        raise ConfigError(
            f"{path_text(run_dir)} is '{state}': only a completed run is promoted",
            hint=f"see why with: ups why {path_text(run_dir)}",
        )
    try:
        digest = verify(RunDir(run_dir).bundle).sha256
    except IntegrityError as error:
        raise IntegrityError(
            f"the bundle of {path_text(run_dir)} is not whole: {error.message}",
            hint=f"make it again with: ups run {path_text(run_dir)}",
        ) from error
    with _changed(run_dir.parent) as tags:
        before = tags.get(tag, {}).get("run", "")
        tags[tag] = {"run": run_dir.name, "bundle_sha256": digest, "time": time.time()}
    places = {"run": str(run_dir), "bundle": str(RunDir(run_dir).bundle)}
    return {"tag": tag, **places, "bundle_sha256": digest, "before": before if before != run_dir.name else ""}


def take_away(run: str, tag: str) -> Path:
    """Take a tag from a run. Raises ConfigError if the run does not have it."""
    run_dir = find_run(run)
    with _changed(run_dir.parent) as tags:
        if tags.get(tag, {}).get("run") != run_dir.name:
            raise ConfigError(f"{path_text(run_dir)} does not have the tag '{tag}'", hint="see them with: ups runs")
        del tags[tag]
    return run_dir


@contextlib.contextmanager
def _changed(directory: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """The tags of a directory, written when the block ends; two that change them wait for each other."""
    with machine_errors(f"cannot write to {directory}"):
        file = (directory / ".tags.lock").open("w")
    with file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        tags = read_tags(directory)
        yield tags
        content = json.dumps({"format": FORMAT_VERSION, "tags": tags}, indent=1) + "\n"
        write_file_atomically(directory / TAGS_NAME, content.encode())


@dataclass(frozen=True, slots=True)
class Candidate:
    """A run that was looked at. kept: why it is not removed, '' if it would be."""

    path: Path
    state: str
    num_bytes: int
    kept: str

    def to_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "state": self.state, "bytes": self.num_bytes, "kept": self.kept}


def candidates(directory: Path, *, completed: bool = False) -> list[Candidate]:
    """Every run of a directory, and whether it would be removed: those that have ended without a bundle.

    completed: also those with a bundle. Never one that has a tag, is alive, or cannot be read.
    """
    readable, unreadable = survey_runs(directory)
    looked_at = [(path, run["state"], _reason_to_keep(path, run["state"], completed)) for path, run in readable]
    looked_at += [(path, "unreadable", "cannot be read") for path, _ in unreadable]
    return [Candidate(path, state, size_of(path), kept) for path, state, kept in looked_at]


def _reason_to_keep(path: Path, state: str, completed: bool) -> str:
    tags = tags_of(path)
    if tags:
        return f"promoted: {', '.join(tags)}"
    if state == "running" or is_held(path):
        return "running"
    if path.is_symlink() or not is_ours(path):
        return "not made here"
    if is_bundle(RunDir(path).bundle) and not completed:
        return "has a bundle"
    return ""


def size_of(path: Path) -> int:
    """Bytes of all files below a directory; links are not followed."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
