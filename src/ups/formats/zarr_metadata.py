"""Reads the `zarr.json` files of a store with suspicion: sizes, shapes, names and codecs are bounded before use.

Owns which Zarr v3 arrays ups can read (docs/store-format.md): a regular chunk grid, default chunk keys with '/', and
either plain little-endian chunks or shards of them, uncompressed or with one of a few known compressors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ups.errors import DataError

MAX_JSON_BYTES = 8 << 20
MAX_ELEMENTS = 1 << 60
# A chunk is the unit of decoding: larger ones are refused, so that a compressed chunk cannot ask for more memory.
MAX_CHUNK_BYTES = 256 << 20
MAX_CHUNKS_PER_SHARD = 1 << 20
COMPRESSORS = ("zstd", "gzip")
_DTYPES: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "float64": np.dtype("<f8")}


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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size. Raises DataError for anything else."""
    try:
        if not path.is_file():
            raise DataError(f"{path} is missing", hint="is this a store that `ups data pack` or `generate` finished?")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise DataError(f"{path} has more than {MAX_JSON_BYTES} bytes, which metadata never needs")
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {str(error)[:200]}") from error
    if not isinstance(data, dict):
        raise DataError(f"{path} must hold a JSON object, not a {type(data).__name__}")
    return data


def read_group(directory: Path) -> dict[str, Any]:
    """Attributes of a Zarr v3 group."""
    data = read_json(directory / "zarr.json")
    if data.get("zarr_format") != 3 or data.get("node_type") != "group":
        raise DataError(f"{directory} is not a Zarr v3 group")
    attributes = data.get("attributes", {})
    if not isinstance(attributes, dict):
        raise DataError(f"attributes of {directory} must be a JSON object")
    return attributes


def read_array(directory: Path) -> ArrayLayout:
    """Layout of a Zarr v3 array. Raises DataError if it is not one that ups can read within its bounds."""
    data = read_json(directory / "zarr.json")

    def refuse(what: str) -> DataError:
        return DataError(f"array {directory}: {what}", hint="rewrite it with `ups data pack`")

    if data.get("zarr_format") != 3 or data.get("node_type") != "array":
        raise refuse("not a Zarr v3 array")
    shape = _extents(data.get("shape"), minimum=0)
    if shape is None or not 1 <= len(shape) <= 6 or math.prod(shape) > MAX_ELEMENTS:
        raise refuse("its shape is missing or absurd")
    dtype = _DTYPES.get(str(data.get("data_type")))
    if dtype is None:
        raise refuse(f"data type {str(data.get('data_type'))[:40]!r} is not float32 or float64")
    grid = _configured(data.get("chunk_grid"), "regular")
    shard_shape = _extents(None if grid is None else grid.get("chunk_shape"), minimum=1)
    if shard_shape is None or len(shard_shape) != len(shape):
        raise refuse("its chunk grid is missing or not regular")
    keys = _configured(data.get("chunk_key_encoding"), "default")
    if keys is None or keys.get("separator", "/") != "/":
        raise refuse("its chunk keys are not the default ones with '/'")
    if data.get("storage_transformers"):
        raise refuse("storage transformers are not read")
    names = data.get("dimension_names")
    if not (isinstance(names, list) and len(names) == len(shape) and all(isinstance(n, str) for n in names)):
        raise refuse("dimension_names are missing")
    codecs = data.get("codecs")
    if not isinstance(codecs, list) or not codecs:
        raise refuse("codecs are missing")
    chunk_shape, sharded = shard_shape, False
    shard = _configured(codecs[0], "sharding_indexed")
    if shard is not None:
        inner = _extents(shard.get("chunk_shape"), minimum=1)
        index_codecs = shard.get("index_codecs")
        if (
            len(codecs) != 1
            or inner is None
            or len(inner) != len(shape)
            or any(s % c for s, c in zip(shard_shape, inner, strict=True))
            or shard.get("index_location", "end") != "end"
            or not isinstance(index_codecs, list)
            or len(index_codecs) != 2
            or not _is_little(index_codecs[0])
            or _configured(index_codecs[1], "crc32c") is None
        ):
            raise refuse("its shards are not of the form in docs/store-format.md (index at the end, with crc32c)")
        codecs, chunk_shape, sharded = shard.get("codecs"), inner, True
    if not isinstance(codecs, list) or not 1 <= len(codecs) <= 2 or not _is_little(codecs[0]):
        raise refuse("its codecs are not little-endian bytes with at most one compressor")
    compressor = None
    if len(codecs) == 2:
        compressor = str(codecs[1].get("name")) if isinstance(codecs[1], Mapping) else "?"
        if compressor not in COMPRESSORS:
            raise refuse(f"compressor {compressor[:40]!r} is not one of {', '.join(COMPRESSORS)}")
    layout = ArrayLayout(
        directory=str(directory),
        shape=shape,
        dtype=dtype.str,
        shard_shape=shard_shape,
        chunk_shape=chunk_shape,
        sharded=sharded,
        compressor=compressor,
        dimension_names=tuple(names),
    )
    if math.prod(chunk_shape) * dtype.itemsize > MAX_CHUNK_BYTES:
        raise refuse(f"its chunks are larger than {MAX_CHUNK_BYTES >> 20} MiB")
    if math.prod(layout.chunks_per_shard) > MAX_CHUNKS_PER_SHARD:
        raise refuse(f"its shards hold more than {MAX_CHUNKS_PER_SHARD} chunks")
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


def _extents(value: object, minimum: int) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > 8:
        return None
    if not all(type(n) is int and minimum <= n <= 1 << 48 for n in value):
        return None
    return tuple(value)


def _configured(entry: object, name: str) -> Mapping[str, Any] | None:
    """Configuration of a named extension point, or None if it is another one."""
    if not isinstance(entry, Mapping) or entry.get("name") != name:
        return None
    configuration = entry.get("configuration", {})
    return configuration if isinstance(configuration, Mapping) else None


def _is_little(codec: object) -> bool:
    configuration = _configured(codec, "bytes")
    return configuration is not None and configuration.get("endian", "little") == "little"
