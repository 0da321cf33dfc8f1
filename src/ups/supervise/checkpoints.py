"""Which checkpoint a restart will find, and whether the last one proves the run: success is proven, not believed.

Reads only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ups.errors import UpsError
from ups.record import manifest
from ups.record.causes import base_name
from ups.record.checkpoints import list_checkpoints
from ups.record.identity import RunIdentity
from ups.supervise.fault import NOT_RETRIED

HASH_BELOW_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True)
class UsableCheckpoint:
    """The checkpoint from which a restart continues.

    manifest_sha256: of that checkpoint, '' where its bytes were not read. foreign: a newer one is whole, but does not
    belong to the run, and a user must decide first. damaged: newer ones that are skipped, by step, and why.
    """

    step: int | None = None
    manifest_sha256: str = ""
    foreign: UpsError | None = None
    damaged: Mapping[int, str] = field(default_factory=dict)


def committed_steps(run_dir: Path) -> Iterator[int]:
    """Steps of the committed checkpoints whose files are all there in their sizes, newest first."""
    for step, path in list_checkpoints(run_dir):
        with contextlib.suppress(UpsError):
            manifest.verify(path, deep=False)
            yield step


def last_commit(run_dir: Path) -> int | None:
    """Step of the newest committed checkpoint by the sizes of its files: cheap, for who only shows it."""
    return next(committed_steps(run_dir), None)


def find_usable(
    run_dir: Path, identity: RunIdentity | None = None, hash_below_bytes: int = HASH_BELOW_BYTES
) -> UsableCheckpoint:
    """The newest checkpoint that is whole and belongs to the run.

    A restart takes an older one if a byte of the newest differs, so every byte is read here, and the ranks are told so
    that they do not read them again. Above `hash_below_bytes` only sizes are compared: the ranks read the bytes then.
    """
    foreign: UpsError | None = None
    damaged: dict[int, str] = {}
    for step, path in list_checkpoints(run_dir):
        try:
            stored = manifest.read_manifest(path)
            deep = stored.total_bytes <= hash_below_bytes
            manifest.verify(path, deep=deep)
        except UpsError as error:
            damaged[step] = error.message
            continue
        try:
            if identity is not None:
                identity.check(path, step)
        except UpsError as error:
            foreign = foreign or error
            continue
        return UsableCheckpoint(step, stored.sha256 if deep else "", foreign, damaged)
    return UsableCheckpoint(foreign=foreign, damaged=damaged)


def damage_line(step: int, problem: str) -> str:
    """What is said about a checkpoint that is skipped because of its bytes."""
    return f"NOTICE checkpoint step={step} is damaged and is not used: {problem}"


def missing_proof(
    run_dir: Path,
    last_step: int,
    expected: int | None,
    identity: RunIdentity | None,
    check_inputs: Callable[[], None] | None,
) -> tuple[str, str]:
    """Cause and message of what speaks against the success; two empty texts if nothing does.

    last_step: where the ranks say they are done; expected: where they must be, if the recipe fixes it.
    """
    if expected is not None and last_step != expected:
        return "unproven(last_step)", f"the ranks are done at step {last_step} of {expected}"
    path = dict(list_checkpoints(run_dir)).get(last_step)
    if path is None:
        return "unproven(final_checkpoint)", f"no checkpoint of the last step {last_step}"
    try:
        manifest.verify(path)
        if identity is not None:
            identity.check(path, last_step)
        if check_inputs is not None:
            check_inputs()
    except UpsError as error:
        # What names a substitution keeps its name; damage and absence mean that nothing is proven.
        named = base_name(error.cause) in NOT_RETRIED
        return (error.cause if named else "unproven(final_checkpoint)"), error.message
    return "", ""
