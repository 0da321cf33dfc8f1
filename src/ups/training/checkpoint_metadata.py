"""torch's checkpoint metadata (`.metadata`), read without running it.

torch writes the file as a pickle and reads it back with `pickle.load`, so a checkpoint of somebody else would run code.
`CheckpointReader` takes the place of torch's reader wherever a checkpoint is read: the file is parsed as plain data
(`read_pickle` and its helpers), checked, and only then made into torch's own classes. Entries that are not tensors are
refused, because torch unpickles them; ups writes none. Tensors are read by torch with `weights_only=True`.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

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
from ups.record.files import open_regular, safe_read

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
        return _metadata_from(read_pickle(safe_read(path, MAX_BYTES), _ALLOWED), checkpoint)
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
    entries = {
        _plain(str, name): _tensor(name, entry) for name, entry in _plain(dict, state["state_dict_metadata"]).items()
    }
    stored: dict[MetadataIndex, _StorageInfo] = {}
    sizes: dict[str, int] = {}
    for key, value in _plain(dict, state["storage_data"]).items():
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
    if isinstance(entry, Instance) and entry.of == _BYTES:
        raise ValueError(f"'{name}' is not a tensor, and such entries are not read")
    state = _state(entry, _TENSOR)
    properties = _made(state["properties"], (_METADATA, "TensorProperties")).state
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, Global) or dtype.module != "torch" or dtype.name not in _DTYPES:
        raise ValueError(f"'{name}' has no data type")
    chunks = []
    for part in _plain(list, state["chunks"]):
        values = _state(part, _CHUNK)
        chunks.append(ChunkStorageMetadata(_size(values["offsets"]), _size(values["sizes"])))
    return TensorStorageMetadata(TensorProperties(_DTYPES[dtype.name]), _size(state["size"]), chunks)


def _index(key: Any) -> MetadataIndex:
    state = _state(key, _INDEX)
    offset, number = state.get("offset"), state.get("index")
    return MetadataIndex(
        _plain(str, state["fqn"]), None if offset is None else _size(offset), None if number is None else _count(number)
    )


def _place(value: Any) -> _StorageInfo:
    state = _state(value, _STORED)
    name = _plain(str, state["relative_path"])
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise ValueError(f"'{name[:80]}' is not a file of the checkpoint")
    if state.get("transform_descriptors"):
        raise ValueError(f"'{name[:80]}' is packed in a way that ups never uses")
    return _StorageInfo(name, _count(state["offset"]), _count(state["length"]))


def _made(value: Any, kind: tuple[str, str]) -> Instance:
    if not isinstance(value, Instance) or value.of != kind:
        raise ValueError(f"there is no {kind[1]} where one belongs")
    return value


def _state(value: Any, kind: tuple[str, str]) -> dict[Any, Any]:
    state: dict[Any, Any] = _plain(dict, _made(value, kind).state)
    return state


def _plain(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"there is no {kind.__name__} where one belongs")
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


MAX_BYTES = 1 << 30


class UnknownPickleError(ValueError):
    """The file is not a pickle of plain data classes; the message says what it asked for."""


class Global(NamedTuple):
    """The name of a class or function, never the thing itself."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class Instance:
    """What the file wants made: the name of a class or function, its arguments, and the state set afterwards."""

    of: Global
    arguments: tuple[Any, ...]
    state: Any = None


def _printable(text: str) -> str:
    text.encode()  # pickletools lets lone surrogates through, which cannot be printed
    return text


_MARK: Final = object()
# What each operation puts on the stack; `argument` is what stands behind it in the file.
_PUSHED: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), lambda argument: argument),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE"), _printable),
    "NONE": lambda argument: None,
    "NEWTRUE": lambda argument: True,
    "NEWFALSE": lambda argument: False,
    "EMPTY_DICT": lambda argument: {},
    "EMPTY_LIST": lambda argument: [],
    "EMPTY_TUPLE": lambda argument: (),
    "MARK": lambda argument: _MARK,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NO_VALUE = frozenset({"PROTO", "FRAME"})


def read_pickle(data: bytes, allowed: frozenset[tuple[str, str]]) -> Any:
    """The value in `data`; `allowed` holds the (module, name) pairs that it may mention.

    Raises UnknownPickleError for any other name and for every operation that plain data does not need.
    """
    try:
        return _Machine(allowed).run(data)
    except UnknownPickleError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        raise UnknownPickleError(f"it is cut short or damaged ({type(error).__name__})") from error


class _Machine:
    """The stack machine of the pickle format, reduced to data. `pickletools` reads the operations."""

    def __init__(self, allowed: frozenset[tuple[str, str]]) -> None:
        self._allowed = allowed
        self._stack: list[Any] = []
        self._memo: dict[Any, Any] = {}

    def run(self, data: bytes) -> Any:
        stack = self._stack
        for operation, argument, at in pickletools.genops(data):
            name = operation.name
            if name == "MEMOIZE":
                self._memo[len(self._memo)] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(self._memo[argument])
            elif name in _PUSHED:
                stack.append(_PUSHED[name](argument))
            elif name in _TUPLES:
                stack.append(tuple(self._pop(_TUPLES[name])))
            elif name == "TUPLE":
                stack.append(tuple(self._since_mark()))
            elif name == "STACK_GLOBAL":
                stack.append(self._global(*self._pop(2)))
            elif name in ("REDUCE", "NEWOBJ"):
                of, arguments = self._pop(2)
                stack.append(Instance(_of(Global, of), _of(tuple, arguments)))
            elif name not in _NO_VALUE and name != "STOP":
                self._change(name, at)
        (value,) = stack
        return value

    def _change(self, name: str, at: int | None) -> None:
        """The operations that change what is on the stack already."""
        stack = self._stack
        if name == "BUILD":
            state = stack.pop()
            made = _of(Instance, stack[-1])
            if made.state is not None:
                raise UnknownPickleError("it sets the state of an object twice")
            made.state = state
        elif name in ("APPEND", "APPENDS"):
            items = self._pop(1) if name == "APPEND" else self._since_mark()
            _of(list, stack[-1]).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop(2) if name == "SETITEM" else self._since_mark()
            self._fill(items)
        else:
            raise UnknownPickleError(f"it uses the pickle operation {name} at byte {at}")

    def _global(self, module: Any, name: Any) -> Global:
        named = Global(_of(str, module), _of(str, name))
        if named not in self._allowed:
            raise UnknownPickleError(f"it asks for '{module[:80]}.{name[:80]}'")
        return named

    def _fill(self, items: list[Any]) -> None:
        target = _of(dict, self._stack[-1])
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Instances hash by identity. Nothing else may be a key: hashing tuples in tuples overflows the C stack.
            if type(key) not in (str, Instance):
                raise UnknownPickleError(f"a {type(key).__name__} is used as a key")
            target[key] = value

    def _pop(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise IndexError
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _since_mark(self) -> list[Any]:
        for place in range(len(self._stack) - 1, -1, -1):
            if self._stack[place] is _MARK:
                taken = self._stack[place + 1 :]
                del self._stack[place:]
                return taken
        raise IndexError


def _of(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value
