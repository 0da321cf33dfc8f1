"""Whether data is still the data that a run was started with: sizes, a sample of the bytes, modification times.

Reading 15 TB before every start is out of the question. So: the sizes of all files and a fixed sample of blocks are
hashed (a few megabytes, whatever the size), which notices data that was replaced. Files of a store that were modified
since the run started are compared with the store's manifest byte by byte, up to a limit. What goes unnoticed: a few
bytes changed in a large HDF5 file outside the sampled blocks, or in a store by something that sets the old modification
time again. `ups data validate` reads everything.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from ups.buckets.path import BucketPath, data_path
from ups.errors import DataChangedError, DataError, IntegrityError, errors_as
from ups.record.manifest import COMMITTED_NAME, MANIFEST_NAME, hash_files, read_manifest

NUM_BLOCKS = 256
BLOCK_BYTES = 16 << 10
# Read in about a second from a local disk.
MAX_COMPARED_BYTES = 1 << 30


def content_sample(paths: Sequence[str | Path]) -> tuple[str, int]:
    """SHA-256 over the sizes of all files and a sample of their bytes, and the latest modification time in nanoseconds.

    The place of the files does not matter to the hash, nor does the time.
    """
    listed = _files(paths)
    files = [(name, path, status.st_size) for name, path, status in listed]
    total = sum(size for _, _, size in files)
    digest = hashlib.sha256(json.dumps([[name, size] for name, _, size in files]).encode())
    # Blocks evenly over all bytes as if they were one file, the last one included; less than that is read whole.
    step = max(BLOCK_BYTES, total // NUM_BLOCKS)
    blocks = [*range(0, total, step), max(total - BLOCK_BYTES, 0)]
    begin, at = 0, 0
    for _, path, size in files:
        end = begin + size
        pieces = []
        while at < len(blocks) and blocks[at] < end:
            pieces.append((max(blocks[at], begin) - begin, min(blocks[at] + BLOCK_BYTES, end) - begin))
            if blocks[at] + BLOCK_BYTES > end:
                break  # it continues in the next file
            at += 1
        begin = end
        if pieces:
            _add(digest, path, pieces)
    return digest.hexdigest(), max((status.st_mtime_ns for _, _, status in listed), default=0)


def _add(digest: hashlib._Hash, path: Path, pieces: list[tuple[int, int]]) -> None:
    try:
        with path.open("rb") as file:
            for start, stop in pieces:
                file.seek(start)
                digest.update(file.read(stop - start))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def compare_changed(paths: Sequence[str | Path], since_ns: int, limit_bytes: int = MAX_COMPARED_BYTES) -> None:
    """Compare files of a store that were modified after `since_ns` with its manifest, the first `limit_bytes` of them.

    Raises DataChangedError. A file that is no store has no manifest, and is left to its sample.
    """
    for root in map(data_path, paths):
        if not (root / MANIFEST_NAME).is_file():
            continue
        left = limit_bytes
        with errors_as(DataChangedError, f"{root} cannot be compared with its manifest", OSError, IntegrityError):
            manifest = read_manifest(root)
            for name, expected in manifest.files.items():
                if (root / name).stat().st_mtime_ns <= since_ns or expected.size > left:
                    continue
                left -= expected.size
                if hash_files(root, [name])[name] != expected:
                    raise DataChangedError(
                        f"{root / name} was modified after the run started, and is not what was committed",
                        hint="bring the old data back, or start a new run: --set run.dir=PATH",
                    )


def _files(paths: Sequence[str | Path]) -> list[tuple[str, Path, os.stat_result]]:
    """(name without its place, path, status) of every file, in a fixed order."""
    listed = []
    try:
        for number, root in enumerate(map(data_path, paths)):
            if not root.is_dir():
                listed.append((str(number), root, root.stat()))
                continue
            listed += [(f"{number}/{name}", root / name, (root / name).stat()) for name in _names(root)]
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error
    return sorted(listed)


def _names(root: Path) -> list[str]:
    """Files below a directory; of a store those that it was committed with (a network file system adds its own)."""
    if (root / MANIFEST_NAME).is_file():
        try:
            return [MANIFEST_NAME, COMMITTED_NAME, *read_manifest(root).files]
        except IntegrityError as error:
            raise DataError(f"store {error.message}") from error
    if isinstance(root, BucketPath):
        return [str(path.relative_to(root)) for path in root.rglob("*")]
    return [str((Path(folder) / name).relative_to(root)) for folder, _, names in os.walk(root) for name in names]
