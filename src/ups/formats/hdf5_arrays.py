"""Values from surveyed HDF5 datasets: contiguous ones are mapped, chunked ones go through the HDF5 library.
Of a file in a bucket, contiguous ones are read range by range.

A region is one slice per axis. Deflated chunks are inflated here with a bound, because the filter of the library grows
its buffer as far as a hostile chunk asks for; the ratio of the other filters is bounded by their format.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ups.buckets.address import is_address
from ups.buckets.path import data_path
from ups.errors import DataError, UpsError
from ups.formats.base import Array
from ups.formats.hdf5_guard import FileKey, file_key
from ups.formats.hdf5_open import open_library
from ups.formats.hdf5_survey import ArraySurvey
from ups.formats.object_bytes import ObjectBytes
from ups.formats.shards import ProcessCache, map_file

Region = tuple[slice, ...]
MAX_OPEN_MAPS = 64
MAX_OPEN_LIBRARY_FILES = 32


def read_region(key: FileKey, array: ArraySurvey, region: Region) -> Array:
    """Values of a region (slices with plain bounds inside the shape); a read-only view where the data is mapped."""
    if array.column_major:
        return read_region(key, replace(array, shape=array.shape[::-1], column_major=False), region[::-1]).T
    if array.offset is not None and is_address(key[0]):
        found = _objects.get((key[0], ()), lambda: _object_unchanged(key))
        return _read_ranges(found, array, region)
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
    except UpsError:
        raise
    except Exception as error:
        raise DataError(f"{key[0]}: dataset '{array.name}' cannot be read: {str(error)[:200]}") from error


def drop_hdf5(path: str) -> None:
    """Close what this process has open of a file."""
    _maps.drop(path)
    _objects.drop(path)
    _files.drop(path)


def _map_unchanged(key: FileKey) -> Array:
    _check_unchanged(key)
    return map_file(key[0], follow_link=True)


def _open_unchanged(key: FileKey) -> Any:
    _check_unchanged(key)
    return open_library(key[0])


def _object_unchanged(key: FileKey) -> ObjectBytes:
    _check_unchanged(key)
    return ObjectBytes(key[0])


def _check_unchanged(key: FileKey) -> None:
    if not data_path(key[0]).exists() or file_key(key[0]) != key:
        raise DataError(f"{key[0]} changed since it was checked", hint="open it again when nobody writes to it")


def bring_region(key: FileKey, array: ArraySurvey, region: Region) -> list[str]:
    """Bring the bytes of a region into the cache of this host, if the file is in a bucket; returns its blocks there."""
    if not is_address(key[0]):
        return []
    found = _objects.get((key[0], ()), lambda: _object_unchanged(key))
    if array.offset is not None:
        return [block for _, start, stop in _ranges(array, region) for block in found.bring(start, stop)]
    dataset = _files.get((key[0], ()), lambda: _open_unchanged(key))[array.name]
    wanted = [range(s.start, s.stop, s.step or 1) for s in region]
    grid = [range(r.start // c, r[-1] // c + 1) for r, c in zip(wanted, array.chunks or (), strict=True)]
    blocks: list[str] = []
    for place in itertools.product(*grid):
        chunk = dataset.id.get_chunk_info_by_coord(tuple(p * c for p, c in zip(place, array.chunks or (), strict=True)))
        if chunk.byte_offset is not None:
            blocks += found.bring(chunk.byte_offset, chunk.byte_offset + chunk.size)
    return blocks


def _ranges(array: ArraySurvey, region: Region) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """(place in the region, first byte, end) of every run of bytes that a region of a contiguous array consists of.

    The place has an index for each axis before the last one that is cut, and for that one too where it has a step.
    """
    assert array.offset is not None
    itemsize = np.dtype(array.dtype).itemsize
    wanted = [range(s.start, s.stop, s.step or 1) for s in region]
    cut = max((i for i, (r, n) in enumerate(zip(wanted, array.shape, strict=True)) if len(r) != n), default=-1)
    single = cut >= 0 and wanted[cut].step != 1 and len(wanted[cut]) > 1
    outer = wanted[: cut + 1] if single else wanted[: max(cut, 0)]
    strides = [itemsize * math.prod(array.shape[i + 1 :]) for i in range(len(array.shape))]
    for place in itertools.product(*(range(len(r)) for r in outer)):
        start = array.offset + sum(outer[i][p] * strides[i] for i, p in enumerate(place))
        if single or cut < 0:
            length = strides[cut] if single else itemsize * math.prod(array.shape)
        else:
            start += wanted[cut].start * strides[cut]
            length = len(wanted[cut]) * strides[cut]
        yield place, start, start + length


def _read_ranges(found: ObjectBytes, array: ArraySurvey, region: Region) -> Array:
    out = np.empty(tuple(len(range(s.start, s.stop, s.step or 1)) for s in region), array.dtype)
    for place, start, stop in _ranges(array, region):
        out[place] = found[start:stop].view(array.dtype).reshape(out[place].shape)
    return out


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
_objects: ProcessCache[ObjectBytes] = ProcessCache(MAX_OPEN_MAPS)
_files: ProcessCache[Any] = ProcessCache(MAX_OPEN_LIBRARY_FILES)
