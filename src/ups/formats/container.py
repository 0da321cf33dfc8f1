"""A file of named arrays, whatever its format: what is in it, and regions of it. What they mean is left to others.

Owns the contract, arrays in memory and NumPy files (mapped, never unpickled); HDF5 and Zarr are in `container_hdf5` and
`container_zarr`, and `open_container` chooses. A container is picklable, opens files lazily in each process and carries
no handle over a fork.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import math
import re
import struct
import tokenize
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ups.buckets.path import data_path, natural
from ups.errors import DataError
from ups.formats.base import Array
from ups.formats.hdf5 import SAMPLE_BLOCKS, FileKey, Region, file_key, hash_sample, map_named, open_unchanged
from ups.formats.shards import ProcessCache
from ups.record.files import is_number

# What a file may hold in small arrays that are read whole: coordinates, times, parameters.
MAX_SMALL_VALUES = 1 << 22

Attribute = float | str
_DIGITS = re.compile(r"\d+")
NUMPY_MAGIC = b"\x93NUMPY"
ZIP_MAGIC = b"PK\x03\x04"
MAX_MEMBERS = 4096
MAX_UNPACKED_BYTES = 1 << 30
MAX_DIMS = 8
_LOCAL_HEADER = struct.Struct("<4s22xHH")
# What the parsers of the archive and of the header raise.
_DAMAGE = (
    *(OSError, ValueError, EOFError, NotImplementedError, RuntimeError, OverflowError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, tokenize.TokenError),
)
_NUMPY_HINT = "save it again with np.save or np.savez"


@dataclass(frozen=True, slots=True)
class Variable:
    """One array of numbers. dims: the names that the file gives to its dimensions, '' where it gives none.

    column_major: the writer varies the first dimension fastest (MATLAB), so that time usually stands after space.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    column_major: bool = False

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def as_row(self) -> Variable:
        """A row (1, n) or a column (n, 1) as (n,), for files whose writer has no other vectors; others unchanged."""
        if len(self.shape) != 2 or min(self.shape) != 1 or self.size == 1:
            return self
        return replace(self, shape=(self.size,), dims=(self.dims[self.shape.index(self.size)],))


class Container(ABC):
    """An opened file. left_out: what it has that is not read, in words. attributes: numbers and texts of the file.

    part: what of the file this is, in words, where one file has several (trajectories of unequal length).
    assumption: how the files of a folder are read.
    """

    def __init__(
        self,
        path: str,
        variables: Mapping[str, Variable],
        attributes: Mapping[str, Attribute],
        left_out: Sequence[str] = (),
        part: str = "",
    ) -> None:
        self.path, self.variables, self.attributes = path, dict(variables), dict(attributes)
        self.left_out, self.part, self.assumption = list(left_out), part, ""

    @property
    def label(self) -> str:
        """The file, and what of it, for messages."""
        return f"{self.path} {self.part}" if self.part else self.path

    def parts(self) -> list[Container]:
        """The parts of a file that holds several; else itself alone."""
        return [self]

    @abstractmethod
    def read(self, name: str, region: Region) -> Array:
        """Values of a region, one slice with plain bounds for each dimension; may be a read-only view."""

    @abstractmethod
    def close(self) -> None:
        """Release what this process has open."""

    def identity(self) -> str:
        """Hash of the size and of a sample of the bytes."""
        files = self._files()
        sizes = [file.stat().st_size for file in files]
        digest = hashlib.sha256(json.dumps(["arrays", sizes]).encode())
        for file, size in zip(files[:1000], sizes, strict=False):
            hash_sample(digest, file, size, max(2, SAMPLE_BLOCKS // len(files)))
        return digest.hexdigest()

    def _files(self) -> list[Path]:
        path = data_path(self.path)
        return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]

    def whole(self, name: str) -> Array:
        """All values of a small array as float64."""
        variable = self.variables[name]
        if variable.size > MAX_SMALL_VALUES:
            raise DataError(
                f"{self.path}: array '{name}' of shape {variable.shape} is too large for what it is used as"
            )
        return self.decoded(name, tuple(slice(0, n, 1) for n in variable.shape), np.float64)

    def number(self, name: str) -> float:
        """The value of an array that holds one."""
        return float(self.whole(name).reshape(-1)[0])

    def decoded(self, name: str, region: Region, dtype: npt.DTypeLike | None = None) -> Array:
        """Values as meant: NetCDF and Zarr store packed ones with a scale, an offset and a number for what is missing.

        dtype: default that of the file.
        """
        values, attributes = np.asarray(self.read(name, region), dtype), self.variables[name].attributes
        for key in ("_FillValue", "missing_value"):
            mark = attributes.get(key)
            if isinstance(mark, float):
                values = np.where(values == mark, np.nan, values)
        scale, offset = (attributes.get(key) for key in ("scale_factor", "add_offset"))
        scale, offset = (scale if isinstance(scale, float) else 1.0), (offset if isinstance(offset, float) else 0.0)
        if scale == 0 or not math.isfinite(scale) or not math.isfinite(offset):
            raise DataError(
                f"{self.label}: array '{name}' has scale_factor {scale:g} and add_offset {offset:g}",
                hint="its values are value * scale_factor + add_offset, with finite numbers and a scale that is not 0: "
                "write the file again with the right attributes",
            )
        return values if (scale, offset) == (1.0, 0.0) else values * scale + offset


def find_families(arrays: Iterable[str]) -> dict[str, list[str]]:
    """Which groups of a file are trajectories: siblings whose names differ by a number and that hold the same arrays.

    Parent -> its largest set of at least two such groups, in the order of their numbers. None lies in another.
    """
    contents: dict[str, set[str]] = {}
    for name in arrays:
        for parent in parents(name):
            contents.setdefault(parent, set()).add(name.removeprefix(f"{parent}/"))
    alike: dict[str, dict[tuple[str, frozenset[str]], list[str]]] = {}
    for group, names in contents.items():
        parent, _, own = group.rpartition("/")
        alike.setdefault(parent, {}).setdefault((_DIGITS.sub("0", own), frozenset(names)), []).append(group)
    families: dict[str, list[str]] = {}
    inside: set[str] = set()
    for parent, sets in sorted(alike.items()):
        largest = max(sets.values(), key=len)
        if len(largest) > 1 and inside.isdisjoint((parent, *parents(parent))):
            families[parent] = sorted(largest, key=natural)
            inside.update(largest)
    return families


def ambiguous(ranks: Mapping[str, int]) -> list[list[str]]:
    """Arrays of the same name in sibling groups, each of which would pass for a field: `a/u` and `b/u`.

    An array of a family stays where its siblings are no family.
    """
    same_name: dict[tuple[str, str], list[str]] = {}
    for name, rank in ranks.items():
        if rank < 2:
            continue
        for group in parents(name):
            same_name.setdefault((group.rpartition("/")[0], name.removeprefix(f"{group}/")), []).append(name)
    ambiguities: list[list[str]] = []
    seen: set[str] = set()
    for (parent, _), names in same_name.items():
        start = f"{parent}/*/" if parent else "*/"
        rest = [name for name in names if not name.startswith(start) and name not in seen]
        if len(names) > 1 and rest:
            ambiguities.append(rest)
            seen.update(rest)
    return ambiguities


def listed(names: list[str]) -> str:
    """The first of many names, for a message."""
    return " and ".join(f"'{name}'" for name in names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def parents(path: str) -> list[str]:
    """The groups that a path leads through, the outermost first."""
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


class MemoryContainer(Container):
    """Arrays by name; of an xarray.Dataset its variables and coordinates."""

    def __init__(self, arrays: Any) -> None:
        self._arrays: dict[str, Any] = {}
        variables: dict[str, Variable] = {}
        left_out: list[str] = []
        dataset = hasattr(arrays, "data_vars")
        for key, value in (arrays.variables if dataset else arrays).items():
            name = str(key)
            array = value if dataset else np.asarray(value)
            attributes = numbers_and_texts(_plain_values(value.attrs), name, left_out) if dataset else {}
            if np.dtype(array.dtype).kind in "mM" and array.size:
                # As xarray decodes them: dates become seconds since the first, durations seconds.
                array = np.asarray(array)
                since = array.reshape(-1)[0] if array.dtype.kind == "M" else np.timedelta64(0, "s")
                array = (array - since) / np.timedelta64(1, "s")
                attributes["units"] = "s"
            if np.dtype(array.dtype).kind not in "fiu":
                left_out.append(f"'{name}', which does not hold numbers ({array.dtype})")
                continue
            dims = tuple(str(d) for d in value.dims) if dataset else ("",) * array.ndim
            self._arrays[name] = array
            variables[name] = Variable(name, tuple(int(n) for n in array.shape), dims, attributes)
        if not variables:
            raise DataError("no array of numbers was given", hint="give {'u': array, 'x': coordinates, ...}")
        facts = numbers_and_texts(_plain_values(arrays.attrs), "", left_out) if dataset else {}
        super().__init__("the given arrays", variables, facts, left_out)

    def read(self, name: str, region: Region) -> Array:
        part = self._arrays[name][region]
        return np.asarray(getattr(part, "values", part))

    def close(self) -> None:
        """Nothing is open."""

    def identity(self) -> str:
        shapes = [(name, variable.shape) for name, variable in sorted(self.variables.items())]
        digest = hashlib.sha256(repr(shapes).encode())
        for name, variable in sorted(self.variables.items()):
            region = tuple(slice(0, max(1, min(n, 16)), 1) for n in variable.shape)
            digest.update(np.ascontiguousarray(self.read(name, region), np.float64).tobytes())
        return digest.hexdigest()


def numbers_and_texts(attributes: Mapping[str, Any], owner: str, left_out: list[str]) -> dict[str, Attribute]:
    """Attributes that are texts or numbers; each number of a list by its index, so that a description can name it."""
    values: dict[str, Attribute] = {}
    for key, value in list(attributes.items())[:256]:
        numbers = value if isinstance(value, list) else [value]
        if isinstance(value, str):
            values[key] = value[:1000]
        elif 0 < len(numbers) <= 64 and all(map(is_number, numbers)):
            names = [key] if len(numbers) == 1 else [f"{key}[{i}]" for i in range(len(numbers))]
            values |= dict(zip(names, map(float, numbers), strict=True))
        elif key not in ("_ARRAY_DIMENSIONS", "_FillValue"):
            left_out.append(f"attribute '{key[:80]}'" + (f" of '{owner}'" if owner else ""))
    return values


def _plain_values(attributes: Mapping[Any, Any]) -> dict[str, Any]:
    """Attributes of xarray as texts and lists."""
    return {str(k): v if isinstance(v, str) else np.asarray(v).reshape(-1).tolist() for k, v in attributes.items()}


@dataclass(frozen=True, slots=True)
class _NumpyArray:
    """Where the values of an array are: at `offset` of the file, or packed in a member of the archive."""

    key: FileKey
    shape: tuple[int, ...]
    dtype: str
    fortran: bool
    offset: int
    packed: str = ""


class NumpyContainer(Container):
    """The arrays of one .npy or .npz, or of several .npy."""

    def __init__(self, path: str, arrays: dict[str, _NumpyArray], left_out: list[str]) -> None:
        variables = {name: Variable(name, stored.shape, ("",) * len(stored.shape)) for name, stored in arrays.items()}
        super().__init__(path, variables, {}, left_out)
        self._stored = arrays

    def read(self, name: str, region: Region) -> Array:
        stored = self._stored[name]
        try:
            members = open_unchanged(_unpacked, stored.key, _Members) if stored.packed else None
            data = members.get(name, stored) if members is not None else None
        except _DAMAGE as error:
            raise DataError(f"{self.path}: array '{name}' is damaged: {str(error)[:200]}", hint=_NUMPY_HINT) from error
        if data is None:
            mapped = open_unchanged(_maps, stored.key, map_named)
            size = int(np.prod(stored.shape, dtype=np.int64)) * np.dtype(stored.dtype).itemsize
            data = mapped[stored.offset : stored.offset + size]
        values = data.view(stored.dtype).reshape(stored.shape, order="F" if stored.fortran else "C")
        return np.asarray(values[region])

    def close(self) -> None:
        for file in self._files():
            _maps.drop(str(file))
            _unpacked.drop(str(file))

    def _files(self) -> list[Path]:
        return [Path(path) for path in dict.fromkeys(stored.key[0] for stored in self._stored.values())]


def open_numpy(path: Path) -> NumpyContainer:
    """The arrays of a file; a .npy has one, called as the file. Raises DataError."""
    key = file_key(path)
    try:
        with path.open("rb") as file:
            if file.read(6) == NUMPY_MAGIC:
                file.seek(0)
                stored = _header(file, key, key[1])
                if isinstance(stored, str):
                    raise DataError(f"{path} {stored}", hint=_NUMPY_HINT)
                return NumpyContainer(key[0], {path.name.split(".")[0] or "array": stored}, [])
        return _open_archive(path, key)
    except (*_DAMAGE, MemoryError) as error:  # Python's parser calls an expression too deep a lack of memory
        raise DataError(f"{path} is no sound NumPy file: {str(error)[:200]}", hint=_NUMPY_HINT) from error


def open_numpy_folder(folder: Path, files: Sequence[Path]) -> list[Container]:
    """The .npy files of a folder: those whose names differ by a number are trajectories, others are arrays of each."""
    families: dict[str, list[Path]] = {}
    for file in files:
        families.setdefault(re.sub(r"\d+", "0", file.stem), []).append(file)
    rows = [members for members in families.values() if len(members) > 1]
    if len({len(members) for members in rows}) > 1:
        shown = ", ".join(f"{len(members)} like {members[0].name}" for members in rows)
        raise DataError(
            f"{folder} has unequal numbers of files that would be trajectories: {shown}",
            hint="write an .npz for each trajectory, which holds its arrays",
        )
    how = "arrays of the same trajectories"
    if rows:
        how = "a trajectory each: " + ", ".join(f"{members[0].name} to {members[-1].name}" for members in rows)
    parts: list[Container] = []
    for number in range(len(rows[0]) if rows else 1):
        arrays: dict[str, _NumpyArray] = {}
        for members in families.values():
            file = members[number % len(members)]
            name = re.sub(r"\d+", "", file.stem).strip("_-. ") if len(members) > 1 else file.stem
            name = "u" if len(families) == 1 and rows else name
            inside = open_numpy(file)._stored
            if len(inside) != 1:
                raise DataError(f"{file} holds {len(inside)} arrays, and is called .npy", hint=_NUMPY_HINT)
            stored = next(iter(inside.values()))
            if rows and len(members) == 1 and stored.shape == (len(rows[0]),) and name.lower() not in "xyzt":
                # One value for each trajectory: the parameter of this one.
                stored = replace(stored, shape=(), offset=stored.offset + number * np.dtype(stored.dtype).itemsize)
            arrays[name or "u"] = stored
        parts.append(NumpyContainer(str(rows[0][number] if rows else folder), arrays, []))
        parts[-1].assumption = f"the .npy files of a folder are read as {how}"
    return parts


def _open_archive(path: Path, key: FileKey) -> NumpyContainer:
    arrays: dict[str, _NumpyArray] = {}
    left_out: list[str] = []
    unpacked = 0
    with zipfile.ZipFile(path) as archive, path.open("rb") as raw:
        members = archive.infolist()
        if len(members) > MAX_MEMBERS:
            raise DataError(f"{path} has more than {MAX_MEMBERS} arrays")
        for member in members:
            name = member.filename.removesuffix(".npy")
            if not member.filename.endswith(".npy") or name in arrays:
                left_out.append(f"member '{member.filename[:80]}', which is no array")
                continue
            if member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1:
                raw.seek(member.header_offset)
                magic, name_size, extra_size = _LOCAL_HEADER.unpack(raw.read(_LOCAL_HEADER.size))
                begin = member.header_offset + _LOCAL_HEADER.size + name_size + extra_size
                raw.seek(begin)
                stored = _header(raw, key, begin + member.file_size) if magic == b"PK\x03\x04" else "is damaged"
                if not isinstance(stored, str) and begin + member.file_size > key[1]:
                    stored = "ends beyond the file"
            elif unpacked + member.file_size > MAX_UNPACKED_BYTES:
                stored = (
                    f"has {member.file_size >> 20} MiB compressed in an .npz, which must be unpacked into memory, "
                    f"where all arrays of a file together may have {MAX_UNPACKED_BYTES >> 20} MiB; "
                    "save it with np.savez or np.save"
                )
            else:
                with archive.open(member) as stream:
                    stored = _header(stream, key, member.file_size, packed=member.filename)
                unpacked += 0 if isinstance(stored, str) else member.file_size
            if isinstance(stored, str):
                left_out.append(f"array '{name[:80]}', which {stored}")
            else:
                arrays[name] = stored
    return NumpyContainer(key[0], arrays, left_out)


def _header(file: IO[bytes], key: FileKey, end: int, packed: str = "") -> _NumpyArray | str:
    """Where an array is, or why it is not read. The header is a literal that numpy parses without running anything."""
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0), (3, 0)):
        return f"is of the unknown version {version}"
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject:
        return "holds Python objects, which would have to be unpickled"
    if dtype.kind not in "fiub":
        return f"does not hold real numbers ({dtype})"
    offset = file.tell()
    size = int(np.prod([int(n) for n in shape], dtype=object)) * dtype.itemsize if shape else dtype.itemsize
    possible = len(shape) <= MAX_DIMS and min(shape, default=1) >= 0 and max(shape, default=1) < 1 << 62
    if not possible or offset + size > end:
        return f"has the shape {shape}, which the file does not hold"
    return _NumpyArray(key, tuple(int(n) for n in shape), dtype.str, bool(fortran), offset, packed)


class _Members:
    """Compressed members that this process has unpacked."""

    def __init__(self, path: str) -> None:
        self._path, self._arrays = path, dict[str, Array]()

    def get(self, name: str, stored: _NumpyArray) -> Array:
        if name not in self._arrays:
            size = int(np.prod(stored.shape, dtype=np.int64)) * np.dtype(stored.dtype).itemsize
            with zipfile.ZipFile(self._path) as archive, archive.open(stored.packed) as stream:
                stream.read(stored.offset)
                data = io.BytesIO(stream.read(size)).getbuffer()
            if len(data) != size:
                raise DataError(f"{self._path}: array '{name}' is shorter than its header says", hint=_NUMPY_HINT)
            self._arrays[name] = np.frombuffer(data, np.uint8)
        return self._arrays[name]


_maps: ProcessCache[Array] = ProcessCache(64)
_unpacked: ProcessCache[_Members] = ProcessCache(8)
