"""Which checkpoint a restart will find, and whether the last one proves the run. Reads only."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from ups.errors import UpsError
from ups.record import manifest

_NAME = re.compile(r"step_(\d+)")
HASH_BELOW_BYTES = 2 * 2**30


def committed_steps(run_dir: Path) -> list[int]:
    """Steps of the committed checkpoints whose files are all there in their sizes, newest first."""
    return [step for step, path in _candidates(run_dir) if _whole(path, deep=False)]


def last_commit(run_dir: Path) -> int | None:
    """Step of the newest committed checkpoint by the sizes of its files: cheap, for who only shows it."""
    for step, path in _candidates(run_dir):
        if _whole(path, deep=False):
            return step
    return None


def usable_commit(run_dir: Path, hash_below_bytes: int = HASH_BELOW_BYTES) -> int | None:
    """Step of the checkpoint from which a restart will go on.

    A restart re-hashes the newest checkpoint and takes the one before if a byte differs, so the same is done here:
    otherwise the line of a fault would name a checkpoint that nobody will use, and too few lost steps. Above
    `hash_below_bytes` only sizes are compared, because reading it twice would delay the restart.
    """
    for step, path in _candidates(run_dir):
        with contextlib.suppress(UpsError):
            deep = manifest.read_manifest(path).total_bytes <= hash_below_bytes
            manifest.verify(path, deep=deep)
            return step
    return None


def verify_step(run_dir: Path, step: int) -> str:
    """'' if the checkpoint of `step` is committed and every byte of it re-hashes, else what is wrong."""
    found = dict(_candidates(run_dir)).get(step)
    if found is None:
        return f"no checkpoint of the last step {step}"
    try:
        manifest.verify(found)
    except UpsError as error:
        return error.message
    return ""


def _candidates(run_dir: Path) -> list[tuple[int, Path]]:
    directory = run_dir / "checkpoints"
    try:
        paths = list(directory.iterdir())
    except OSError:
        return []
    found = [(int(match[1]), path) for path in paths if (match := _NAME.fullmatch(path.name)) and _is_own(path)]
    return sorted(found, reverse=True)


def _is_own(path: Path) -> bool:
    """A checkpoint is a directory of the run. What a link points to may be anybody's, and no restart uses it."""
    return path.is_dir() and not path.is_symlink()


def _whole(path: Path, *, deep: bool) -> bool:
    try:
        manifest.verify(path, deep=deep)
    except UpsError:
        return False
    return True
