"""Zarr groups that others wrote (versions 2 and 3) as named arrays, local files only.

All metadata is looked at before the library sees it: it would follow links, and version 2 has codecs that run code
(pickle). The library opens arrays one by one, never a group: a group may carry a second copy of the metadata of its
arrays ("consolidated"), which would count instead. Dimensions are named as xarray writes them.
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
from typing import Any, Literal

import numpy as np

from ups.errors import DataError
from ups.formats.base import Array
from ups.formats.container import Attribute, Container, Variable, ambiguous, listed
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
# Codecs that unpack: to how many bytes by the header of a chunk, and without one by unpacking at most so many.
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
class _Place:
    """An array, where it is in the directory, and in which version of the format.

    packed: the codec that chunks are packed with, '' without one; each unpacks to at most `limit` bytes. num_chunks:
    in each shard, 0 without shards. computed: whether a filter computes the values, so that a value that is not finite
    is an error of the filter.
    """

    variable: Variable
    inside: str
    version: Literal[2, 3]
    packed: str
    limit: int
    num_chunks: int
    computed: bool


class ZarrContainer(Container):
    """The arrays of one group, and of the groups in it; one array, called 'array', if the directory is one itself."""

    def __init__(self, path: str, arrays: dict[str, _Place], attributes: dict[str, Attribute], left_out: list[str]):
        super().__init__(path, {name: place.variable for name, place in arrays.items()}, attributes, left_out)
        self._places = arrays

    def read(self, name: str, region: Region) -> Array:
        place = self._places[name]
        try:
            array = _arrays.get((f"{self.path}/{place.inside}", ()), lambda: _open(self.path, place))
            values = np.asarray(array[region])
        except Exception as error:  # codecs raise nearly every type for damaged chunks
            raise DataError(f"{self.path}: array '{name}' cannot be read: {str(error)[:200]}") from error
        if place.computed and not np.isfinite(values).all():
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
    arrays: dict[str, _Place] = {}
    attributes: dict[str, Attribute] = {}
    _refuse_special(path)
    for folder, names, files in os.walk(path):
        if set(files).isdisjoint(_METADATA):
            names.clear()  # chunks
            continue
        inside = os.path.relpath(folder, path)
        name = "" if inside == "." else inside
        metadata, found = _metadata(Path(folder), files)
        values = _attributes(found, name, left_out)
        if metadata is None:
            attributes |= values if not name else {f"{name}/{key}": value for key, value in values.items()}
            continue
        names.clear()
        variable = _variable(name or "array", metadata, found, values, left_out)
        if variable is not None and _is_stored(Path(folder), variable, metadata, left_out):
            version: Literal[2, 3] = 3 if "zarr.json" in files else 2
            num_elements, (packed, num_chunks) = math.prod(_chunk_shape(metadata)), _packed(metadata) or ("", 0)
            limit = min(16 * num_elements // max(num_chunks, 1), 2 * MAX_CHUNK_BYTES) + 1024
            computed = not _COMPUTING.isdisjoint(_plain(_codecs(_stages(metadata))))
            arrays[variable.name] = _Place(variable, name, version, packed, limit, num_chunks, computed)
        if len(arrays) > MAX_ARRAYS:
            raise DataError(f"{path} has more than {MAX_ARRAYS} arrays")
    for same in ambiguous({name: len(place.variable.shape) for name, place in arrays.items()}):
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
    try:
        if "zarr.json" in files:
            document = load_object(folder / "zarr.json")
            found = document.get("attributes")
            return (document if document.get("node_type") == "array" else None), found if isinstance(
                found, dict
            ) else {}
        found = load_object(folder / ".zattrs") if ".zattrs" in files else {}
        return (load_object(folder / ".zarray") if ".zarray" in files else None), found
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: its metadata cannot be read: {error}", hint=_HINT) from error


def _variable(
    name: str, metadata: dict[str, Any], found: dict[str, Any], values: dict[str, Attribute], left_out: list[str]
) -> Variable | None:
    unknown = sorted(_codecs(_stages(metadata)) - _CODECS)
    if unknown:
        left_out.append(f"'{name}', whose codec '{unknown[0][:40]}' is not read")
        return None
    if _packed(metadata) is None:
        left_out.append(f"'{name}', whose chunks are packed inside of another codec, or in shards of an unusual form")
        return None
    kind = metadata.get("dtype", metadata.get("data_type"))
    try:
        dtype = np.dtype(kind if isinstance(kind, str) else object)
    except (TypeError, SyntaxError, ValueError):
        dtype = np.dtype(object)
    shape = metadata.get("shape")
    sound = isinstance(shape, list) and all(type(n) is int and n > 0 for n in shape) and math.prod(shape) < 1 << 60
    if dtype.kind not in "fiu" or not isinstance(shape, list) or not sound:
        left_out.append(f"'{name}', which holds no array of numbers ({str(kind)[:40]})")
        return None
    grid = _chunk_shape(metadata)
    whole = isinstance(grid, list) and len(grid) == len(shape) and all(type(n) is int and n > 0 for n in grid)
    if not whole or math.prod(grid) * dtype.itemsize > MAX_CHUNK_BYTES:
        left_out.append(f"'{name}', whose chunks do not fit its shape or have more than {MAX_CHUNK_BYTES >> 20} MiB")
        return None
    named = found.get("_ARRAY_DIMENSIONS", metadata.get("dimension_names"))
    dims = (
        [str(n or "")[:80] for n in named]
        if isinstance(named, list) and len(named) == len(shape)
        else [""] * len(shape)
    )
    return Variable(name, tuple(shape), tuple(dims), values | _fill_value(metadata, found, dtype))


def _fill_value(metadata: dict[str, Any], found: dict[str, Any], dtype: np.dtype[Any]) -> dict[str, Attribute]:
    """The number for what is missing where xarray keeps it: in version 2 it is what the library fills chunks with, in
    version 3 an attribute, for floats the bytes of a float64 in base64."""
    mark = found.get("_FillValue")
    if "_ARRAY_DIMENSIONS" in found and "dtype" in metadata:
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


def _is_stored(folder: Path, variable: Variable, metadata: dict[str, Any], left_out: list[str]) -> bool:
    """Whether chunks are there; those that are not are named: the library takes them for the fill value in silence."""
    counts = [-(-n // chunk) for n, chunk in zip(variable.shape, _chunk_shape(metadata), strict=True)]
    expected = math.prod(counts)
    start, separator = _chunk_names(metadata)
    example = start + separator.join("0" for _ in counts) if counts else start.rstrip(separator) or "0"
    name = re.compile(re.escape(example).replace("0", "([0-9]{1,18})"))
    paths = (os.path.relpath(os.path.join(at, file), folder) for at, _, files in os.walk(folder) for file in files)
    files = [path for path in paths if path not in _METADATA]
    stored = sum(
        all(int(index) < n for index, n in zip(match.groups(), counts, strict=False))
        for match in map(name.fullmatch, files)
        if match
    )
    if stored >= expected:
        return True
    if stored == 0 and len(counts) > 1:
        wrong = f": chunks must be named {example}, and are {min(files)[:80]} (dimension_separator)" if files else ""
        left_out.append(f"'{variable.name}', of which no chunk is stored{wrong}")
        return False
    left_out.append(
        f"{expected - stored} of {expected} chunks of '{variable.name}', which are not stored: not written, or all "
        f"of it the fill value {str(metadata.get('fill_value'))[:40]}, which is taken"
    )
    return True


def _chunk_names(metadata: dict[str, Any]) -> tuple[str, str]:
    """(what the names of chunks begin with, what stands between their indices)."""
    if "chunk_key_encoding" not in metadata:
        return "", str(metadata.get("dimension_separator") or ".")
    encoding = metadata["chunk_key_encoding"]
    encoding = encoding if isinstance(encoding, dict) else {}
    options = encoding.get("configuration")
    separator = options.get("separator") if isinstance(options, dict) else None
    return ("", str(separator or ".")) if encoding.get("name") == "v2" else (f"c{separator or '/'}", separator or "/")


def _chunk_shape(metadata: dict[str, Any]) -> Any:
    """The shape of what one file holds, where the metadata is of the usual form."""
    if "chunks" in metadata:
        return metadata["chunks"]
    grid = metadata.get("chunk_grid")
    configuration = grid.get("configuration") if isinstance(grid, dict) else None
    return configuration.get("chunk_shape") if isinstance(configuration, dict) else None


def _stages(metadata: dict[str, Any]) -> list[Any]:
    """The codecs of either version, the outermost last."""
    stages: list[Any] = []
    for key in ("filters", "compressor", "codecs"):
        value = metadata.get(key)
        stages += value if isinstance(value, list) else [] if value is None else [value]
    return stages


def _codecs(stages: list[Any]) -> set[str]:
    """Names of all codecs among them, at any depth."""
    found: set[str] = set()
    waiting = list(stages)
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            # Each version goes by one of the two keys: the other must not hide it.
            found |= {str(item[key]) for key in ("id", "name") if key in item}
            waiting += [value for value in item.values() if isinstance(value, dict | list)]
        elif isinstance(item, str):
            found.add(item)
    return found


def _packed(metadata: dict[str, Any]) -> tuple[str, int] | None:
    """(the codec that chunks are packed with, '' without one; chunks in a shard, 0 without shards).

    None if a chunk is packed twice, or if its place in a shard is not known: then nothing bounds what it unpacks to.
    """
    stages, num_chunks = _stages(metadata), 0
    if not _UNPACKED_BYTES.keys() & _plain(_codecs(stages)):
        return "", 0
    last = stages[-1] if stages else None
    if isinstance(last, dict) and last.get("name") == "sharding_indexed":
        inner = _shard(stages, _chunk_shape(metadata))
        if inner is None:
            return None
        stages, num_chunks = inner
        last = stages[-1]
    named = _plain({str(last.get("id", last.get("name")))} if isinstance(last, dict) else set())
    found = _UNPACKED_BYTES.keys() & _plain(_codecs([last]))
    alone = len(found) == 1 and found == named and not _UNPACKED_BYTES.keys() & _plain(_codecs(stages[:-1]))
    return (found.pop(), num_chunks) if alone else None


def _shard(stages: list[Any], outer: Any) -> tuple[list[Any], int] | None:
    """Codecs and number of the chunks of a shard; None if a chunk cannot be found in it by what the metadata says."""
    shard = stages[-1].get("configuration")
    if len(stages) > 1 or not isinstance(shard, dict) or shard.get("index_location", "end") != "end":
        return None
    lists = [shard.get("chunk_shape"), shard.get("index_codecs"), shard.get("codecs"), outer]
    inner, index, codecs, outer = (one if isinstance(one, list) else [] for one in lists)
    if not (inner and codecs) or _codecs(index) != _INDEX_CODECS:
        return None
    if len(inner) != len(outer) or {type(n) for n in [*inner, *outer]} != {int} or min(inner) < 1:
        return None
    if any(of % n for n, of in zip(inner, outer, strict=True)):
        return None
    return codecs, math.prod(outer) // math.prod(inner)


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


def _attributes(found: dict[str, Any], name: str, left_out: list[str]) -> dict[str, Attribute]:
    values: dict[str, Attribute] = {}
    for key, value in list(found.items())[:256]:
        if isinstance(value, str):
            values[key] = value[:1000]
        elif is_number(value):
            values[key] = float(value)
        elif isinstance(value, list) and 0 < len(value) <= 64 and all(is_number(v) for v in value):
            values |= (
                {f"{key}[{i}]": float(v) for i, v in enumerate(value)} if len(value) > 1 else {key: float(value[0])}
            )
        elif key not in ("_ARRAY_DIMENSIONS", "_FillValue"):
            left_out.append(f"attribute '{key[:80]}'" + (f" of '{name}'" if name else ""))
    return values


def _open(path: str, place: _Place) -> Any:
    import zarr
    from zarr.abc.store import SuffixByteRequest
    from zarr.storage import LocalStore

    class Limited(LocalStore):
        """Chunks that would unpack to more than they may hold are refused before a codec sees them."""

        async def get(self, key: str, prototype: Any = None, byte_range: Any = None) -> Any:
            found = await super().get(key, prototype, byte_range)
            # The end of a shard is its index.
            if found is None or key.rpartition("/")[2] in _METADATA or isinstance(byte_range, SuffixByteRequest):
                return found
            data = found.to_bytes()
            chunks = [data]
            if place.num_chunks and byte_range is None:
                index = read_index(key, np.frombuffer(data, np.uint8), place.num_chunks)
                chunks = [data[int(o) : int(o + n)] for o, n in zip(*index, strict=True) if o != MISSING]
            if any(_UNPACKED_BYTES[place.packed](one, place.limit + 1) > place.limit for one in chunks):
                raise ValueError(f"chunk '{key}' unpacks to more than it may hold")
            return found

    store = (Limited if place.packed else LocalStore)(path, read_only=True)
    return zarr.open_array(store, path=place.inside, mode="r", zarr_format=place.version)


_arrays: ProcessCache[Any] = ProcessCache(64)
