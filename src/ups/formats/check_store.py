"""The checker of docs/store-format.md: says what in a store is not as the specification wants it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from ups.buckets.path import data_path
from ups.errors import DataError, IntegrityError
from ups.formats.shards import ArrayLayout, drop_files, open_shard
from ups.formats.zarr_store import StoreReader
from ups.record.manifest import verify

MAX_FILES = 1_000_000


def check_store(path: str | Path, *, deep: bool = True) -> list[str]:
    """What is wrong with a store, one sentence each; empty if it follows the specification.

    Checks metadata, arrays against the task, every shard's index, every chunk's place and size, and the manifest:
    names and sizes of all files, with `deep` also every byte (the whole store is read once).
    """
    root = data_path(path)
    try:
        reader = StoreReader(root)
    except DataError as error:
        return [error.message]
    problems: list[str] = []
    try:
        num_files = len(verify(root, deep=deep).files)
    except IntegrityError as error:
        problems.append(error.message)
        num_files = MAX_FILES
    for arrays in reader.layouts.values():
        for layout in arrays.values():
            # A shape can claim more files than could ever be looked at one by one.
            needed = math.prod(layout.files_per_axis)
            if needed > num_files:
                problems.append(f"array {layout.directory} needs {needed} files; the store has {num_files} or fewer")
            else:
                problems += _check_files(layout)
    drop_files(str(root.absolute()))
    return problems


def _check_files(layout: ArrayLayout) -> list[str]:
    """Opens every file of an array and finds every chunk that the shape needs."""
    problems: list[str] = []
    for position in np.ndindex(*layout.files_per_axis):
        try:
            shard = open_shard(layout, position)
            start = np.multiply(position, layout.shard_shape)  # of its first element, along each axis
            for chunk, inside in enumerate(np.ndindex(*layout.chunks_per_shard)):
                if (start + np.multiply(inside, layout.chunk_shape) < layout.shape).all():
                    shard.require(chunk)
        except DataError as error:
            problems.append(error.message)
    return problems
