"""Zarr groups that others wrote (versions 2 and 3) as named arrays, local files only.

The names of all codecs are checked before the library sees the metadata: version 2 has codecs that run code (pickle).
The library then parses the metadata and reads values. It opens arrays one by one, never a group: a group may carry a
second copy of the metadata of its arrays ("consolidated"), which would count instead. It would follow links, and unpack
a small chunk to any size: both are refused here. Dimensions are named as xarray writes them.
"""

from __future__ import annotations

import base64
import bz2
import gzip
import io
import lzma
import math
import os
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.abc.store import SuffixByteRequest
from zarr.storage import LocalStore

from ups.errors import DataError, errors_as
from ups.formats.base import Array
from ups.formats.container import Attribute, Container, Variable, ambiguous, listed, numbers_and_texts
from ups.formats.hdf5 import Region
from ups.formats.shards import MISSING, ProcessCache, read_index, zstd_content_bytes
from ups.record.files import is_number, load_object

MAX_ARRAYS = 4096
MAX_ENTRIES = 5_000_000
MAX_CHUNK_BYTES = 1 << 30
_METADATA = ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")
_CODECS = frozenset(
    {"blosc", "zstd", "gzip", "zlib", "lz4", "bz2", "lzma", "shuffle", "delta", "fixedscaleoffset", "quantize"}
    | {"bitround", "bytes", "endian", "transpose", "sharding_indexed", "crc32c", "crc32", "adler32", "fletcher32"}
    | {f"numcodecs.{n}" for n in ("blosc", "zstd", "zlib", "gzip", "lz4", "shuffle", "delta", "fixedscaleoffset")}
)
_COMPUTING = frozenset({"delta", "fixedscaleoffset"})
# Codecs that unpack: to how many bytes, by the header of a chunk, or by unpacking no more than a limit.
_UNPACKED_BYTES: dict[str, Callable[[bytes, int], int]] = {
    "gzip": lambda data, most: len(gzip.GzipFile(fileobj=io.BytesIO(data)).read(most)),
    "zlib": lambda data, most: len(zlib.decompressobj().decompress(data, most)),
    "bz2": lambda data, most: len(bz2.BZ2File(io.BytesIO(data)).read(most)),
    "lzma": lambda data, most: len(lzma.LZMAFile(io.BytesIO(data)).read(most)),  # noqa: SIM115 - of bytes in memory
    "zstd": lambda data, most: _zstd_bytes(data, most),
    "blosc": lambda data, most: int.from_bytes(data[4:8], "little"),
    "lz4": lambda data, most: int.from_bytes(data[:4], "little"),
}
_ZSTD_BLOCK_BYTES = 1 << 17  # at most, once unpacked
_INDEX_CODECS = {"bytes", "crc32c"}
_HINT = "write it again with xarray's to_zarr"


@dataclass(frozen=True, slots=True)
class _Stored:
    """An array and where it is in the directory.

    packed: the codec that chunks are packed with, '' without one; each unpacks to at most `limit` bytes. num_chunks:
    in each shard, 0 without shards. computed: whether a filter computes the values, so that a value that is not finite
    is an error of the filter.
    """

    variable: Variable
    inside: str
    version: int
    packed: str
    limit: int
    num_chunks: int
    computed: bool


class ZarrContainer(Container):
    """The arrays of one group, and of the groups in it; one array, called 'array', if the directory is one itself."""

    def __init__(self, path: str, arrays: dict[str, _Stored], attributes: dict[str, Attribute], left_out: list[str]):
        super().__init__(path, {name: stored.variable for name, stored in arrays.items()}, attributes, left_out)
        self._stored = arrays

    def read(self, name: str, region: Region) -> Array:
        stored = self._stored[name]
        try:
            key = (f"{self.path}/{stored.inside}", ())
            array = _arrays.get(key, lambda: _open(self.path, stored.inside, stored.version, stored))
            values = np.asarray(array[region])
        except Exception as error:  # codecs raise nearly every type for damaged chunks
            raise DataError(f"{self.path}: array '{name}' cannot be read: {str(error)[:200]}") from error
        if stored.computed and not np.isfinite(values).all():
            raise DataError(
                f"{self.path}: the filters of array '{name}' compute values that are not finite from what is stored",
                hint="look at the scale and offset of its filters in the metadata of the array, or write it again",
            )
        return values

    def close(self) -> None:
        _arrays.drop(self.path)


def open_zarr(path: Path) -> ZarrContainer:
    """The arrays of a directory. Raises DataError for one that is no Zarr group, or holds what is not read."""
    left_out: list[str] = []
    arrays: dict[str, _Stored] = {}
    attributes: dict[str, Attribute] = {}
    _refuse_special(path)
    for folder, names, files in os.walk(path):
        if set(files).isdisjoint(_METADATA):
            names.clear()  # chunks
            continue
        inside = os.path.relpath(folder, path).removeprefix(".")
        metadata, own = _metadata(Path(folder), files)
        values = numbers_and_texts(own, inside, left_out)
        if metadata is None:
            attributes |= values if not inside else {f"{inside}/{key}": value for key, value in values.items()}
            continue
        names.clear()
        try:
            stored = _look_at(path, inside, metadata, own, values, left_out)
            arrays[stored.variable.name] = stored
        except _NotReadError as error:
            left_out.append(f"'{inside or 'array'}', {error}")
        if len(arrays) > MAX_ARRAYS:
            raise DataError(f"{path} has more than {MAX_ARRAYS} arrays")
    for same in ambiguous({name: len(stored.variable.shape) for name, stored in arrays.items()}):
        for name in same:
            del arrays[name]
        left_out.append(
            f"{listed(same)}: arrays of the same name in groups, which Zarr does not say how to put together"
        )
    if not arrays:
        raise DataError(
            f"{path} is no Zarr group with arrays of numbers, and no folder of files of arrays",
            hint="; ".join(left_out[:3]) or f"{_HINT}; a folder holds .npy, .npz, .mat, .h5, .hdf5 or .nc files",
        )
    return ZarrContainer(str(path), arrays, attributes, left_out)


class _NotReadError(Exception):
    """Why an array is left out."""


def _refuse_special(path: Path) -> None:
    """A link leads to data outside of the group, and the library would wait for a pipe. The group may be a link."""
    waiting, seen = [str(path)], 0
    while waiting:
        folder = waiting.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                seen += 1
                if entry.is_symlink():
                    raise DataError(f"{folder} holds symbolic links", hint="copy what they point to")
                if seen > MAX_ENTRIES:
                    raise DataError(f"{path} has more than {MAX_ENTRIES:,} files", hint="write it with larger chunks")
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    raise DataError(f"{entry.path} is a pipe, a socket or a device, not a file", hint="remove it")


def _metadata(folder: Path, files: list[str]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """(metadata of an array or None for a group, its attributes)."""
    with errors_as(DataError, f"{folder}: its metadata cannot be read", OSError, ValueError, hint=_HINT):
        if "zarr.json" in files:
            document = load_object(folder / "zarr.json")
            attributes = document.get("attributes")
            is_array = document.get("node_type") == "array"
            return (document if is_array else None), attributes if isinstance(attributes, dict) else {}
        attributes = load_object(folder / ".zattrs") if ".zattrs" in files else {}
        return (load_object(folder / ".zarray") if ".zarray" in files else None), attributes


def _look_at(
    path: Path,
    inside: str,
    metadata: dict[str, Any],
    own: dict[str, Any],
    values: dict[str, Attribute],
    left_out: list[str],
) -> _Stored:
    """One array. own: its attributes as stored; values: those that are read. Raises _NotReadError."""
    stages = _stages(metadata)
    unknown = sorted(_codecs(stages) - _CODECS)
    if unknown:
        raise _NotReadError(f"whose codec '{unknown[0][:40]}' is not read")
    version = 3 if "node_type" in metadata else 2
    try:
        array = _open(path, inside, version)
        shape, in_file, dtype = array.shape, array.shards or array.chunks, np.dtype(array.dtype)
        num_chunks = math.prod(array.shards) // math.prod(array.chunks) if array.shards else 0
        sound = dtype.kind in "fiu" and min(shape, default=1) > 0 and math.prod(shape) < 1 << 60
        whole = min(in_file, default=1) > 0 and math.prod(in_file) * dtype.itemsize <= MAX_CHUNK_BYTES
    except Exception as error:  # the library raises nearly every type for metadata that makes no sense
        raise _NotReadError(f"whose metadata the zarr library refuses: {str(error)[:100]}") from error
    if not sound:
        raise _NotReadError(f"which must hold numbers, fewer than 2^60, and holds {dtype} of shape {shape}")
    if not whole:
        raise _NotReadError(f"whose chunks have more than {MAX_CHUNK_BYTES >> 20} MiB")
    packed = _packed(stages, num_chunks)
    if packed is None:
        raise _NotReadError("whose chunks are packed inside of another codec, or in shards of an unusual form")
    dims = own.get("_ARRAY_DIMENSIONS", metadata.get("dimension_names"))
    if not isinstance(dims, list) or len(dims) != len(shape):
        dims = [""] * len(shape)
    attributes = values | _fill_value(metadata, own, dtype)
    variable = Variable(inside or "array", shape, tuple(str(dim or "")[:80] for dim in dims), attributes)
    counts = [-(-n // chunk) for n, chunk in zip(shape, in_file, strict=True)]
    example = array.metadata.encode_chunk_key((0,) * len(shape))
    _check_stored(path / inside, variable.name, counts, example, metadata.get("fill_value"), left_out)
    limit = min(16 * math.prod(in_file) // max(num_chunks, 1), 2 * MAX_CHUNK_BYTES) + 1024
    computed = not _COMPUTING.isdisjoint(_plain(_codecs(stages)))
    return _Stored(variable, inside, version, packed, limit, num_chunks if packed else 0, computed)


def _fill_value(metadata: dict[str, Any], own: dict[str, Any], dtype: np.dtype[Any]) -> dict[str, Attribute]:
    """The number for what is missing where xarray keeps it: in version 2 it is what the library fills chunks with, in
    version 3 an attribute, for floats the bytes of a float64 in base64."""
    mark = own.get("_FillValue")
    if "_ARRAY_DIMENSIONS" in own and "dtype" in metadata:
        mark = metadata.get("fill_value")
    if isinstance(mark, str) and dtype.kind == "f":
        try:
            (mark,) = struct.unpack("<d", base64.standard_b64decode(mark))
        except (ValueError, struct.error):
            return {}
    if not isinstance(mark, int | float) or not is_number(mark):
        return {}
    with np.errstate(over="ignore"):
        return {"_FillValue": float(np.float64(mark).astype(dtype) if dtype.kind == "f" else mark)}


def _check_stored(
    folder: Path, name: str, counts: list[int], example: str, fill_value: object, left_out: list[str]
) -> None:
    """Name chunks that are not stored: the library reads them as the fill value. Raises _NotReadError if none is.

    counts: of chunk files along each dimension. example: the name of the first one.
    """
    expected = math.prod(counts)
    pattern = re.compile(re.escape(example).replace("0", "([0-9]{1,18})"))
    paths = (os.path.relpath(os.path.join(at, file), folder) for at, _, files in os.walk(folder) for file in files)
    files = [path for path in paths if path not in _METADATA]
    stored = sum(
        all(int(index) < n for index, n in zip(match.groups(), counts, strict=False))
        for match in map(pattern.fullmatch, files)
        if match
    )
    if stored == 0 and len(counts) > 1:
        wrong = f": chunks must be named {example}, and are {min(files)[:80]} (dimension_separator)" if files else ""
        raise _NotReadError(f"of which no chunk is stored{wrong}")
    if stored < expected:
        left_out.append(
            f"{expected - stored} of {expected} chunks of '{name}', which are not stored: not written, or all "
            f"of it the fill value {str(fill_value)[:40]}, which is taken"
        )


def _stages(metadata: dict[str, Any]) -> list[Any]:
    """The codecs of either version, the outermost last."""
    stages: list[Any] = []
    for key in ("filters", "compressor", "codecs"):
        value = metadata.get(key)
        stages += value if isinstance(value, list) else [] if value is None else [value]
    return stages


def _codecs(stages: list[Any]) -> set[str]:
    """Names of all codecs among them, at any depth."""
    names: set[str] = set()
    waiting = list(stages)
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            # Each version goes by one of the two keys: the other must not hide it.
            names |= {str(item[key]) for key in ("id", "name") if key in item}
            waiting += [value for value in item.values() if isinstance(value, dict | list)]
        elif isinstance(item, str):
            names.add(item)
    return names


def _packed(stages: list[Any], num_chunks: int) -> str | None:
    """The codec that chunks are packed with, '' without one. num_chunks: in a shard, 0 without shards.

    None if a chunk is packed twice, or if its bytes in a shard cannot be found: then nothing bounds what it unpacks to.
    """
    if not _UNPACKED_BYTES.keys() & _plain(_codecs(stages)):
        return ""
    if num_chunks:
        shard = stages[-1].get("configuration", {})
        usual = shard.get("index_location", "end") == "end" and _codecs(shard["index_codecs"]) == _INDEX_CODECS
        if len(stages) > 1 or not usual:
            return None
        stages = shard["codecs"]
    last = stages[-1]
    named = _plain({str(last.get("id", last.get("name")))} if isinstance(last, dict) else set())
    packing = _UNPACKED_BYTES.keys() & _plain(_codecs([last]))
    once = len(packing) == 1 and packing == named and not _UNPACKED_BYTES.keys() & _plain(_codecs(stages[:-1]))
    return packing.pop() if once else None


def _zstd_bytes(data: bytes, most: int) -> int:
    """Bytes in a chunk that is one zstd frame, and `most` for several frames, each of which may promise little.

    Of a frame that does not state its size, a bound by the headers of its blocks, 128 KiB too small.
    """
    if len(data) < 6:
        return 0
    kind = data[4]
    single = kind & 32
    at = 5 + (0 if single else 1) + (0, 1, 2, 4)[kind & 3] + (1 if single else 0, 2, 4, 8)[kind >> 6]
    total, head = -_ZSTD_BLOCK_BYTES, 0
    while not head & 1 and at < len(data):
        head = int.from_bytes(data[at : at + 3], "little")
        repeated, packed, size = head & 6 == 2, head & 4, head >> 3
        total += _ZSTD_BLOCK_BYTES if packed else size
        at += 3 + (1 if repeated else size)
    if at + (4 if kind & 4 else 0) != len(data):
        return most
    promised = zstd_content_bytes(data)
    return total if promised is None else promised


def _plain(names: set[str]) -> set[str]:
    return {name.removeprefix("numcodecs.") for name in names}


def _open(path: Path | str, inside: str, version: int, limits: _Stored | None = None) -> Any:
    store = _LimitedStore(str(path), read_only=True)
    store.limits = limits
    return zarr.open_array(store, path=inside, mode="r", zarr_format=3 if version == 3 else 2)


class _LimitedStore(LocalStore):
    """Chunks that would unpack to more than they may hold are refused before a codec sees them."""

    limits: _Stored | None

    async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
        content, limits = await super().get(key, prototype, byte_range), self.limits
        if content is None or limits is None or not limits.packed:
            return content
        # The end of a shard is its index.
        if key.rpartition("/")[2] in _METADATA or isinstance(byte_range, SuffixByteRequest):
            return content
        data = content.to_bytes()
        chunks = [data]
        if limits.num_chunks and byte_range is None:
            index = read_index(key, np.frombuffer(data, np.uint8), limits.num_chunks)
            chunks = [data[int(o) : int(o + n)] for o, n in zip(*index, strict=True) if o != MISSING]
        if any(_UNPACKED_BYTES[limits.packed](one, limits.limit + 1) > limits.limit for one in chunks):
            raise ValueError(f"chunk '{key}' unpacks to more than it may hold")
        return content


_arrays: ProcessCache[Any] = ProcessCache(64)
