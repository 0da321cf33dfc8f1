"""Which runs nobody needs any more: `ups runs clean`. Removing one is `ups.run.removal`. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ups.record.run_dir import RunDir, is_bundle
from ups.run.removal import is_ours
from ups.run.tags import tags_of
from ups.supervise.run_file import is_held, list_runs, list_unreadable_runs


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
    found = [
        Candidate(path, document["state"], size_of(path), _kept(path, document["state"], completed=completed))
        for path, document in list_runs(directory)
    ]
    unreadable = [
        Candidate(path, "unreadable", size_of(path), "cannot be read") for path, _ in list_unreadable_runs(directory)
    ]
    return found + unreadable


def _kept(path: Path, state: str, *, completed: bool) -> str:
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
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total
