"""The copy of a run in a bucket: what it consists of, and how it is kept while the run goes on. No torch.

Below the prefix lie the same names as in the run directory: `checkpoints/step_.../`, `bundle/` and the record. The
order is what makes the copy usable at any moment:

1. A directory's files, then its MANIFEST, then the record, and the marker COMMITTED last. What has no marker that fits
   its manifest does not exist.
2. A directory that is written again loses its marker first.
3. In the record `run.json` comes last. It notes the manifests of checkpoints; where a note differs from what the bucket
   has, the marker of the latter goes before the note comes.
4. Old checkpoints go after the newest one is committed, their marker first.

Nobody else writes below the prefix: a copy of another run there is an error, and is left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ups.buckets.client import Bucket
from ups.buckets.objects import delete, get, names, put
from ups.errors import BucketError, ConfigError, IntegrityError, UpsError
from ups.record.checkpoints import list_checkpoints
from ups.record.files import MAX_RUN_BYTES, TEMPORARY_PREFIX, read_object, read_whole
from ups.record.identity import RunIdentity
from ups.record.manifest import COMMITTED_NAME, MANIFEST_NAME, Manifest, is_committed, read_manifest
from ups.record.run_dir import RunDir

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
        marker = json.loads(content or b"null")
        found = marker.get("manifest_sha256") if isinstance(marker, dict) else None
        return found if isinstance(found, str) and re.fullmatch(r"[0-9a-f]{64}", found) else ""
    return ""


def steps_in(bucket: Bucket) -> dict[int, str]:
    """Step -> manifest hash of each checkpoint in the bucket that carries a marker, newest first."""
    marked = [_CHECKPOINT.fullmatch(name) for name in names(bucket, "checkpoints")]
    steps = sorted({int(m.group(2)) for m in marked if m is not None and m.group(3) == COMMITTED_NAME}, reverse=True)
    found = {step: committed_in(bucket, step_folder(step)) for step in steps}
    return {step: sha256 for step, sha256 in found.items() if sha256}


def identity_in(bucket: Bucket) -> RunIdentity | None:
    """The identity of the run whose copy is in the bucket, None if there is none."""
    content = get(bucket, RunDir.run_json.name, MAX_RUN_BYTES)
    try:
        document = json.loads(content) if content is not None else None
    except (ValueError, RecursionError):
        return None
    return RunIdentity.from_json(document.get("identity")) if isinstance(document, dict) else None


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
        sha256 = self._bundle_here()
        if sha256 and sha256 != self._bundle:
            self._send(RunDir(self._run_dir).bundle, RunDir.bundle.name, read_manifest(RunDir(self._run_dir).bundle))
            self._bundle = sha256
            return True
        return False

    def send_record(self) -> None:
        """Bring the files of the record that have changed into the bucket, run.json last."""
        paths = [path for path in self._run_dir.iterdir() if path.is_file()]
        paths += [path for folder in _FOLDERS for path in (self._run_dir / folder).rglob("*") if path.is_file()]
        found = {path.relative_to(self._run_dir).as_posix(): path for path in sorted(paths)}
        wanted = [name for name in found if RECORD.fullmatch(name)]
        document = read_object(RunDir(self._run_dir).run_json)
        identity = RunIdentity.from_json((document or {}).get("identity"))
        if document is None or identity is None or RunDir.config.name not in wanted:
            return  # the run has not begun
        for name in [*wanted, RunDir.run_json.name]:
            content = self._content(found.get(name, self._run_dir / name))
            sha256 = hashlib.sha256(content).hexdigest()
            if self._record.get(name) == sha256:
                continue
            if name == RunDir.run_json.name:
                self._unmark_contradicted(content)
            put(self._bucket, name, content)
            self._record[name] = sha256

    def _content(self, path: Path) -> bytes:
        try:
            return read_whole(path, MAX_RECORD_BYTES)
        except (OSError, ValueError) as error:
            raise BucketError(f"{path} cannot be copied: {error}") from error

    def _open(self) -> None:
        steps = steps_in(self._bucket)
        other = identity_in(self._bucket)
        mine = RunIdentity.from_json((read_object(RunDir(self._run_dir).run_json) or {}).get("identity"))
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
        found = {}
        for step, path in list_checkpoints(self._run_dir):
            with contextlib.suppress(UpsError, OSError):  # it is being removed or replaced
                if not path.is_symlink() and is_committed(path):
                    found[step] = read_manifest(path).sha256
        return found

    def _bundle_here(self) -> str:
        with contextlib.suppress(UpsError, OSError):
            return read_manifest(RunDir(self._run_dir).bundle).sha256
        return ""

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
