"""torch's checkpoint metadata (`.metadata`), read without running it.

torch writes the file as a pickle and reads it back with `pickle.load`, so a checkpoint of somebody else would run code.
`CheckpointReader` takes the place of torch's reader wherever a checkpoint is read: the file is parsed as plain data
(`inert_pickle.py`), checked, and only then made into torch's own classes. Entries that are not tensors are refused,
because torch unpickles them; ups writes none. Tensors are read by torch with `weights_only=True`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ups.errors import CheckpointError
from ups.record.files import open_regular, read_whole
from ups.training.inert_pickle import MAX_BYTES, Global, Instance, UnknownPickleError, read_pickle

METADATA_NAME = ".metadata"
MAX_DIMS = 16

_METADATA = "torch.distributed.checkpoint.metadata"
_INDEX, _BYTES = (_METADATA, "MetadataIndex"), (_METADATA, "BytesStorageMetadata")
_TENSOR, _CHUNK = (_METADATA, "TensorStorageMetadata"), (_METADATA, "ChunkStorageMetadata")
_STORED = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_SIZE = ("torch", "Size")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
# Everything that torch's own metadata mentions. Only names: none of them is looked up.
_ALLOWED = frozenset(
    {
        *((_METADATA, name) for name in ("Metadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING")),
        *(_INDEX, _BYTES, _TENSOR, _CHUNK, _STORED, _SIZE),
        *(("torch", name) for name in _DTYPES),
        ("torch.serialization", "_get_layout"),
        ("builtins", "getattr"),  # how Python before 3.11.4 writes a member of an enumeration
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib._local", "PosixPath"),
    }
)


class CheckpointReader(FileSystemReader):
    """torch's reader of a checkpoint directory, with metadata that is data."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._known = read_metadata(path)

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shape, data type and parts of every tensor, by name."""
        return {n: e for n, e in self._known.state_dict_metadata.items() if isinstance(e, TensorStorageMetadata)}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata that was checked; torch asks for it, and for one per rank, which ups never writes."""
        if kwargs.get("rank") is not None:
            raise CheckpointError(f"{self.path} has no metadata of single ranks")
        return self._known


def read_metadata(checkpoint: Path) -> Metadata:
    """The metadata of a checkpoint. Raises CheckpointError for anything that ups does not write."""
    path = checkpoint / METADATA_NAME
    try:
        return _metadata_from(read_pickle(read_whole(path, MAX_BYTES), _ALLOWED), checkpoint)
    except UnknownPickleError as error:
        raise CheckpointError(
            f"{path} is not torch's checkpoint metadata: {error}. Nothing in it was run",
            hint="do not use this checkpoint: the file is damaged, or somebody made it to run code",
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {str(error) or type(error).__name__}",
            hint="do not use this checkpoint; take an older one or a copy",
        ) from error


def _metadata_from(document: Any, checkpoint: Path) -> Metadata:
    state = _state(document, (_METADATA, "Metadata"))
    entries = {_text(name): _tensor(name, entry) for name, entry in _mapping(state["state_dict_metadata"]).items()}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    sizes: dict[str, int] = {}
    for key, value in _mapping(state["storage_data"]).items():
        index, place = _index(key), _place(value)
        if place.relative_path not in sizes:
            with open_regular(checkpoint / place.relative_path) as file:
                sizes[place.relative_path] = 0 if file is None else file.seek(0, 2)
        if place.offset + place.length > sizes[place.relative_path]:
            raise ValueError(f"'{index.fqn}' lies outside of {place.relative_path}")
        stored[index] = place
    for name, entry in entries.items():
        _check_stored(name, entry, stored)
    return Metadata({**entries}, storage_data=stored, storage_meta=StorageMeta())


def _check_stored(name: str, entry: TensorStorageMetadata, stored: Mapping[MetadataIndex, _StorageInfo]) -> None:
    """A tensor is as large as the bytes that are there for it: nothing is allocated because a file claims it."""
    item = entry.properties.dtype.itemsize
    elements = 0
    for chunk in entry.chunks:
        place = stored.get(MetadataIndex(name, chunk.offsets))
        inside = len(chunk.offsets) == len(chunk.sizes) == len(entry.size) and all(
            offset + size <= whole for offset, size, whole in zip(chunk.offsets, chunk.sizes, entry.size, strict=True)
        )
        if place is None or not inside or math.prod(chunk.sizes) * item > place.length:
            raise ValueError(f"a part of '{name}' has no bytes")
        elements += math.prod(chunk.sizes)
    if elements != math.prod(entry.size):
        raise ValueError(f"'{name}' has {math.prod(entry.size)} elements, {elements} are stored")


def _tensor(name: str, entry: Any) -> TensorStorageMetadata:
    if isinstance(entry, Instance) and (entry.of.module, entry.of.name) == _BYTES:
        raise ValueError(f"'{name}' is not a tensor, and such entries are not read")
    state = _state(entry, _TENSOR)
    properties = _made(state["properties"], (_METADATA, "TensorProperties")).state
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, Global) or dtype.module != "torch" or dtype.name not in _DTYPES:
        raise ValueError(f"'{name}' has no data type")
    if not isinstance(state["chunks"], list):
        raise ValueError(f"'{name}' has no parts")
    chunks = []
    for part in state["chunks"]:
        values = _state(part, _CHUNK)
        chunks.append(ChunkStorageMetadata(_size(values["offsets"]), _size(values["sizes"])))
    return TensorStorageMetadata(TensorProperties(_DTYPES[dtype.name]), _size(state["size"]), chunks)


def _index(key: Any) -> MetadataIndex:
    state = _state(key, _INDEX)
    offset, number = state.get("offset"), state.get("index")
    return MetadataIndex(
        _text(state["fqn"]), None if offset is None else _size(offset), None if number is None else _count(number)
    )


def _place(value: Any) -> _StorageInfo:
    state = _state(value, _STORED)
    name = _text(state["relative_path"])
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise ValueError(f"'{name[:80]}' is not a file of the checkpoint")
    if state.get("transform_descriptors"):
        raise ValueError(f"'{name[:80]}' is packed in a way that ups never uses")
    return _StorageInfo(name, _count(state["offset"]), _count(state["length"]))


def _made(value: Any, kind: tuple[str, str]) -> Instance:
    if not isinstance(value, Instance) or (value.of.module, value.of.name) != kind:
        raise ValueError(f"there is no {kind[1]} where one belongs")
    return value


def _state(value: Any, kind: tuple[str, str]) -> dict[Any, Any]:
    return _mapping(_made(value, kind).state)


def _mapping(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError("there is no table where one belongs")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("there is no text where one belongs")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError("a size or a place is not a number of 0 or more")
    return value


def _size(value: Any) -> torch.Size:
    arguments = _made(value, _SIZE).arguments
    numbers = arguments[0] if len(arguments) == 1 else None
    if not isinstance(numbers, tuple) or len(numbers) > MAX_DIMS:
        raise ValueError(f"a shape is not a list of at most {MAX_DIMS} numbers")
    return torch.Size([_count(number) for number in numbers])
