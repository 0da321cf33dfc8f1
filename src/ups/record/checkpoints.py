"""Checkpoints as directories: their names, which one is trusted, which ones stay (standard library only).

`RUN/checkpoints/step_00001200/` holds torch's sharded files, `progress.json`, and the manifest and marker of
`manifest.py`. What is not committed does not exist. Whether a checkpoint belongs to the run: `identity.py`. Writing and
reading tensors: `ups.training.checkpoint`.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from ups.errors import CheckpointError, IntegrityError, UpsError, errors_as
from ups.record.files import load_object
from ups.record.manifest import FileHash, is_committed, read_manifest, remove_directory, verify
from ups.record.run_dir import RunDir

logger = logging.getLogger(__name__)

PROGRESS_NAME = "progress.json"
VISIBLE_SECONDS = 120.0
_NAME = re.compile(r"step_(\d{8,12})")


def list_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, directory) of everything named like a checkpoint, newest first; nothing is verified.

    A checkpoint is a directory of the run. What a link points to may belong to another run, and is left alone.
    """
    folder = RunDir(run_dir).checkpoints
    paths = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()] if folder.is_dir() else []
    return sorted(((int(m.group(1)), path) for path in paths if (m := _NAME.fullmatch(path.name))), reverse=True)


def read_progress(path: Path) -> dict[str, Any]:
    """The JSON object of `progress.json`."""
    with errors_as(CheckpointError, f"{path / PROGRESS_NAME} cannot be read", OSError, ValueError):
        document = load_object(path / PROGRESS_NAME)
    if not isinstance(document.get("progress"), dict):
        raise CheckpointError(f"{path / PROGRESS_NAME} is not the progress of a run")
    return document


def latest_verified(
    run_dir: Path,
    *,
    belongs: Callable[[Path, int], str] | None = None,
    hashed: str = "",
    set_aside: bool = False,
    on_damage: Callable[[int, str], None] | None = None,
) -> Path | None:
    """The newest checkpoint whose every byte is what was committed, or None if there never was one.

    One process decides (on a shared file system listings differ between hosts). A damaged one is skipped with a
    warning, and with `set_aside` renamed to `broken_step_...`, so that the same step can be saved again. Raises
    CheckpointError when there are committed checkpoints and none can be trusted: starting afresh would throw the run
    away. belongs(path, step): raises for one that is whole but not of this run, which is never skipped; may return a
    warning. hashed: manifest hash of the checkpoint whose bytes the supervisor has read already; of that one only
    names and sizes are compared. on_damage(step, problem): called for each one that is skipped.
    """
    passed_over = 0
    for step, path in list_checkpoints(run_dir):
        try:
            verify(path, deep=not hashed or read_manifest(path).sha256 != hashed)
            read_progress(path)
        except (IntegrityError, CheckpointError) as error:
            passed_over += 1
            logger.warning("checkpoint %s is not used: %s", path.name, error.message)
            if on_damage is not None:
                on_damage(step, error.message)
            if set_aside:
                _set_aside(path)
            continue
        warning = belongs(path, step) if belongs is not None else ""
        if warning:
            logger.warning("%s", warning)
        if passed_over:
            logger.warning("falling back to the older checkpoint %s", path.name)
        return path
    if passed_over:
        raise CheckpointError(
            f"none of the {passed_over} checkpoints in {RunDir(run_dir).checkpoints} can be trusted",
            hint="restore one from a copy, or start again in another directory with --set run.dir=PATH",
        )
    return None


def retain(run_dir: Path, keep: int, needed: Collection[int] = ()) -> list[Path]:
    """Delete committed checkpoints beyond the newest `keep`, but for `needed` steps; for the one writer of a run."""
    committed = [(step, path) for step, path in list_checkpoints(run_dir) if is_committed(path)]
    old = [path for step, path in committed[keep:] if step not in needed]
    for path in old:
        remove_directory(path)
    return old


def clear_link(path: Path) -> None:
    """Set a symbolic link aside that stands where a checkpoint is to be committed; what it points to is not touched."""
    if path.is_symlink():
        logger.warning("%s is a symbolic link and is set aside: a checkpoint is committed in its place", path.name)
        _set_aside(path)


def wait_until_visible(
    path: Path, files: Mapping[str, FileHash] | None = None, seconds: float = VISIBLE_SECONDS
) -> None:
    """Wait until this host sees the directory and the files (default: of its manifest) with their sizes.

    A shared file system may show another host's files late. Raises CheckpointError at the deadline.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            expected = read_manifest(path).files if files is None else files
            missing = [n for n, f in expected.items() if not _has_size(path / n, f.size)]
            if not missing and path.is_dir():
                return
            what = f"{missing[0]} of {path}" if missing else str(path)
        except UpsError as error:
            what = error.message
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"not visible on this host after {seconds:.0f} s: {what}",
                hint="check that all hosts mount the same file system at the run directory",
            )
        time.sleep(0.2)


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _set_aside(path: Path) -> None:
    for number in range(1000):
        target = path.with_name(f"broken_{path.name}" + (f"_{number}" if number else ""))
        if not os.path.lexists(target):
            path.rename(target)
            return
