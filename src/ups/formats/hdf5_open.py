"""HDF5 files for the library: of this host by name, in a bucket as a file object over cached blocks."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from typing import Any

from ups.buckets.path import BucketPath, data_path


def open_library(path: str) -> Any:
    """An `h5py.File` for reading."""
    import h5py

    found = data_path(path)
    if isinstance(found, BucketPath):
        file = h5py.File(found.open_object(), "r")
        if not _open:
            atexit.register(_close_all)
        _open.add(file)
        return file
    return h5py.File(path, "r", locking=False)


def size_of(path: str) -> int:
    """Bytes of the file."""
    found = data_path(path)
    return found.stat().st_size if isinstance(found, BucketPath) else os.path.getsize(path)


def _close_all() -> None:
    """The library crashes in a file object that it still has open when Python has ended."""
    for file in list(_open):
        with contextlib.suppress(Exception):
            file.close()


_open: weakref.WeakSet[Any] = weakref.WeakSet()
