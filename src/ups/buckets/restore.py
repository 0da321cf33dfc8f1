"""Bringing the copy of a run back from a bucket: checked names, sizes and hashes, and nothing else is written.

Whoever can write to the bucket can put anything there. So names are matched against what a run has, a file is never
longer than its manifest says, what does not hash to its manifest is refused, and a checkpoint must carry the identity
of the run. A manifest shows damage and mix-ups; it does not prove who wrote it. What of the record is believed is
decided in `ups.run.restoring`.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ups.buckets.client import Bucket
from ups.buckets.objects import delete, get, get_file, names
from ups.buckets.run_copy import MAX_MARKER_BYTES, RECORD, step_folder, steps_in
from ups.errors import BucketError, CheckpointError, ForeignCheckpointError, IntegrityError, MachineError
from ups.record.checkpoints import PROGRESS_NAME
from ups.record.identity import RunIdentity
from ups.record.manifest import (
    COMMITTED_NAME,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    commit_directory,
    make_temporary,
    read_manifest,
    write_file_atomically,
)
from ups.record.run_dir import RunDir

logger = logging.getLogger(__name__)


def restore_checkpoints(bucket: Bucket, run_dir: Path, identity: RunIdentity) -> int | None:
    """Bring back the newest checkpoint that is whole and of this run, and those with which its stages ended.

    Returns its step, None if the bucket never had one. Raises CheckpointError if it has some and none can be trusted.
    """
    newest: int | None = None
    steps = steps_in(bucket)
    for step in steps:
        if newest is not None and not _ends_stage(bucket, step):
            continue
        try:
            _restore(bucket, step_folder(step), RunDir(run_dir).checkpoint(step), partial(_belongs, identity, step))
        except (IntegrityError, CheckpointError, ForeignCheckpointError) as error:
            logger.warning("checkpoint %d in the bucket is not used: %s", step, error.message)
            _unmark(bucket, step)
            continue
        if newest is None:
            newest = step
    if steps and newest is None:
        raise CheckpointError(
            f"none of the {len(steps)} checkpoints in {bucket.url} can be trusted",
            hint="begin again in another place: --set checkpoint.mirror=s3://BUCKET/OTHER-PREFIX",
        )
    return newest


def restore_bundle(bucket: Bucket, target: Path) -> bool:
    """Bring the bundle of the run back if the bucket has a whole one; it can be made again."""
    if get(bucket, f"{target.name}/{COMMITTED_NAME}", MAX_MARKER_BYTES) is None:
        return False
    try:
        _restore(bucket, target.name, target, lambda path: None)
    except IntegrityError as error:
        logger.warning("the bundle in the bucket is not used: %s", error.message)
        return False
    return True


def restore_record(bucket: Bucket, run_dir: Path, limit: int) -> None:
    """Bring back the files of the record, but for run.json and what is there already."""
    for name, size in names(bucket).items():
        target = run_dir / name
        if not RECORD.fullmatch(name) or target.exists():
            continue
        content = get(bucket, name, min(size, limit))
        if content is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_file_atomically(target, content)


def _belongs(identity: RunIdentity, step: int, path: Path) -> None:
    warning = identity.check(path, step)
    if warning:
        logger.warning("%s", warning)


def _ends_stage(bucket: Bucket, step: int) -> bool:
    """Whether a later stage may begin from this checkpoint. Believed only as far as it decides what is read."""
    content = get(bucket, f"{step_folder(step)}/{PROGRESS_NAME}", 2**20)
    return content is not None and b'"stage_finished": true' in content


def _restore(bucket: Bucket, folder: str, target: Path, belongs: Callable[[Path], None]) -> None:
    """Copy one committed directory and commit it here under the same manifest. Raises IntegrityError if it cannot."""
    marker = get(bucket, f"{folder}/{COMMITTED_NAME}", MAX_MARKER_BYTES)
    content = get(bucket, f"{folder}/{MANIFEST_NAME}", MAX_MANIFEST_BYTES)
    if marker is None or content is None:
        raise IntegrityError(f"{bucket.url}/{folder} is not committed")
    temporary = make_temporary(target)
    try:
        (temporary / MANIFEST_NAME).write_bytes(content)
        (temporary / COMMITTED_NAME).write_bytes(marker)
        manifest = read_manifest(temporary)  # that the two fit, and that no name leaves the directory
        _check_space(temporary, manifest)
        for name, expected in manifest.files.items():
            get_file(bucket, f"{folder}/{name}", expected, temporary / name)
        belongs(temporary)
        (temporary / MANIFEST_NAME).unlink()
        committed = commit_directory(temporary, target, known_hashes=manifest.files)
        if committed.sha256 != manifest.sha256:
            raise IntegrityError(f"{bucket.url}/{folder}: its manifest is not the one of its files")
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _check_space(folder: Path, manifest: Manifest) -> None:
    free = shutil.disk_usage(folder).free
    if manifest.total_bytes > free:
        raise MachineError(
            f"a checkpoint of {manifest.total_bytes} bytes does not fit on the disk: {free} are free",
            hint="free some space, or choose another place with --set run.dir=PATH",
        )


def _unmark(bucket: Bucket, step: int) -> None:
    """Refused once is refused for good: without its marker the step is written again, and not taken for a whole one."""
    try:
        delete(bucket, f"{step_folder(step)}/{COMMITTED_NAME}")
    except BucketError as error:
        logger.warning("its marker could not be removed: %s", error.message)
