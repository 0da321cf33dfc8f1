"""Tags of runs: `ups runs promote` gives a name such as `production` to one run of a directory. No torch.

`tags.json` lies next to the runs, so that moving a tag from one run to another is one write. It names the bundle by its
hash: a tag stands for exactly these bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ups.errors import ConfigError, IntegrityError
from ups.record.files import machine_error, read_object, write_file_atomically
from ups.record.manifest import verify
from ups.record.run_dir import RunDir
from ups.record.text import path_text
from ups.supervise.run_file import find_run, read_run

TAGS_NAME = "tags.json"
FORMAT_VERSION = 1
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


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
    _check_tag(tag)
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
    return {"tag": tag, "run": str(run_dir), "bundle": str(RunDir(run_dir).bundle), "bundle_sha256": digest} | {
        "before": before if before != run_dir.name else ""
    }


def take_away(run: str, tag: str) -> Path:
    """Take a tag from a run. Raises ConfigError if the run does not have it."""
    run_dir = find_run(run)
    with _changed(run_dir.parent) as tags:
        if tags.get(tag, {}).get("run") != run_dir.name:
            raise ConfigError(f"{path_text(run_dir)} does not have the tag '{tag}'", hint="see them with: ups runs")
        del tags[tag]
    return run_dir


def _check_tag(tag: str) -> None:
    if not _TAG.fullmatch(tag):
        raise ConfigError(
            f"'{tag[:80]}' is no name for a tag", hint="use letters, digits, '_', '.' and '-', at most 64, such as best"
        )


@contextlib.contextmanager
def _changed(directory: Path) -> Iterator[dict[str, dict[str, Any]]]:
    """The tags of a directory, written when the block ends; two that change them wait for each other."""
    try:
        file = (directory / ".tags.lock").open("w")
    except OSError as error:
        raise machine_error(f"cannot write to {directory}", error) from error
    with file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        tags = read_tags(directory)
        yield tags
        content = json.dumps({"format": FORMAT_VERSION, "tags": tags}, indent=1) + "\n"
        write_file_atomically(directory / TAGS_NAME, content.encode())
