"""What makes a run this run, and how a checkpoint proves that it is one of it (standard library only).

A hash proves that bytes are those that were committed, not that they belong here: a checkpoint of another seed, copied
into the directory, is whole. So a run has a random name of its own, and hashes of what it learns from. `run.json` keeps
them, every checkpoint carries them, and whoever loads a checkpoint compares. In addition the supervisor notes the hash
of each manifest when a rank commits it, over a channel outside the run directory: a checkpoint that was replaced later
is noticed although everything in it fits.

This is against mix-ups and damage. Who owns the run directory can rewrite `run.json` too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ups.errors import DataChangedError, ForeignCheckpointError, RecipeChangedError, StatisticsChangedError, UpsError
from ups.record.checkpoints import read_progress
from ups.record.files import open_regular, read_from
from ups.record.manifest import read_manifest

IDENTITY_VARIABLE = "UPS_IDENTITY"
HASHED_VARIABLE = "UPS_HASHED"
MAX_COMMITS = 64
COMMITS_NAME = "commits.jsonl"


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """The identity of a run.

    recipes: hashes of its recipe, one for each version of ups that has run it, the present one last. config: SHA-256 of
    config.yaml. statistics: SHA-256 of statistics.json. data: task -> hash of a sample of its data; data_changed_ns:
    its latest modification time when that was taken. commits: step -> hash of the manifest of the checkpoint that a
    rank committed for it. unmarked: the run was started by a version whose checkpoints carry no identity.
    """

    run_id: str
    recipes: tuple[str, ...] = ()
    config: str = ""
    statistics: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    data_changed_ns: Mapping[str, int] = field(default_factory=dict)
    commits: Mapping[int, str] = field(default_factory=dict)
    unmarked: bool = False

    @classmethod
    def new(cls) -> RunIdentity:
        """The identity of a run that is about to begin."""
        return cls(secrets.token_hex(16))

    def to_json(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id,
            "recipes": list(self.recipes),
            "config": self.config,
            "statistics": self.statistics,
            "data": dict(self.data),
            "data_changed_ns": dict(self.data_changed_ns),
            "commits": {str(step): value for step, value in sorted(self.commits.items())},
            "unmarked": self.unmarked,
        }

    @classmethod
    def from_json(cls, document: object) -> RunIdentity | None:
        """What `to_json` gave; None for anything else."""
        if not isinstance(document, dict):
            return None
        texts = [document.get(key) for key in ("run_id", "config", "statistics")]
        recipes, data, times, commits = (document.get(k) for k in ("recipes", "data", "data_changed_ns", "commits"))
        if (
            not all(isinstance(text, str) for text in texts)
            or not texts[0]
            or not isinstance(recipes, list)
            or not isinstance(data, dict)
            or not isinstance(times, dict)
            or not all(type(value) is int for value in times.values())
            or not isinstance(commits, dict)
            or not all(isinstance(text, str) for text in [*recipes, *data.values(), *commits.values()])
            or not all(key.isascii() and key.isdigit() and len(key) < 16 for key in commits)
        ):
            return None
        run_id, config, statistics = (str(text) for text in texts)
        steps = {int(step): value for step, value in commits.items()}
        unmarked = document.get("unmarked") is True
        return cls(run_id, tuple(recipes), config, statistics, data, times, steps, unmarked)

    @classmethod
    def from_environment(cls) -> RunIdentity | None:
        """What the supervisor told this rank; None where there is no supervisor."""
        text = os.environ.get(IDENTITY_VARIABLE)
        return cls.from_json(json.loads(text)) if text else None

    def mark(self) -> dict[str, Any]:
        """What a checkpoint of this run carries."""
        return {
            "run_id": self.run_id,
            "recipe": self.recipes[-1] if self.recipes else "",
            "statistics": self.statistics,
            "data": dict(self.data),
        }

    def with_commit(self, step: int, manifest_sha256: str) -> RunIdentity:
        """With one more commit noted; '' forgets the step, because it is about to be written again."""
        commits = {key: value for key, value in self.commits.items() if key != step}
        if manifest_sha256:
            commits[step] = manifest_sha256
        return replace(self, commits=dict(sorted(commits.items())[-MAX_COMMITS:]))

    def check(self, path: Path, step: int) -> str:
        """Raise if the checkpoint in `path` is not the one of this run after `step` steps; returns a warning or ''.

        Cheap: reads two small files. Whether the bytes are whole is for `manifest.verify`.
        """
        document = read_progress(path)
        stored_step = document["progress"].get("step")
        if stored_step != step:
            raise ForeignCheckpointError(
                f"{path} is named as step {step}, but holds the state after {stored_step!r} steps",
                hint="give it its own name back, or remove it; checkpoints are not renamed",
            )
        noted = self.commits.get(step)
        if noted is not None and read_manifest(path).sha256 != noted:
            raise ForeignCheckpointError(
                f"{path} is not what a rank of this run committed there: it was replaced afterwards",
                hint="remove it, and the run continues from the checkpoint before it",
            )
        mark = document.get("identity")
        if mark is None and self.unmarked:
            return f"{path.name} carries no identity: it was written before runs had one, and is taken as it is"
        if not isinstance(mark, dict) or mark.get("run_id") != self.run_id:
            whose = "carries no identity" if not isinstance(mark, dict) else "belongs to another run"
            raise ForeignCheckpointError(
                f"{path} {whose}: it is not a checkpoint of this run",
                hint="remove it, and the run continues from the checkpoint before it",
            )
        self._compare(path, mark)
        return ""

    def _compare(self, path: Path, mark: Mapping[str, Any]) -> None:
        """The same run, but does the checkpoint come from the same recipe, statistics and data?"""
        problems: list[tuple[bool, type[UpsError], str]] = [
            (bool(self.recipes) and mark.get("recipe") not in self.recipes, RecipeChangedError, "another recipe"),
            (mark.get("statistics") != self.statistics, StatisticsChangedError, "other statistics"),
            (mark.get("data") != dict(self.data), DataChangedError, "other data"),
        ]
        for wrong, kind, what in problems:
            if wrong:
                raise kind(
                    f"{path} was trained with {what} than the run directory has now",
                    hint="bring the old one back, or start a new run: --set run.dir=PATH",
                )


def file_sha256(path: Path) -> str:
    """SHA-256 of a small file, '' if it cannot be read."""
    try:
        with open_regular(path, follow_link=True) as file:
            return hashlib.sha256(file.read()).hexdigest() if file is not None else ""
    except OSError:
        return ""


def note_commit(box_dir: Path, step: int, manifest_sha256: str) -> None:
    """Tell the supervisor what was committed for `step`; '' before it is replaced. For the one rank that commits.

    Never raises: a step without a note is still held to the identity that its checkpoint carries.
    """
    _note(box_dir, {"step": step, "manifest_sha256": manifest_sha256})


def note_damage(box_dir: Path, step: int, problem: str) -> None:
    """Tell the supervisor that the checkpoint of `step` is skipped, and why. For the one rank that chooses it."""
    _note(box_dir, {"step": step, "damaged": problem})


def note_bad_loss(rank: int, world_size: int, steps: list[int]) -> None:
    """Tell the supervisor that this rank brought the loss that is not finite to steps that all ranks left out."""
    if box_dir := os.environ.get("UPS_BLACKBOX_DIR"):
        named = f"rank={rank}/{world_size} step={','.join(map(str, steps))} phase=forward"
        reason = "the loss of this rank was not finite (NaN or infinite); all ranks left the step out"
        _note(Path(box_dir), {"notice": f"NOTICE {named}: {reason}"})


def _note(box_dir: Path, entry: dict[str, Any]) -> None:
    with contextlib.suppress(OSError), (box_dir / COMMITS_NAME).open("a") as file:
        file.write(json.dumps(entry) + "\n")


def read_commits(box_dir: Path, offset: int) -> tuple[list[tuple[int, str]], dict[int, str], list[str], int]:
    """Of the whole lines from `offset` on: (step, manifest hash) of each commit, what is wrong with the checkpoints
    that are skipped, by step, and notices; and where the next read begins.
    """
    content = read_from(box_dir / COMMITS_NAME, offset)
    whole = content[: content.rfind(b"\n") + 1]
    entries = [json.loads(line) for line in whole.splitlines()]
    commits = [(int(entry["step"]), str(entry["manifest_sha256"])) for entry in entries if "manifest_sha256" in entry]
    damaged = {int(entry["step"]): str(entry["damaged"]) for entry in entries if "damaged" in entry}
    notices = [str(entry["notice"]) for entry in entries if "notice" in entry]
    return commits, damaged, notices, offset + len(whole)
