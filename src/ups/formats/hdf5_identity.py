"""The identity of an HDF5 file: its size and a sample of its bytes, because a file of 93 GB takes minutes to hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from ups.buckets.path import data_path
from ups.formats.hdf5_guard import FileKey

BLOCKS = 64
BLOCK_BYTES = 4096


def file_identity(format_name: str, key: FileKey) -> str:
    """Hash of what the file is read as, its size and its sample."""
    size = key[1]
    digest = hashlib.sha256(json.dumps([format_name, size]).encode())
    with data_path(key[0]).open("rb") as file:
        for i in range(BLOCKS):
            file.seek(i * max(0, size - BLOCK_BYTES) // (BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def files_identity(format_name: str, keys: Iterable[FileKey]) -> str:
    """Hash of those of several files, in their order."""
    digest = hashlib.sha256()
    for key in keys:
        digest.update(file_identity(format_name, key).encode())
    return digest.hexdigest()
