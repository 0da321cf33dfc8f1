"""A directory in which something is made over several attempts, held by one process at a time (standard library)."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from ups.errors import ConfigError
from ups.record.atomic import machine_error


@contextlib.contextmanager
def hold_partial(partial: Path, doing: str) -> Iterator[None]:
    """Make and hold a directory: two that fill it at once would do everything twice.

    doing: what another process does that has it, such as `writing PATH`. Raises ConfigError if there is one.
    """
    try:
        partial.mkdir(parents=True, exist_ok=True)
        file = (partial / "lock").open("w")
    except OSError as error:
        raise machine_error(f"cannot write to {partial}", error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another process is {doing}", hint="wait for it, or choose another --out") from error
        yield
