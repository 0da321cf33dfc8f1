"""What is read from a run directory that may be a stranger's, and how its words are shown.

A file there may be a link to something private, a device without an end, or a pipe that never answers; a name or a log
may hold sequences that write to the terminal.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MAX_JSON_BYTES = 64 * 2**20


@contextlib.contextmanager
def open_regular(path: Path, *, follow_link: bool = False) -> Iterator[BinaryIO | None]:
    """A regular file for reading; None for a pipe, a device or a directory, without waiting. Raises OSError.

    follow_link: for a file that a person named; inside a directory of unknown origin a link is refused.
    """
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
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            return file.read(limit)
    except (OSError, ValueError):
        return None


def read_object(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any] | None:
    """A JSON object from a regular file; None if there is none, or it is larger than `limit` bytes."""
    content = read_end(path, limit + 1)
    if content is None or len(content) > limit:
        return None
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def inside(directory: Path, name: str) -> Path | None:
    """The path of a file that a document names, None unless it lies in `directory`."""
    try:
        path = (directory / name).resolve()
        return path if path.is_relative_to(directory.resolve()) else None
    except (OSError, ValueError, RuntimeError):
        return None


def printable(text: str, keep: str = "") -> str:
    """`text` with control characters escaped, but for those in `keep`."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
