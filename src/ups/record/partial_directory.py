"""A directory in which something is made over several attempts, held by one process at a time (standard library)."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ups.errors import ConfigError, MachineError
from ups.record.atomic import machine_error


@contextlib.contextmanager
def hold_partial(partial: Path, doing: str) -> Iterator[None]:
    """Make and hold a directory: two that fill it at once would do everything twice.

    doing: what another process does that has it, such as `writing PATH`. Raises ConfigError if there is one, and
    MachineError where a link stands in place of the directory or its lock: it would lead to files of somebody else.
    """
    lock = partial / "lock"
    for path in (partial, lock):
        if path.is_symlink():
            raise MachineError(f"{path} is a link, and nothing is written through it", hint="remove it")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        # Neither emptied nor followed: it may have become a link by now.
        file = os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666))
    except OSError as error:
        raise machine_error(f"cannot write to {partial}", error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another process is {doing}", hint="wait for it, or choose another --out") from error
        yield
