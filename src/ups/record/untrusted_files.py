"""What is read from a run directory that may be untrusted, and how its words are shown.

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
# Of a run.json, on a disk or in a bucket: a page of all runs would wait seconds for a larger one.
MAX_RUN_BYTES = 8 * 2**20
# Nothing that ups writes is nested deeper than ten levels; whoever walks a document by recursion relies on a limit.
MAX_JSON_DEPTH = 100


@contextlib.contextmanager
def open_regular(path: Path, *, follow_link: bool = False) -> Iterator[BinaryIO | None]:
    """A regular file for reading; None for a pipe, a device or a directory, without waiting. Raises OSError.

    follow_link: for a file that a person named; inside a directory of unknown origin a link is refused.
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


def read_whole(path: Path, limit: int) -> bytes:
    """The content of a regular file. Raises OSError, or ValueError for other files and for more than `limit` bytes."""
    with open_regular(path) as file:
        if file is None:
            raise ValueError("it is not a regular file")
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if size > limit:
            raise ValueError(f"it has {size} bytes, and more than {limit} are not read")
        return file.read(size)


def load_object(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON object from a regular file of bounded size and depth. Raises OSError, or ValueError with the reason."""
    return parse_object(read_whole(path, limit))


def parse_object(content: bytes) -> dict[str, Any]:
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


def is_whole(value: object) -> bool:
    """Whether a value from a document is a whole number of 64 bits, and not true or false."""
    return type(value) is int and -(2**63) <= value < 2**63


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
