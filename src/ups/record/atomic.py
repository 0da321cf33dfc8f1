"""One step on a file system that happens whole or not at all, and reaches the disk (standard library only).

Directories with hashes and their commit are in `manifest.py`, which also deletes the temporaries of dead writers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

from ups.errors import DiskFullError, MachineError

TEMPORARY_PREFIX = ".ups-tmp."
# What a file system refuses for reasons that no program can mend.
NOT_ALLOWED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT})


def write_file_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or a restart after a kill, sees the old content or all of the new."""
    temporary = temporary_name(path)
    try:
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
    except OSError as error:
        raise machine_error(f"cannot write {path}", error) from error


def mode_by_umask(path: Path) -> None:
    """Give a file that a library made private the mode that other files get: what the umask of the process leaves."""
    mask = 0o022
    with contextlib.suppress(OSError, ValueError):
        # Reading it is the only way that does not change it for other threads for a moment.
        lines = Path("/proc/self/status").read_text().splitlines()
        mask = next((int(line.split()[1], 8) for line in lines if line.startswith("Umask:")), mask)
    path.chmod(0o666 & ~mask)


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
    elsewhere = "choose a place that you may write to, or change its permissions"
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


def not_allowed(error: OSError) -> MachineError:
    """An error of a file system (one of NOT_ALLOWED) as one line: which file, why, what to do."""
    found = machine_error(f"cannot use {os.fsdecode(error.filename)}", error)
    found.__cause__ = error  # its traceback is kept
    return found
