"""Values from surveyed HDF5 datasets: contiguous ones are mapped, chunked ones go through the HDF5 library.

A region is one slice per axis. Deflated chunks are inflated here with a bound, because the filter of the library grows
its buffer as far as a hostile chunk asks for; the ratio of the other filters is bounded by their format.
"""

from __future__ import annotations

import itertools
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ups.errors import DataError
from ups.formats.base import Array
from ups.formats.hdf5_guard import FileKey, file_key
from ups.formats.hdf5_survey import ArraySurvey
from ups.formats.shards import ProcessCache, map_file

Region = tuple[slice, ...]
MAX_OPEN_MAPS = 64
MAX_OPEN_LIBRARY_FILES = 32


def read_region(key: FileKey, array: ArraySurvey, region: Region) -> Array:
    """Values of a region (slices with plain bounds inside the shape); a read-only view where the data is mapped."""
    if array.offset is not None:
        count = int(np.prod(array.shape))
        dtype = np.dtype(array.dtype)
        mapped = _maps.get((key[0], ()), lambda: _map_unchanged(key))
        data = mapped[array.offset : array.offset + count * dtype.itemsize]
        return np.asarray(data.view(dtype).reshape(array.shape)[region])
    try:
        dataset = _files.get((key[0], ()), lambda: _open_unchanged(key))[array.name]
        if "deflate" in array.filters:
            return _inflate_region(dataset, array, region)
        return np.asarray(dataset[region])
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{key[0]}: dataset '{array.name}' cannot be read: {str(error)[:200]}") from error


def drop_hdf5(path: str) -> None:
    """Close what this process has open of a file."""
    _maps.drop(path)
    _files.drop(path)


def _map_unchanged(key: FileKey) -> Array:
    _check_unchanged(key)
    return map_file(key[0], follow_link=True)


def _open_unchanged(key: FileKey) -> Any:
    import h5py

    _check_unchanged(key)
    return h5py.File(key[0], "r", locking=False)


def _check_unchanged(key: FileKey) -> None:
    if not Path(key[0]).exists() or file_key(key[0]) != key:
        raise DataError(f"{key[0]} changed since it was checked", hint="open it again when nobody writes to it")


def _inflate_region(dataset: Any, array: ArraySurvey, region: Region) -> Array:
    chunks = array.chunks or ()
    wanted = [range(s.start, s.stop, s.step or 1) for s in region]
    out = np.empty(tuple(len(r) for r in wanted), array.dtype)
    grid = [range(r.start // c, r[-1] // c + 1) for r, c in zip(wanted, chunks, strict=True)]
    for place in itertools.product(*grid):
        corner = tuple(p * c for p, c in zip(place, chunks, strict=True))
        target, source = [], []
        for r, start, length in zip(wanted, corner, chunks, strict=True):
            first = max(0, -(-(start - r.start) // r.step))
            last = min(len(r), -(-(start + length - r.start) // r.step))
            target.append(slice(first, last))
            source.append(slice(r.start + first * r.step - start, r.start + (last - 1) * r.step - start + 1, r.step))
        if any(t.stop <= t.start for t in target):
            continue
        out[tuple(target)] = _inflate(dataset, array, corner)[tuple(source)]
    return out


def _inflate(dataset: Any, array: ArraySurvey, corner: tuple[int, ...]) -> Array:
    chunks = array.chunks or ()
    dtype = np.dtype(array.dtype)
    expected = int(np.prod(chunks)) * dtype.itemsize
    mask, stored = dataset.id.read_direct_chunk(corner)
    applied = {name for i, name in enumerate(array.filters) if not mask >> i & 1}
    data = bytes(stored)
    if "deflate" in applied:
        try:
            data = zlib.decompressobj().decompress(data, expected + 1)
        except zlib.error as error:
            raise DataError(f"chunk {corner} of '{array.name}' is damaged: {error}") from error
    if len(data) != expected:
        raise DataError(f"chunk {corner} of '{array.name}' holds {len(data)} bytes or more instead of {expected}")
    raw = np.frombuffer(data, np.uint8)
    if "shuffle" in applied:
        raw = np.ascontiguousarray(raw.reshape(dtype.itemsize, -1).T)
    return raw.view(dtype).reshape(chunks)


_maps: ProcessCache[Array] = ProcessCache(MAX_OPEN_MAPS)
_files: ProcessCache[Any] = ProcessCache(MAX_OPEN_LIBRARY_FILES)
