"""The copy of a run in a bucket: what it consists of, how it is kept up to date, how it comes back. No torch.

Below the prefix lie the same names as in the run directory: `checkpoints/step_.../`, `bundle/` and the record. An
object appears whole or not at all. The order of objects makes the copy usable at any moment:

1. A directory's files, then its MANIFEST, then the record, and the marker COMMITTED last. What has no marker that fits
   its manifest does not exist.
2. A directory that is written again loses its marker first.
3. In the record `run.json` comes last. It notes the manifests of checkpoints; where a note differs from what the bucket
   has, the marker of the latter goes before the note comes.
4. Old checkpoints go after the newest one is committed, their marker first.

No other process writes below the prefix: a copy of another run there is an error, and is not touched.

Whoever can write to the bucket can put anything there. So names that come back are matched against what a run has, a
file is never longer than its manifest says, what does not hash to its manifest is refused, and a checkpoint must carry
the identity of the run. A manifest shows damage and mix-ups; it does not prove who wrote it. What of the record is
believed is decided in `ups.run.restoring`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ups.buckets.client import Bucket, is_plain_key
from ups.errors import (
    BucketError,
    CheckpointError,
    ConfigError,
    ForeignCheckpointError,
    IntegrityError,
    MachineError,
    UpsError,
    errors_as,
)
from ups.record.checkpoints import PROGRESS_NAME, list_checkpoints
from ups.record.files import (
    MAX_RUN_BYTES,
    TEMPORARY_PREFIX,
    parse_object,
    read_object,
    safe_read,
    write_file_atomically,
)
from ups.record.identity import RunIdentity
from ups.record.manifest import (
    COMMITTED_NAME,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    FileHash,
    Manifest,
    commit_directory,
    is_committed,
    make_temporary,
    read_manifest,
)
from ups.record.run_dir import RunDir

_CHUNK_BYTES = 4 * 2**20


def put(bucket: Bucket, name: str, content: bytes | Path) -> None:
    """Write one object, from memory or from a file; a large file goes in parts."""
    import obstore

    with _errors(bucket, f"writing {name}"):
        obstore.put(bucket.store, bucket.key(name), content, max_concurrency=2)


def get(bucket: Bucket, name: str, limit: int) -> bytes | None:
    """The content of an object, None if there is none. Raises IntegrityError for more than `limit` bytes."""
    import obstore

    with _errors(bucket, f"reading {name}"):
        try:
            answer = obstore.get(bucket.store, bucket.key(name))
        except FileNotFoundError:
            return None
        if answer.meta["size"] > limit:
            raise IntegrityError(
                f"{bucket.url}/{name} has {answer.meta['size']} bytes, and more than {limit} are not read"
            )
        return bytes(answer.bytes())


def get_file(bucket: Bucket, name: str, expected: FileHash, target: Path) -> None:
    """Copy an object into a new file. Raises IntegrityError unless it has the expected size and hash."""
    import obstore

    digest, size = hashlib.sha256(), 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with _errors(bucket, f"reading {name}"), target.open("xb") as file:
        try:
            answer = obstore.get(bucket.store, bucket.key(name))
        except FileNotFoundError:
            raise IntegrityError(f"{bucket.url}/{name} is missing") from None
        if answer.meta["size"] != expected.size:
            raise IntegrityError(f"{bucket.url}/{name} has {answer.meta['size']} bytes, committed was {expected.size}")
        for part in answer.stream(min_chunk_size=_CHUNK_BYTES):
            size += len(part)
            if size > expected.size:  # a server that lies about the size must not fill the disk
                raise IntegrityError(f"{bucket.url}/{name} is longer than {expected.size} bytes")
            digest.update(part)
            file.write(part)
    if digest.hexdigest() != expected.sha256 or size != expected.size:
        raise IntegrityError(f"{bucket.url}/{name} is not what was committed: its hash is {digest.hexdigest()[:12]}...")


def names(bucket: Bucket, folder: str = "") -> dict[str, int]:
    """Name below the prefix -> size, of every object in `folder`. Names that cannot be files there are left out."""
    import obstore

    start = bucket.key(folder) if folder else bucket.prefix
    sizes: dict[str, int] = {}
    with _errors(bucket, f"listing {folder or 'the prefix'}"):
        for batch in obstore.list(bucket.store, start or None):
            for entry in batch:
                name = entry["path"].removeprefix(f"{bucket.prefix}/" if bucket.prefix else "")
                if is_plain_key(name):
                    sizes[name] = entry["size"]
    return sizes


def delete(bucket: Bucket, *doomed: str) -> None:
    """Remove objects in the given order, one request each: not all servers know how to remove many."""
    import obstore

    for name in doomed:
        with _errors(bucket, f"removing {name}"), contextlib.suppress(FileNotFoundError):
            obstore.delete(bucket.store, bucket.key(name))


@contextlib.contextmanager
def _errors(bucket: Bucket, doing: str) -> Iterator[None]:
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise BucketError(
            f"{bucket.url}: {doing} is not allowed",
            hint="check the credentials in the environment, and what they may do with this bucket",
        ) from error
    except BaseError as error:
        # The first line alone: what follows describes the client.
        text = " ".join(str(error).partition("\n")[0].split())[:300]
        raise BucketError(f"{bucket.url}: {doing} failed: {text}") from error
    except OSError as error:  # of the file on this side
        raise BucketError(f"{bucket.url}: {doing} failed: {error.strerror or error}") from error


MAX_RECORD_BYTES = 2**30
MAX_MARKER_BYTES = 4096
# What of the run directory is the record, and nothing else is ever written there from a bucket. run.json goes last.
# What `ups run` has done is not part of it: it does its steps again rather than believe a bucket.
RECORD = re.compile(
    r"config\.yaml|statistics\.json|env\.json|metrics\.jsonl"
    r"|start/[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+){0,3}|failures/attempt_\d+/[A-Za-z0-9_.-]+"
)
_FOLDERS = (RunDir.starts.name, RunDir.failures.name)
_CHECKPOINT = re.compile(r"checkpoints/(step_(\d{8,12}))/(.+)")


def step_folder(step: int) -> str:
    """The folder of a checkpoint below the prefix."""
    return f"checkpoints/step_{step:08d}"


def committed_in(bucket: Bucket, folder: str) -> str:
    """The hash of the manifest that the marker of a folder names, '' if it has none that can be read."""
    content = get(bucket, f"{folder}/{COMMITTED_NAME}", MAX_MARKER_BYTES)
    with contextlib.suppress(ValueError):
        sha256 = parse_object(content or b"").get("manifest_sha256")
        return sha256 if isinstance(sha256, str) and re.fullmatch(r"[0-9a-f]{64}", sha256) else ""
    return ""


def steps_in(bucket: Bucket) -> dict[int, str]:
    """Step -> manifest hash of each checkpoint in the bucket that carries a marker, newest first."""
    marked = [_CHECKPOINT.fullmatch(name) for name in names(bucket, "checkpoints")]
    steps = sorted({int(m.group(2)) for m in marked if m is not None and m.group(3) == COMMITTED_NAME}, reverse=True)
    manifests = {step: committed_in(bucket, step_folder(step)) for step in steps}
    return {step: sha256 for step, sha256 in manifests.items() if sha256}


def identity_in(bucket: Bucket) -> RunIdentity | None:
    """The identity of the run whose copy is in the bucket, None if there is none."""
    content = get(bucket, RunDir.run_json.name, MAX_RUN_BYTES)
    with contextlib.suppress(ValueError):
        return RunIdentity.from_json(parse_object(content or b"").get("identity"))
    return None


class RunCopy:
    """Keeps the copy of one run. For the one process that writes it; every method may raise BucketError."""

    def __init__(self, bucket: Bucket, run_dir: Path, keep: int) -> None:
        self._bucket = bucket
        self._run_dir = run_dir
        self._keep = keep
        self._steps: dict[int, str] | None = None
        self._bundle = ""
        self._record: dict[str, str] = {}

    @property
    def newest(self) -> int | None:
        """The newest step in the bucket; None if there is none, or the bucket was never reached."""
        return max(self._steps, default=None) if self._steps else None

    def missing(self) -> list[int]:
        """Steps whose checkpoint is committed in the run directory and not in the bucket, newest first."""
        known = self._steps or {}
        return [step for step, sha256 in self._local().items() if known.get(step) != sha256]

    def update(self) -> bool:
        """Bring one more thing into the bucket, the newest checkpoint first; False if nothing was missing."""
        if self._steps is None:
            self._open()
        missing = self.missing()
        if missing:
            self._send_checkpoint(missing[0])
            self._remove_old()
            return True
        bundle = RunDir(self._run_dir).bundle
        manifest: Manifest | None = None
        with contextlib.suppress(UpsError, OSError):
            manifest = read_manifest(bundle)
        if manifest is not None and manifest.sha256 != self._bundle:
            self._send(bundle, bundle.name, manifest)
            self._bundle = manifest.sha256
            return True
        return False

    def send_record(self) -> None:
        """Bring the files of the record that have changed into the bucket, run.json last."""
        paths = [path for path in self._run_dir.iterdir() if path.is_file()]
        paths += [path for folder in _FOLDERS for path in (self._run_dir / folder).rglob("*") if path.is_file()]
        files = {path.relative_to(self._run_dir).as_posix(): path for path in sorted(paths)}
        wanted = [name for name in files if RECORD.fullmatch(name)]
        if self._identity() is None or RunDir.config.name not in wanted:
            return  # the run has not begun
        for name in [*wanted, RunDir.run_json.name]:
            content = self._content(files.get(name, self._run_dir / name))
            sha256 = hashlib.sha256(content).hexdigest()
            if self._record.get(name) == sha256:
                continue
            if name == RunDir.run_json.name:
                self._unmark_contradicted(content)
            put(self._bucket, name, content)
            self._record[name] = sha256

    def _identity(self) -> RunIdentity | None:
        return RunIdentity.from_json((read_object(RunDir(self._run_dir).run_json) or {}).get("identity"))

    def _content(self, path: Path) -> bytes:
        with errors_as(BucketError, f"{path} cannot be copied", OSError, ValueError):
            return safe_read(path, MAX_RECORD_BYTES)

    def _open(self) -> None:
        steps = steps_in(self._bucket)
        other = identity_in(self._bucket)
        mine = self._identity()
        if mine is None:
            raise BucketError(f"{RunDir(self._run_dir).run_json} does not say which run this is")
        if steps and (other is None or other.run_id != mine.run_id):
            raise ConfigError(
                f"{self._bucket.url} holds the copy of another run, and is left alone",
                hint="give each run a place of its own: --set checkpoint.mirror=s3://BUCKET/OTHER-PREFIX",
            )
        self._bundle = committed_in(self._bucket, RunDir.bundle.name)
        self._steps = steps

    def _local(self) -> dict[int, str]:
        """Step -> manifest hash of each committed checkpoint of the run directory, newest first."""
        manifests = {}
        for step, path in list_checkpoints(self._run_dir):
            with contextlib.suppress(UpsError, OSError):  # it is being removed or replaced
                if is_committed(path):
                    manifests[step] = read_manifest(path).sha256
        return manifests

    def _send_checkpoint(self, step: int) -> None:
        assert self._steps is not None
        path = RunDir(self._run_dir).checkpoint(step)
        manifest = read_manifest(path)
        if step in self._steps:
            del self._steps[step]
        with self._held(path, manifest) as source:
            self._send(source, step_folder(step), manifest)
        self._steps[step] = manifest.sha256

    @contextlib.contextmanager
    def _held(self, path: Path, manifest: Manifest) -> Iterator[Path]:
        """The files of a checkpoint under links of our own: a bucket may be slower than checkpoints are removed."""
        links = self._run_dir / f"{TEMPORARY_PREFIX}mirror"
        shutil.rmtree(links, ignore_errors=True)  # of a process that was killed
        try:
            for name in (*manifest.files, MANIFEST_NAME, COMMITTED_NAME):
                (links / name).parent.mkdir(parents=True, exist_ok=True)
                os.link(path / name, links / name)
            source = links if read_manifest(links).sha256 == manifest.sha256 else path
        except OSError:
            source = path  # a file system without links, or just removed
        try:
            yield source
        finally:
            shutil.rmtree(links, ignore_errors=True)

    def _send(self, path: Path, folder: str, manifest: Manifest) -> None:
        """One committed directory, its marker last."""
        marker = self._content(path / COMMITTED_NAME)
        delete(self._bucket, f"{folder}/{COMMITTED_NAME}")
        for name, file in manifest.files.items():
            source = path / name
            try:
                size = source.stat().st_size
            except OSError as error:
                raise BucketError(f"{path} was removed while it was copied") from error
            if size != file.size:
                raise BucketError(f"{source} is not what was committed: it has {size} bytes")
            put(self._bucket, f"{folder}/{name}", source if size else b"")
        put(self._bucket, f"{folder}/{MANIFEST_NAME}", manifest.to_bytes())
        self.send_record()
        with contextlib.suppress(IntegrityError):  # removed by now, which takes nothing from the copy
            if read_manifest(self._run_dir / folder).sha256 != manifest.sha256:
                raise BucketError(f"{self._run_dir / folder} was replaced while it was copied")
        put(self._bucket, f"{folder}/{COMMITTED_NAME}", marker)

    def _unmark_contradicted(self, content: bytes) -> None:
        """Before run.json comes: checkpoints in the bucket that are not those that it notes exist no more."""
        identity = RunIdentity.from_json(json.loads(content).get("identity"))
        for step, sha256 in dict(self._steps or {}).items():
            if identity is not None and identity.commits.get(step, sha256) != sha256:
                delete(self._bucket, f"{step_folder(step)}/{COMMITTED_NAME}")
                assert self._steps is not None
                del self._steps[step]

    def _remove_old(self) -> None:
        """Remove what is neither among the newest `keep` in the bucket nor in the run directory any more."""
        assert self._steps is not None
        local = self._local()
        old = [step for step in sorted(self._steps, reverse=True)[self._keep :] if step not in local]
        for step in old:
            folder = step_folder(step)
            delete(self._bucket, f"{folder}/{COMMITTED_NAME}")
            del self._steps[step]
            delete(self._bucket, *names(self._bucket, folder))


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
