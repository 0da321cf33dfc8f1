"""torch's checkpoint metadata (`.metadata`), read without running it.

torch writes the file as a pickle and reads it back with `pickle.load`, so a checkpoint of somebody else would run code.
`CheckpointReader` takes the place of torch's reader wherever a checkpoint is read: the file is parsed as plain data
(`read_pickle` and its helpers), checked, and only then made into torch's own classes. Entries that are not tensors are
refused, because torch unpickles them; ups writes none. Tensors are read by torch with `weights_only=True`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

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


MAX_BYTES = 1 << 30


class UnknownPickleError(ValueError):
    """The file is not a pickle of plain data classes; the message says what it asked for."""


class Global:
    """The name of a class or function, never the thing itself."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Instance:
    """What the file wants made: the name of a class or function, its arguments, and the state set afterwards."""

    __slots__ = ("arguments", "of", "state")

    def __init__(self, of: Global, arguments: tuple[Any, ...]) -> None:
        self.of, self.arguments = of, arguments
        self.state: Any = None


_MARK: Final = object()
_CONSTANTS: dict[int, Any] = {ord("N"): None, 0x88: True, 0x89: False}
_EMPTY: dict[int, Callable[[], Any]] = {ord("}"): dict, ord("]"): list, ord(")"): tuple}
_INTEGERS = {ord("M"): struct.Struct("<H"), ord("J"): struct.Struct("<i")}
_BYTE, _LENGTH = struct.Struct("<B"), struct.Struct("<I")


def read_pickle(data: bytes, allowed: frozenset[tuple[str, str]]) -> Any:
    """The value in `data`; `allowed` holds the (module, name) pairs that it may mention.

    Raises UnknownPickleError for any other name and for every operation that plain data does not need.
    """
    try:
        return _Machine(data, allowed).run()
    except (IndexError, TypeError, struct.error, UnicodeDecodeError) as error:
        raise UnknownPickleError(f"it is cut short or damaged ({type(error).__name__})") from error


class _Machine:
    """The stack machine of the pickle format, reduced to data."""

    def __init__(self, data: bytes, allowed: frozenset[tuple[str, str]]) -> None:
        self._data, self._allowed = data, allowed
        self._at = 0
        self._stack: list[Any] = []
        self._memo: list[Any] = []

    def run(self) -> Any:
        """The frequent operations, in line and in order of frequency: large runs have millions of them."""
        data, stack, memo = self._data, self._stack, self._memo
        at = 0
        while True:
            code = data[at]
            at += 1
            if code == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif code == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif code == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif code == 0x85:  # TUPLE1
                stack[-1] = (stack[-1],)
            elif code == 0x86:  # TUPLE2
                last = stack.pop()
                stack[-1] = (stack[-1], last)
            elif code in (0x52, 0x81):  # REDUCE, NEWOBJ
                arguments = stack.pop()
                stack[-1] = Instance(_of(Global, stack[-1]), _of(tuple, arguments))
            elif code == 0x8C:  # SHORT_BINUNICODE
                end = at + 1 + data[at]
                stack.append(data[at + 1 : end].decode("utf-8"))
                at = end
            elif code == 0x28:  # MARK
                stack.append(_MARK)
            elif code == 0x62:  # BUILD
                state = stack.pop()
                made = _of(Instance, stack[-1])
                if made.state is not None:
                    raise UnknownPickleError("it sets the state of an object twice")
                made.state = state
            elif code == 0x2E:  # STOP
                if len(stack) != 1 or at > len(data):
                    raise UnknownPickleError("it does not hold exactly one value")
                return stack[0]
            else:
                self._at = at
                self._operate(code)
                at = self._at

    def _operate(self, code: int) -> None:
        stack = self._stack
        if code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in _EMPTY:
            stack.append(_EMPTY[code]())
        elif code in _INTEGERS:
            stack.append(self._number(_INTEGERS[code]))
        elif code == ord("X"):  # BINUNICODE
            stack.append(self._take(self._number(_LENGTH)).decode("utf-8"))
        elif code == 0x87:  # TUPLE3
            stack.append(tuple(self._pop(3)))
        elif code == ord("t"):
            stack.append(tuple(self._since_mark()))
        elif code in (ord("a"), ord("e")):
            items = [stack.pop()] if code == ord("a") else self._since_mark()
            _of(list, stack[-1]).extend(items)
        elif code in (ord("s"), ord("u")):
            items = self._pop(2) if code == ord("s") else self._since_mark()
            self._fill(items)
        elif code == 0x93:  # STACK_GLOBAL
            module, name = self._pop(2)
            stack.append(self._global(_of(str, module), _of(str, name)))
        elif code == 0x8A:  # LONG1
            size = self._number(_BYTE)
            stack.append(int.from_bytes(self._take(size), "little", signed=True))
        elif code == 0x80:  # PROTO
            if self._number(_BYTE) > 5:
                raise UnknownPickleError("it has a newer pickle protocol")
        elif code == 0x95:  # FRAME: a hint about reading ahead
            self._take(8)
        else:
            raise UnknownPickleError(f"it uses the pickle operation 0x{code:02x} at byte {self._at - 1}")

    def _global(self, module: str, name: str) -> Global:
        if (module, name) not in self._allowed:
            raise UnknownPickleError(f"it asks for '{module[:80]}.{name[:80]}'")
        return Global(module, name)

    def _fill(self, items: list[Any]) -> None:
        target = _of(dict, self._stack[-1])
        if len(items) % 2:
            raise UnknownPickleError("a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Instances hash by identity. Nothing else may be a key: hashing tuples in tuples overflows the C stack.
            if type(key) not in (str, Instance):
                raise UnknownPickleError(f"a {type(key).__name__} is used as a key")
            target[key] = value

    def _number(self, layout: struct.Struct) -> int:
        (value,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return int(value)

    def _take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        if len(taken) != size:
            raise IndexError
        self._at += size
        return taken

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
