"""Files: reading ones that may be damaged or hostile, writing ones that appear whole or not at all, holding folders.

Directories with hashes and their commit are in `manifest.py`. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ups.errors import ConfigError, DiskFullError, MachineError, RunDirectoryLostError
from ups.record.processes import status_fields

TEMPORARY_PREFIX = ".ups-tmp."
# What a file system refuses for reasons that no program can mend.
NOT_ALLOWED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT})


def write_file_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a restart after a kill, sees the old content or all of the new."""
    temporary = temporary_name(path)
    with machine_errors(f"cannot write {path}"):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_path(path.parent)


def mode_by_umask(path: Path) -> None:
    """Give a file that a library made private the mode that other files get: what the umask of the process leaves."""
    # Reading it is the only way that does not change it for other threads for a moment.
    path.chmod(0o666 & ~int(status_fields("self").get("Umask", "022"), 8))


def temporary_name(final: Path) -> Path:
    """A fresh name next to `final`, which `manifest.clean_temporaries` recognizes."""
    return final.with_name(f"{TEMPORARY_PREFIX}{final.name}.{secrets.token_hex(6)}")


def exchange(first: Path, second: Path) -> bool:
    """Swap two directories in one instant; False where the C library or the file system cannot."""
    import ctypes

    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    at_fdcwd, rename_exchange = -100, 2
    if renameat2(at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), rename_exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def sync_path(path: Path) -> None:
    """Bring a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network and FUSE file systems cannot synchronize a directory, and say so with EINVAL.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def sync_parents(*paths: Path) -> None:
    """Bring the directories that hold `paths` to the disk: a rename lives in them."""
    for parent in {path.parent for path in paths}:
        sync_path(parent)


def machine_error(what: str, error: OSError) -> MachineError:
    """Say what could not be done, why, and what to do about it."""
    elsewhere = "choose a directory that you may write to, or change its permissions"
    hints = {
        errno.EACCES: elsewhere,
        errno.EPERM: elsewhere,
        errno.EROFS: elsewhere,
        errno.ENOSPC: "free some space on the disk, or choose another one",
        errno.EDQUOT: "your disk quota is used up: free some space, or choose another disk",
        errno.EFBIG: "a file grew beyond the limit of the process (ulimit -f) or of the file system",
        errno.EXDEV: "the temporary directory must be on the same file system; make it with make_temporary",
    }
    kind = DiskFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else MachineError
    return kind(f"{what}: {error.strerror or error}", hint=hints.get(error.errno or 0, ""))


@contextlib.contextmanager
def machine_errors(what: str) -> Iterator[None]:
    """In this block an OSError becomes the `machine_error` with these words."""
    try:
        yield
    except OSError as error:
        raise machine_error(what, error) from error


def not_allowed(error: OSError) -> MachineError:
    """An error of a file system (one of NOT_ALLOWED) as one line: which file, why, what to do."""
    readable = machine_error(f"cannot use {os.fsdecode(error.filename)}", error)
    readable.__cause__ = error  # its traceback is kept
    return readable


MAX_JSON_BYTES = 64 * 2**20
# Of a run.json, on a disk or in a bucket: a page of all runs would wait seconds for a larger one.
MAX_RUN_BYTES = 8 * 2**20
# Nothing that ups writes is nested deeper than ten levels; whoever walks a document by recursion relies on a limit.
MAX_JSON_DEPTH = 100


@contextlib.contextmanager
def open_regular(path: Path, *, follow_link: bool = False) -> Iterator[BinaryIO | None]:
    """A regular file for reading; None for a pipe, a device or a directory, without waiting. Raises OSError.

    follow_link: for a file that the user named; inside a directory of unknown origin a link is refused.
    """
    in_bucket = getattr(path, "open_object", None)  # of ups.buckets.path: there are neither links nor devices
    if in_bucket is not None:
        with in_bucket() as file:
            yield file
        return
    links = 0 if follow_link else os.O_NOFOLLOW
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | links)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        yield None
        return
    with os.fdopen(descriptor, "rb") as file:
        yield file


def read_end(path: Path, limit: int) -> bytes | None:
    """The last `limit` bytes of a regular file; None for anything else, and for what cannot be read."""
    try:
        with open_regular(path) as file:
            if file is None:
                return None
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - limit))
            return file.read(min(size, limit))  # `read` sets aside as much memory as it is asked for
    except (OSError, ValueError):
        return None


def read_from(path: Path, offset: int, limit: int = 1 << 20) -> bytes:
    """What a file that grows has from `offset` on, at most `limit` bytes; nothing if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(limit)
    except OSError:
        return b""


def safe_read(path: Path, limit: int, *, follow_link: bool = False) -> bytes:
    """The content of a regular file. Raises OSError, or ValueError for other files and for more than `limit` bytes."""
    with open_regular(path, follow_link=follow_link) as file:
        if file is None:
            raise ValueError("it is not a regular file")
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size > limit:
            raise ValueError(f"it has {size} bytes, and more than {limit} are not read")
        return file.read(size)


def load_object(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON object from a regular file of bounded size and depth. Raises OSError, or ValueError with the reason."""
    return parse_object(safe_read(path, limit))


def parse_object(content: str | bytes) -> dict[str, Any]:
    """A JSON object of bounded depth. Raises ValueError with the reason."""
    try:
        document = json.loads(content)
    except RecursionError:
        raise ValueError("its JSON is nested too deep") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {str(error)[:200]}") from None
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    if not _shallow(document):
        raise ValueError("its JSON is nested too deep")
    return document


def _shallow(document: dict[str, Any]) -> bool:
    """Whether nothing lies deeper than MAX_JSON_DEPTH; level by level, so that the check itself needs no stack."""
    level: list[Any] = [document]
    for _ in range(MAX_JSON_DEPTH):
        inner = [value.values() if isinstance(value, dict) else value for value in level]
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return True
    return False


def read_object(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any] | None:
    """`load_object`, or None for whatever is not one."""
    try:
        return load_object(path, limit)
    except (OSError, ValueError):
        return None


def is_number(value: object) -> bool:
    """Whether a value from a document is a finite number: JSON has true, and Python reads NaN and 1e999 from it."""
    # A limit for whole numbers, too: those above 1e308 are no float.
    return type(value) in (int, float) and -1e300 < value < 1e300  # type: ignore[operator]


def inside(directory: Path, name: str) -> Path | None:
    """The path of a file that a document names, None unless it lies in `directory`."""
    try:
        path = (directory / name).resolve()
        return path if path.is_relative_to(directory.resolve()) else None
    except (OSError, ValueError, RuntimeError):
        return None


class HeldDirectory:
    """Keeps a directory open, so that its number is not reused by another one that is made in its place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def lost(self) -> str:
        """'' while the path leads to the same directory, else what happened to it.

        A file system that does not answer properly at the moment is no proof that the directory is gone.
        """
        try:
            now = os.stat(self.path)
        except OSError as error:
            gone = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
            return f"{self.path} was removed or moved while the run went on" if error.errno in gone else ""
        with contextlib.suppress(OSError):
            if not os.path.samestat(now, os.fstat(self._descriptor)):
                return f"{self.path} was replaced by another directory while the run went on"
        return ""

    def current_path(self) -> Path | None:
        """Where the directory is now; None if it was removed, or cannot be found."""
        try:
            path = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
            return path if os.path.samestat(os.stat(path), os.fstat(self._descriptor)) else None
        except OSError:
            return None

    def check(self) -> None:
        """Raises RunDirectoryLostError if the directory is gone."""
        lost = self.lost()
        if lost:
            raise RunDirectoryLostError(lost, hint="put the directory back where it was, then start the run again")

    def close(self) -> None:
        """Let go of the directory."""
        os.close(self._descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this process alone; False if another has it. Raises OSError where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def hold_partial(partial: Path, doing: str) -> Iterator[None]:
    """Make and hold a directory: two that fill it at once would do everything twice.

    doing: what another process does that has it, such as `writing PATH`. Raises ConfigError if there is one, and
    MachineError where a link stands in place of the directory or its lock: it would lead to files of another user.
    """
    lock = partial / "lock"
    for path in (partial, lock):
        if path.is_symlink():
            raise MachineError(f"{path} is a link, and nothing is written through it", hint="remove it")
    with machine_errors(f"cannot write to {partial}"):
        partial.mkdir(parents=True, exist_ok=True)
        # Neither emptied nor followed: it may have become a link by now.
        file = os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666))
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another process is {doing}", hint="wait for it, or choose another --out") from error
        yield
