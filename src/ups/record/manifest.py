"""SHA-256 manifests of directories, and their atomic commit (standard library only).

A committed directory holds `MANIFEST` (size and SHA-256 of every file) and `COMMITTED` (SHA-256 of the manifest). Data
stores, caches, checkpoints and bundles are all published this way. Single files and single renames are in `files.py`.
When to save, what to keep and what to do about a broken directory is left to the callers; a hash shows damage, it does
not authenticate an untrusted file.

Why a kill at any moment leaves the old or the new directory, never a mixture:

1. Everything happens under a temporary name next to the final one: hashes, `MANIFEST`, `COMMITTED`, and an fsync of
   every file and directory. The marker is written *before* the rename, so that the directory is complete when it
   appears and there is one instant of commit.
2. A single system call makes it visible: `rename` when nothing is there, else Linux `renameat2(RENAME_EXCHANGE)`,
   which swaps old and new with no instant without either. File systems without it (NFS, some FUSE) get two renames: old
   aside, new in place; `clean_temporaries`, and the next commit of that name, put the old one back if the writer died
   between the two. Recovery is left to the writer, because a reader that "repairs" would race with a living writer.
3. The parent is synchronized before the old directory is deleted, so that a power cut cannot lose both.
4. Deleting is also a rename to a temporary name first: a half-deleted directory never carries its committed name.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ups.errors import IntegrityError, MachineError, errors_as
from ups.record.files import (
    TEMPORARY_PREFIX,
    exchange,
    machine_errors,
    open_regular,
    parse_object,
    safe_read,
    sync_parents,
    sync_path,
    temporary_name,
    write_file_atomically,
)
from ups.record.text import printable

MANIFEST_NAME = "MANIFEST"
COMMITTED_NAME = "COMMITTED"
# Read whole into memory, and possibly from an untrusted source: a million files fit, a bomb does not.
MAX_MANIFEST_BYTES = 256 * 2**20

_RESERVED = frozenset({MANIFEST_NAME, COMMITTED_NAME})
_ASIDE_PREFIX = ".ups-old."
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_NAMED_DIFFERENCES = 5


class FileHash(NamedTuple):
    """SHA-256 (hexadecimal) and size in bytes of one file."""

    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """The files of a directory by relative path (with `/`), sorted."""

    files: Mapping[str, FileHash]

    @property
    def total_bytes(self) -> int:
        """Sum of the sizes of all files, in bytes."""
        return sum(file.size for file in self.files.values())

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the manifest itself: equal exactly when all names, sizes and contents are equal."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """The canonical stored form: the same files give the same bytes."""
        files = {path: {"sha256": file.sha256, "size": file.size} for path, file in sorted(self.files.items())}
        document = {"files": files, "format": "ups-manifest", "version": 1}
        return (json.dumps(document, indent=0, sort_keys=True) + "\n").encode("ascii")

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Manifest:
        """Parse and check a stored manifest; `where` names it in the IntegrityError."""
        document = _parse_json(content, where)
        files = document.get("files")
        if document.get("format") != "ups-manifest" or document.get("version") != 1 or not isinstance(files, dict):
            raise IntegrityError(f"{where} is not a manifest of version 1")
        checked = {}
        for path, entry in files.items():
            if "\0" in path or path in _RESERVED or not {"", ".", ".."}.isdisjoint(path.split("/")):
                raise IntegrityError(f"{where} names a path outside its directory: {path!r}")
            checked[path] = _checked_hash(entry, f"{where}, {path!r}")
        return cls(dict(sorted(checked.items())))


def write_manifest(directory: Path, known_hashes: Mapping[str, tuple[str, int]] | None = None) -> Manifest:
    """Hash every regular file below `directory`, bring it to disk, and store the result there as MANIFEST.

    Memory is bounded, whatever the file sizes. `known_hashes` (relative path -> (sha256, size)) spares
    reading files that were hashed where they were written: only their presence and size are checked here. Raises
    IntegrityError for a symbolic link or special file, and for a known file that is missing or has another size.
    """
    known = {}
    for path, (sha256, size) in (known_hashes or {}).items():
        known[path] = _checked_hash({"sha256": sha256, "size": size}, f"known hash of {printable(path)}")
    with machine_errors(f"cannot read {directory}"):
        sizes = _list_files(directory)
        wrong = list(_differences(known, {path: size for path, size in sizes.items() if path in known}))
        if wrong:
            raise _difference_error(directory, wrong)
        for path in known:
            sync_path(directory / path)
    hashed = hash_files(directory, sizes.keys() - known.keys())
    manifest = Manifest(dict(sorted({**known, **hashed}.items())))
    write_file_atomically(directory / MANIFEST_NAME, manifest.to_bytes())
    return manifest


def hash_files(directory: Path, paths: Iterable[str]) -> dict[str, FileHash]:
    """Hash files of `directory` and bring them to disk: what a rank does with the files that it wrote itself.

    The fsync belongs here because only the host that wrote a file can flush it to a network file system.
    """
    with machine_errors(f"cannot hash the files of {directory}"):
        return {name: _hash_file(directory / name, sync=True) for name in sorted(paths)}


def make_temporary(final: Path) -> Path:
    """Create an empty temporary directory next to `final`, under a name that `clean_temporaries` recognizes."""
    temporary = temporary_name(final)
    with machine_errors(f"cannot make a directory in {final.parent}"):
        temporary.mkdir(parents=True)
    return temporary


def commit_directory(
    temporary: Path, final: Path, *, known_hashes: Mapping[str, tuple[str, int]] | None = None
) -> Manifest:
    """Publish `temporary` as `final` in one instant; a committed directory of that name is replaced and deleted.

    One writer per `final` at a time. Raises IntegrityError when the files are not what `known_hashes` says or when
    `final` is something that was never committed (it is not ours to delete), MachineError when the disk is full or the
    two are on different file systems; `final` is then as it was, and `temporary` is left for a retry. (Only when the
    very last fsync fails, `final` may be the new directory already: complete, but not certain to survive a power cut.)
    """
    with machine_errors(f"cannot commit {final}"):
        _recover(final)
        replacing = check_replaceable(final)
        (temporary / COMMITTED_NAME).unlink(missing_ok=True)
        clean_temporaries(temporary)  # a killed earlier attempt may have left a half-written MANIFEST to be hashed
        manifest = write_manifest(temporary, known_hashes)
        for folder, _, _ in os.walk(temporary, topdown=False):
            sync_path(Path(folder))
        marker = {"format": "ups-committed", "manifest_sha256": manifest.sha256, "version": 1}
        write_file_atomically(temporary / COMMITTED_NAME, (json.dumps(marker, sort_keys=True) + "\n").encode())
        if replacing:
            _replace(temporary, final)
        else:
            os.rename(temporary, final)
            sync_parents(temporary, final)
    return manifest


def is_committed(directory: Path) -> bool:
    """Whether `directory` carries a marker that fits its manifest; file contents are for `verify` to judge.

    A marker that exists but cannot be read is an IntegrityError: "no permission" must not look like "no checkpoint".
    """
    try:
        read_manifest(directory)
    except _NotCommittedError:
        return False
    return True


def verify(directory: Path, *, deep: bool = True) -> Manifest:
    """Compare a committed directory with its manifest: names and sizes, with `deep` also every byte.

    Raises IntegrityError naming each file that differs (the first few) and how: missing, extra, size or hash.
    """
    manifest = read_manifest(directory)
    try:
        in_bucket = getattr(directory, "file_sizes", None)  # of ups.buckets.path
        listed = _list_files(directory) if in_bucket is None else in_bucket(manifest.files)
        sizes = {path: size for path, size in listed.items() if path not in _RESERVED}
        wrong = list(_differences(manifest.files, sizes))
        if deep:
            same_size = [path for path, file in manifest.files.items() if sizes.get(path) == file.size]
            for path in same_size:
                actual, expected = _hash_file(directory / path, sync=False).sha256, manifest.files[path].sha256
                if actual != expected:
                    wrong.append(f"{printable(path)}: hash is {actual[:12]}..., committed was {expected[:12]}...")
    except OSError as error:
        raise IntegrityError(f"{directory} cannot be read: {error.strerror} ({error.filename})") from error
    if wrong:
        raise _difference_error(directory, wrong)
    return manifest


def remove_directory(directory: Path) -> None:
    """Delete a committed directory so that a kill in between never leaves a half of it under its name."""
    doomed = temporary_name(directory)
    with machine_errors(f"cannot remove {directory}"):
        os.rename(directory, doomed)
        sync_path(directory.parent)
        shutil.rmtree(doomed)


def clean_temporaries(parent: Path) -> list[Path]:
    """Undo what dead writers left in `parent`: delete temporaries, put back what was moved aside; returns what went.

    Only for the one writer of `parent`.
    """
    removed: list[Path] = []
    with machine_errors(f"cannot clean {parent}"):
        names = sorted(os.listdir(parent)) if parent.is_dir() else []  # nothing was ever written: nothing to clean
        for name in names:
            if name.startswith(_ASIDE_PREFIX):
                _recover(parent / name.removeprefix(_ASIDE_PREFIX))
        for name in names:
            path = parent / name
            if name.startswith(TEMPORARY_PREFIX):
                remove_path(path)
                removed.append(path)
    return removed


class _NotCommittedError(IntegrityError):
    """The marker or the manifest is absent or does not fit; only this module distinguishes it from other damage."""


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a committed directory; raises IntegrityError if it is not committed."""
    marker = _read_small(directory / COMMITTED_NAME)
    content = _read_small(directory / MANIFEST_NAME)
    if marker is None or content is None:
        absent = COMMITTED_NAME if marker is None else MANIFEST_NAME
        raise _NotCommittedError(f"{directory} is not committed: it has no {absent} file")
    try:
        expected = _parse_json(marker, str(directory / COMMITTED_NAME)).get("manifest_sha256")
        if hashlib.sha256(content).hexdigest() != expected:
            raise IntegrityError(f"{directory}: {MANIFEST_NAME} is not the one that {COMMITTED_NAME} names")
        return Manifest.from_bytes(content, str(directory / MANIFEST_NAME))
    except IntegrityError as error:
        raise _NotCommittedError(error.message, hint=error.hint) from error


def _read_small(path: Path) -> bytes | None:
    try:
        return safe_read(path, MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _parse_json(content: bytes, where: str) -> dict[str, object]:
    with errors_as(IntegrityError, f"{where} cannot be used", ValueError):
        return parse_object(content)


def _checked_hash(entry: object, where: str) -> FileHash:
    if isinstance(entry, dict):
        sha256, size = entry.get("sha256"), entry.get("size")
        if isinstance(sha256, str) and _SHA256.fullmatch(sha256) and type(size) is int and size >= 0:
            return FileHash(sha256, size)
    raise IntegrityError(f"{where}: not a SHA-256 and a size")


def _list_files(directory: Path) -> dict[str, int]:
    """Relative path -> size of every regular file but our own two; anything that is no file or folder is refused."""
    sizes: dict[str, int] = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(directory / folder) as entries:
            for entry in entries:
                path = f"{folder}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{path}/")
                elif not entry.is_file(follow_symlinks=False):
                    kind = "a symbolic link" if entry.is_symlink() else "a special file"
                    raise IntegrityError(
                        f"{directory}: {printable(path)} is {kind}, and only regular files can be committed",
                        hint="copy the file that it stands for into the directory",
                    )
                elif path not in _RESERVED:
                    sizes[path] = entry.stat(follow_symlinks=False).st_size
    return dict(sorted(sizes.items()))


def _differences(expected: Mapping[str, FileHash], sizes: Mapping[str, int]) -> Iterator[str]:
    for path, file in expected.items():
        if path not in sizes:
            yield f"{printable(path)}: missing"
        elif sizes[path] != file.size:
            yield f"{printable(path)}: size is {sizes[path]} bytes, committed was {file.size}"
    for path in sizes:
        if path not in expected:
            yield f"{printable(path)}: extra, not in the manifest"


def _difference_error(directory: Path, wrong: list[str]) -> IntegrityError:
    more = f"; and {len(wrong) - _MAX_NAMED_DIFFERENCES} more" if len(wrong) > _MAX_NAMED_DIFFERENCES else ""
    return IntegrityError(
        f"{directory}: {'; '.join(wrong[:_MAX_NAMED_DIFFERENCES])}{more}",
        hint="do not use this directory; take an older one or make it again",
    )


def _hash_file(path: Path, *, sync: bool) -> FileHash:
    with open_regular(path) as file:
        if file is None:
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        if sync and not hasattr(path, "open_object"):
            os.fsync(file.fileno())
        return FileHash(sha256, file.tell())


def _aside_name(final: Path) -> Path:
    return final.with_name(f"{_ASIDE_PREFIX}{final.name}")


def check_replaceable(final: Path) -> bool:
    """Whether `final` is an older commit to be replaced; refuses what cannot be one."""
    if final.is_symlink() or (final.exists() and not final.is_dir()):
        raise IntegrityError(f"{final} exists and is not a directory", hint="move it away or choose another name")
    if not final.exists() or not any(final.iterdir()):
        return False  # rename takes the place of an empty directory, too
    if not any((final / name).exists() for name in _RESERVED):
        raise IntegrityError(
            f"{final} holds files that were never committed, and is not replaced",
            hint="move it away or choose another name",
        )
    return True


def _replace(temporary: Path, final: Path) -> None:
    if exchange(temporary, final):
        sync_parents(temporary, final)
        _remove_replaced(temporary)  # the old directory has the temporary name now
        return
    aside = _aside_name(final)
    os.rename(final, aside)
    try:
        os.rename(temporary, final)
    except OSError:
        os.rename(aside, final)
        raise
    sync_parents(temporary, final)
    _remove_replaced(aside)


def _remove_replaced(old: Path) -> None:
    # The commit has succeeded; a reader on NFS that still holds a file of the old directory must not turn it into a
    # failure. What is left has a name that clean_temporaries knows.
    with contextlib.suppress(MachineError):
        remove_directory(old)


def _recover(final: Path) -> None:
    """Finish a replacement by two renames whose writer died: the old goes back if the new is not in place."""
    aside = _aside_name(final)
    if not aside.is_dir():
        return
    if is_committed(aside) and not is_committed(final):
        if check_replaceable(final):
            remove_directory(final)
        os.rename(aside, final)
        sync_path(final.parent)
    else:
        remove_directory(aside)


def remove_path(path: Path) -> None:
    """Delete a directory with what is in it, a file or a link; what is not there is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
