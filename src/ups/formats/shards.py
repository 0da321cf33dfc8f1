"""The files of a Zarr array of a store: metadata, shard index, memory maps, decoding. The hot path of reading.

Owns which Zarr v3 arrays ups can read (docs/store-format.md): a regular chunk grid, default chunk keys with '/', and
either plain little-endian chunks or shards of them, uncompressed or with one of a few known compressors. Sizes, shapes,
names and codecs are bounded before use.

A file is mapped once per process and stays mapped while it is among the most recently used ones of the process
(`MAX_OPEN_FILES`, because every map holds a file descriptor). Uncompressed chunks are views of the map: a read copies
each byte once, from the page cache into the batch. Compressed chunks are decoded into a buffer of the declared size
and never more, so that a hostile chunk cannot expand.

Mapping assumes that a committed store does not change: a file that is truncated while it is mapped kills the process
with SIGBUS, as with every memory map. A file in a bucket is not mapped: its chunks are copies out of the cache of
`ups.buckets`.
"""

from __future__ import annotations

import math
import mmap
import os
import resource
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import google_crc32c
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError

from ups.buckets.cached_objects import ObjectInfo, object_info, read_range
from ups.buckets.client import is_address
from ups.errors import DataError, errors_as
from ups.record.files import load_object

MAX_JSON_BYTES = 8 << 20
MAX_ELEMENTS = 1 << 60
# A chunk is the unit of decoding: larger ones are refused, so that a compressed chunk cannot ask for more memory.
MAX_CHUNK_BYTES = 256 << 20
MAX_CHUNKS_PER_SHARD = 1 << 20
MAX_OPEN_FILES = 128
# Coordinates and parameters of a store in a bucket are kept in memory: every window asks for them.
MAX_HELD_BYTES = 16 << 20
MISSING = np.uint64(2**64 - 1)
Array = npt.NDArray[Any]


class ObjectBytes:
    """Slices of an object, each a new read-only array of bytes."""

    def __init__(self, url: str) -> None:
        info = object_info(url)
        if info is None:
            raise DataError(f"{url} is missing", hint="the store is incomplete: copy it again")
        self.info: ObjectInfo = info

    def __len__(self) -> int:
        return self.info.size

    def __getitem__(self, part: slice) -> npt.NDArray[np.uint8]:
        start, stop, _ = part.indices(self.info.size)
        return np.frombuffer(read_range(self.info, start, stop), np.uint8)


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Where the bytes of one Zarr array are.

    A file holds `shard_shape` elements as chunks of `chunk_shape`; without shards both are equal and `sharded` is
    False. `directory` is the array's own folder; files are `c/i/j/...` below it.
    """

    directory: str
    shape: tuple[int, ...]
    dtype: str
    shard_shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    sharded: bool
    compressor: str | None
    dimension_names: tuple[str, ...]

    @property
    def chunk_bytes(self) -> int:
        return math.prod(self.chunk_shape) * np.dtype(self.dtype).itemsize

    @property
    def chunks_per_shard(self) -> tuple[int, ...]:
        return tuple(s // c for s, c in zip(self.shard_shape, self.chunk_shape, strict=True))

    @property
    def files_per_axis(self) -> tuple[int, ...]:
        return tuple(-(-n // s) for n, s in zip(self.shape, self.shard_shape, strict=True))

    def file(self, *position: int) -> str:
        """Path of the file at a grid position."""
        return "/".join((self.directory, "c", *map(str, position)))


_Length = Annotated[int, Field(strict=True, ge=1, le=1 << 48)]
_Shape = Annotated[tuple[Annotated[int, Field(strict=True, ge=0, le=1 << 48)], ...], Field(min_length=1, max_length=6)]
_Name = TypeVar("_Name")
_Configuration = TypeVar("_Configuration")


class _Part(BaseModel, Generic[_Name, _Configuration]):
    """A part of a `zarr.json` with a name and settings. What is not named here is ignored, as in every Zarr reader."""

    name: _Name
    configuration: _Configuration = Field(default={}, validate_default=True)


class _Grid(BaseModel):
    chunk_shape: tuple[_Length, ...]


class _Keys(BaseModel):
    separator: Literal["/"] = "/"


class _Endian(BaseModel):
    endian: Literal["little"] = "little"


_Bytes = _Part[Literal["bytes"], _Endian]
_ChunkCodecs = tuple[_Bytes] | tuple[_Bytes, _Part[Literal["zstd", "gzip"], dict[str, Any]]]


class _Shard(BaseModel):
    chunk_shape: tuple[_Length, ...]
    codecs: _ChunkCodecs
    index_codecs: tuple[_Bytes, _Part[Literal["crc32c"], dict[str, Any]]]
    index_location: Literal["end"] = "end"


_Sharding = _Part[Literal["sharding_indexed"], _Shard]


class _ArrayDocument(BaseModel):
    zarr_format: Literal[3]
    node_type: Literal["array"]
    shape: _Shape
    data_type: Literal["float32", "float64"]
    chunk_grid: _Part[Literal["regular"], _Grid]
    chunk_key_encoding: _Part[Literal["default"], _Keys]
    codecs: tuple[_Sharding] | _ChunkCodecs
    dimension_names: tuple[str, ...]
    storage_transformers: tuple[()] | None = None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size. Raises DataError for anything else."""
    try:
        return load_object(path, MAX_JSON_BYTES)
    except FileNotFoundError as error:
        hint = "is this a store that `ups data pack` or `generate` finished?"
        raise DataError(f"{path} is missing", hint=hint) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {str(error)[:200]}") from error


def read_group(directory: Path) -> dict[str, Any]:
    """Attributes of a Zarr v3 group."""
    data = read_json(directory / "zarr.json")
    if data.get("zarr_format") != 3 or data.get("node_type") != "group":
        raise DataError(f"{directory} is not a Zarr v3 group")
    attributes = data.get("attributes", {})
    if not isinstance(attributes, dict):
        raise DataError(f"attributes of {directory} must be a JSON object")
    return attributes


def first_problem(error: ValidationError) -> str:
    """Which value of a document is wrong, why, and what it is."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {str(first['input'])[:60]}"


def read_array(directory: Path) -> ArrayLayout:
    """Layout of a Zarr v3 array. Raises DataError if it is not one that ups can read within its bounds."""
    data = read_json(directory / "zarr.json")
    try:
        document = _ArrayDocument.model_validate(data)
        layout = _layout(str(directory), document)
    except ValueError as error:
        what = first_problem(error) if isinstance(error, ValidationError) else str(error)
        hint = "rewrite it with `ups data pack`; docs/store-format.md has the form"
        raise DataError(f"array {directory}: {what}", hint=hint) from error
    return layout


def _layout(directory: str, document: _ArrayDocument) -> ArrayLayout:
    """Raises ValueError for sizes that do not fit together or go beyond the bounds."""
    shape, shard_shape, names = document.shape, document.chunk_grid.configuration.chunk_shape, document.dimension_names
    codecs: Any = document.codecs
    chunk_shape, sharded = shard_shape, codecs[0].name == "sharding_indexed"
    if sharded:
        codecs, chunk_shape = codecs[0].configuration.codecs, codecs[0].configuration.chunk_shape
    if not len(shape) == len(shard_shape) == len(chunk_shape) == len(names):
        raise ValueError(f"chunks {shard_shape}, {chunk_shape} and dimension_names {names} must fit the shape {shape}")
    if any(s % c for s, c in zip(shard_shape, chunk_shape, strict=True)):
        raise ValueError(f"shards of shape {shard_shape} must consist of whole chunks of shape {chunk_shape}")
    compressor = codecs[1].name if len(codecs) > 1 else None
    dtype = np.dtype(document.data_type).newbyteorder("<").str
    layout = ArrayLayout(directory, shape, dtype, shard_shape, chunk_shape, sharded, compressor, names)
    if math.prod(shape) > MAX_ELEMENTS:
        raise ValueError(f"an array must have at most 2^60 elements, got shape {shape}")
    if layout.chunk_bytes > MAX_CHUNK_BYTES:
        raise ValueError(f"chunks must have at most {MAX_CHUNK_BYTES >> 20} MiB, got {layout.chunk_bytes >> 20}")
    if math.prod(layout.chunks_per_shard) > MAX_CHUNKS_PER_SHARD:
        raise ValueError(f"shards must hold at most {MAX_CHUNKS_PER_SHARD} chunks")
    return layout


def array_json(layout: ArrayLayout) -> dict[str, Any]:
    """The `zarr.json` of an array: the inverse of `read_array`."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    codecs: list[dict[str, Any]] = [little]
    if layout.compressor == "zstd":
        codecs.append({"name": "zstd", "configuration": {"level": 3, "checksum": False}})
    elif layout.compressor is not None:
        raise ValueError(f"stores are written with zstd or uncompressed, not with {layout.compressor}")
    if layout.sharded:
        codecs = [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": list(layout.chunk_shape),
                    "codecs": codecs,
                    "index_codecs": [little, {"name": "crc32c"}],
                    "index_location": "end",
                },
            }
        ]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(layout.shape),
        "data_type": np.dtype(layout.dtype).name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(layout.shard_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0.0,
        "codecs": codecs,
        "attributes": {},
        "dimension_names": list(layout.dimension_names),
    }


def group_json(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The `zarr.json` of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}


_T = TypeVar("_T")
FileKey = tuple[str, tuple[int, ...]]  # of an array or a file, and the position of a file in its grid


class ProcessCache(Generic[_T]):
    """The most recently used open files of this process, at most `capacity` or an eighth of what it may open.

    Safe under threads. After a fork the child starts with an empty one and a lock of its own: the parent's lock may be
    held by a thread that does not exist in the child.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = self._wanted = capacity
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._items: OrderedDict[FileKey, _T] = OrderedDict()
        soft_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if soft_limit != resource.RLIM_INFINITY:
            self.capacity = max(2, min(self._wanted, soft_limit // 8))

    def get(self, key: FileKey, opener: Callable[[], _T]) -> _T:
        """The open file of that key; opened now if it is not among the recent ones."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            item = self._items.get(key)
            if item is not None:
                self._items.move_to_end(key)
                return item
        opened = opener()
        with self._lock:
            item = self._items.setdefault(key, opened)
            self._items.move_to_end(key)
            while len(self._items) > self.capacity:
                self._items.popitem(last=False)
        return item

    def drop(self, prefix: str) -> None:
        """Forget the files below a path; they close when the last reader lets go."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            for key in [k for k in self._items if k[0].startswith(prefix)]:
                del self._items[key]


class ShardFile:
    """One mapped file of an array: `chunk(i)` is its i-th chunk in row-major order of the chunk grid."""

    __slots__ = ("_bytes", "_layout", "_lengths", "_offsets", "chunks", "path")

    def __init__(self, path: str, layout: ArrayLayout) -> None:
        self.path, self._layout = path, layout
        self._bytes = ObjectBytes(path) if is_address(path) else map_file(path)
        num_chunks = math.prod(layout.chunks_per_shard)
        if layout.sharded:
            self._offsets, self._lengths = read_index(path, self._bytes, num_chunks)
        else:
            self._offsets = np.zeros(1, np.uint64)
            self._lengths = np.array([len(self._bytes)], np.uint64)
        present = self._offsets != MISSING
        if layout.compressor is None and bool((self._lengths[present] != layout.chunk_bytes).any()):
            raise DataError(f"{path}: a chunk has not the {layout.chunk_bytes} bytes that its array declares")
        # When chunks lie one after another, as our writer puts them, the whole file is one array: no lookup per read.
        self.chunks: Array | None = None
        if isinstance(self._bytes, ObjectBytes) and (layout.sharded or len(self._bytes) > MAX_HELD_BYTES):
            return
        count = int(present.sum())
        if layout.compressor is None and bool(
            (self._offsets[:count] == np.arange(count, dtype=np.uint64) * np.uint64(layout.chunk_bytes)).all()
        ):
            flat = self._bytes[: count * layout.chunk_bytes].view(layout.dtype)
            self.chunks = flat.reshape(count, *layout.chunk_shape)

    def chunk(self, number: int) -> Array:
        """Chunk `number` as an array of `chunk_shape`; a read-only view where the file is not compressed."""
        if self.chunks is not None and number < len(self.chunks):
            return self.chunks[number]  # type: ignore[no-any-return]
        self.require(number)
        offset, length = self._offsets[number], int(self._lengths[number])
        data = self._bytes[int(offset) : int(offset) + length]
        if self._layout.compressor is not None:
            data = _decode(data, self._layout.compressor, self._layout.chunk_bytes, f"{self.path}: chunk {number}")
        return data.view(self._layout.dtype).reshape(self._layout.chunk_shape)

    def frames(self, number: int, start: int, stop: int, step: int) -> Array:
        """`chunk(number)[0, start:stop:step]`; of a plain chunk in a bucket no more bytes are read than these."""
        layout = self._layout
        if self.chunks is not None or layout.compressor is not None or not isinstance(self._bytes, ObjectBytes):
            return self.chunk(number)[0, start:stop:step]
        self.require(number)
        begin, row = int(self._offsets[number]), layout.chunk_bytes // layout.chunk_shape[1]
        data = self._bytes[begin + start * row : begin + stop * row]
        return data.view(layout.dtype).reshape(-1, *layout.chunk_shape[2:])[::step]

    def require(self, number: int) -> None:
        """Raises DataError if a chunk is not there; reads nothing."""
        if self._offsets[number] == MISSING:
            raise DataError(f"{self.path}: chunk {number} is missing", hint="the store is incomplete: pack it again")


def open_shard(layout: ArrayLayout, position: tuple[int, ...]) -> ShardFile:
    """The mapped file at a grid position, from the cache of this process."""
    # Not the path of the file: building it costs more than finding it.
    key = (layout.directory, position)
    return _open_files.get(key, lambda: ShardFile(layout.file(*position), layout))


def drop_files(directory: str) -> None:
    """Close the files of this process below a directory."""
    _open_files.drop(directory)


def map_file(path: str, *, follow_link: bool = False) -> npt.NDArray[np.uint8]:
    """The bytes of a file, mapped read-only. Raises DataError if it is not a plain file with something in it.

    follow_link: for a file that the user named; inside a store a link leads outside of it and is refused.
    """
    with errors_as(DataError, f"{path} cannot be mapped", OSError, ValueError):
        if (os.path.islink(path) and not follow_link) or not os.path.isfile(path):
            raise DataError(f"{path} is missing or not a plain file", hint="the store is incomplete: pack it again")
        with Path(path).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, np.uint8)


def index_bytes(num_chunks: int) -> int:
    """Size of the index at the end of a shard: offset and length of every chunk, and a checksum."""
    return 16 * num_chunks + 4


def encode_index(entries: npt.NDArray[np.uint64]) -> bytes:
    """The index of a shard from (num_chunks, 2) offsets and lengths."""
    body = np.ascontiguousarray(entries, dtype="<u8").tobytes()
    return body + int(google_crc32c.value(body)).to_bytes(4, "little")


def read_index(
    path: str, data: npt.NDArray[np.uint8] | ObjectBytes, num_chunks: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Offsets and lengths of the chunks in a shard. Raises DataError for a damaged index."""
    size = index_bytes(num_chunks)
    if len(data) < size:
        raise DataError(f"{path} has {len(data)} bytes, less than its own index of {num_chunks} chunks needs")
    end = len(data) - size
    body = data[end : end + 16 * num_chunks].tobytes()
    if int(google_crc32c.value(body)).to_bytes(4, "little") != data[-4:].tobytes():
        raise DataError(f"{path}: the checksum of the shard index is wrong", hint="the file is damaged: pack it again")
    entries = np.frombuffer(body, "<u8").reshape(num_chunks, 2)
    offsets, lengths = entries[:, 0].astype(np.uint64), entries[:, 1].astype(np.uint64)
    present = offsets != MISSING
    limit = np.uint64(end)
    if bool(((offsets > limit) | (lengths > limit - np.minimum(offsets, limit)))[present].any()):
        raise DataError(f"{path}: the shard index points outside the file")
    return offsets, lengths


def _decode(data: npt.NDArray[np.uint8], compressor: str, expected: int, where: str) -> npt.NDArray[np.uint8]:
    from numcodecs import zstd  # type: ignore[import-untyped]

    try:
        if compressor == "gzip":
            plain = zlib.decompressobj(wbits=31).decompress(data.tobytes(), expected + 1)
            if len(plain) != expected:
                raise ValueError(f"{min(len(plain), expected)} bytes or more, instead of {expected}")
            return np.frombuffer(plain, np.uint8)
        out = np.empty(expected, np.uint8)
        frame = data.tobytes()
        content = zstd_content_bytes(frame)
        if content != expected:  # streams without a size are not ours
            raise ValueError(f"the frame promises {content or 'an unknown number of'} bytes, not {expected}")
        zstd.decompress(frame, out)
    except (ValueError, RuntimeError, zlib.error) as error:
        raise DataError(f"{where} cannot be decoded with {compressor}: {str(error)[:120]}") from error
    return out


def zstd_content_bytes(frame: bytes) -> int | None:
    """How many bytes a zstd frame promises in its header; None if it does not say. Raises ValueError for no frame."""
    if len(frame) < 6 or frame[:4] != b"\x28\xb5\x2f\xfd":
        raise ValueError("not a zstd frame")
    descriptor = frame[4]
    single = bool(descriptor & 0x20)
    size_flag, dictionary = descriptor >> 6, (0, 1, 2, 4)[descriptor & 3]
    width = (1 if single else 0, 2, 4, 8)[size_flag]
    start = 5 + (0 if single else 1) + dictionary
    return int.from_bytes(frame[start : start + width], "little") + (256 if width == 2 else 0) if width else None


_open_files: ProcessCache[ShardFile] = ProcessCache(MAX_OPEN_FILES)
