"""The directory in which the ranks of a supervisor keep their rings: shared memory where there is enough."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from ups.record import process_tree
from ups.record.run_dir import RunDir

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a private directory with a random name is made inside
_PREFIX = "ups-box"
_BOX_BYTES = 2**20  # a ring, what a rank says when it fails, and some space


@contextlib.contextmanager
def box_root(run_dir: Path, ranks: int, name: str = "live") -> Iterator[Path]:
    """A directory for the rings of `ranks`, removed at the end; without enough shared memory `name` inside the run.

    It is locked for as long: containers may share the memory of their host without seeing each other's processes, and
    a lock is seen by all. A number of a process is not.
    """
    sweep_box_roots()
    enough = (
        _SHARED_MEMORY.is_dir()
        and os.access(_SHARED_MEMORY, os.W_OK)
        and _space_for(_SHARED_MEMORY) >= ranks * _BOX_BYTES
    )
    descriptor = None
    if enough:
        root, descriptor = _make_held()
    else:
        root = RunDir(run_dir).blackbox / name
        root.mkdir(parents=True, mode=0o700, exist_ok=True)
        root.chmod(0o700)
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def sweep_box_roots() -> None:
    """Remove rings whose supervisor was killed before it could."""
    for path in _SHARED_MEMORY.glob(f"{_PREFIX}-*-*"):
        owner = path.name.split("-")[2]
        with contextlib.suppress(OSError):
            if not owner.isdigit() or process_tree.is_alive(int(owner)) or path.stat().st_uid != os.getuid():
                continue
            descriptor = _open(path)
            try:
                if _lock(descriptor):
                    shutil.rmtree(path)
            finally:
                os.close(descriptor)


def _make_held() -> tuple[Path, int]:
    """A new directory in shared memory, and the descriptor whose lock says that its owner lives."""
    while True:
        root = _SHARED_MEMORY / f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(8)}"
        root.mkdir(mode=0o700)  # fails if somebody else has made it
        with contextlib.suppress(FileNotFoundError):  # swept before it was locked: another one
            descriptor = _open(root)
            if _lock(descriptor) and root.exists():
                return root, descriptor
            os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _space_for(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
