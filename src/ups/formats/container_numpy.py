"""NumPy files: .npy and the arrays of .npz. Mapped, never unpickled.

An array of an .npz that is not compressed (`np.savez`) is a run of bytes in the file and is mapped as an .npy is; a
compressed one has to be unpacked into memory, up to a limit.
"""

from __future__ import annotations

import io
import lzma
import os
import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import numpy as np

from ups.errors import DataError
from ups.formats.base import Array
from ups.formats.container import Container, Variable
from ups.formats.hdf5_arrays import Region
from ups.formats.hdf5_guard import FileKey, file_key
from ups.formats.shards import ProcessCache, map_file

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
_HINT = "save it again with np.save or np.savez"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the values of an array are: at `offset` of the file, or packed in a member of the archive."""

    key: FileKey
    shape: tuple[int, ...]
    dtype: str
    fortran: bool
    offset: int
    packed: str = ""


class NumpyContainer(Container):
    """The arrays of one .npy or .npz, or of several .npy."""

    def __init__(self, path: str, places: dict[str, _Place], left_out: list[str]) -> None:
        variables = {name: Variable(name, place.shape, ("",) * len(place.shape)) for name, place in places.items()}
        super().__init__(path, variables, {}, left_out)
        self._places = places

    def read(self, name: str, region: Region) -> Array:
        place = self._places[name]
        try:
            members = _unpacked.get((place.key[0], ()), lambda: _Members(place.key)) if place.packed else None
            data = members.get(name, place) if members is not None else None
        except _DAMAGE as error:
            raise DataError(f"{self.path}: array '{name}' is damaged: {str(error)[:200]}", hint=_HINT) from error
        if data is None:
            mapped = _maps.get((place.key[0], ()), lambda: _map_unchanged(place.key))
            size = int(np.prod(place.shape, dtype=np.int64)) * np.dtype(place.dtype).itemsize
            data = mapped[place.offset : place.offset + size]
        values = data.view(place.dtype).reshape(place.shape, order="F" if place.fortran else "C")
        return np.asarray(values[region])

    def close(self) -> None:
        for file in self._files():
            _maps.drop(str(file))
            _unpacked.drop(str(file))

    def _files(self) -> list[Path]:
        return [Path(path) for path in dict.fromkeys(place.key[0] for place in self._places.values())]


def open_numpy(path: Path) -> NumpyContainer:
    """The arrays of a file; a .npy has one, called as the file. Raises DataError."""
    key = file_key(path)
    try:
        with path.open("rb") as file:
            if file.read(6) == NUMPY_MAGIC:
                file.seek(0)
                place = _header(file, key, key[1])
                if isinstance(place, str):
                    raise DataError(f"{path} {place}", hint=_HINT)
                return NumpyContainer(key[0], {path.name.split(".")[0] or "array": place}, [])
        return _open_archive(path, key)
    except (*_DAMAGE, MemoryError) as error:  # Python's parser calls an expression too deep a lack of memory
        raise DataError(f"{path} is no sound NumPy file: {str(error)[:200]}", hint=_HINT) from error


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
        places: dict[str, _Place] = {}
        for members in families.values():
            file = members[number % len(members)]
            name = re.sub(r"\d+", "", file.stem).strip("_-. ") if len(members) > 1 else file.stem
            name = "u" if len(families) == 1 and rows else name
            arrays = open_numpy(file)._places
            if len(arrays) != 1:
                raise DataError(f"{file} holds {len(arrays)} arrays, and is called .npy", hint=_HINT)
            place = next(iter(arrays.values()))
            if rows and len(members) == 1 and place.shape == (len(rows[0]),) and name.lower() not in "xyzt":
                # One value for each trajectory: the parameter of this one.
                place = replace(place, shape=(), offset=place.offset + number * np.dtype(place.dtype).itemsize)
            places[name or "u"] = place
        parts.append(NumpyContainer(str(rows[0][number] if rows else folder), places, []))
        parts[-1].assumption = f"the .npy files of a folder are read as {how}"
    return parts


def _open_archive(path: Path, key: FileKey) -> NumpyContainer:
    places: dict[str, _Place] = {}
    left_out: list[str] = []
    unpacked = 0
    with zipfile.ZipFile(path) as archive, path.open("rb") as raw:
        members = archive.infolist()
        if len(members) > MAX_MEMBERS:
            raise DataError(f"{path} has more than {MAX_MEMBERS} arrays")
        for member in members:
            name = member.filename.removesuffix(".npy")
            if not member.filename.endswith(".npy") or name in places:
                left_out.append(f"member '{member.filename[:80]}', which is no array")
                continue
            if member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1:
                raw.seek(member.header_offset)
                magic, name_size, extra_size = _LOCAL_HEADER.unpack(raw.read(_LOCAL_HEADER.size))
                begin = member.header_offset + _LOCAL_HEADER.size + name_size + extra_size
                raw.seek(begin)
                place = _header(raw, key, begin + member.file_size) if magic == b"PK\x03\x04" else "is damaged"
                if not isinstance(place, str) and begin + member.file_size > key[1]:
                    place = "ends beyond the file"
            elif unpacked + member.file_size > MAX_UNPACKED_BYTES:
                place = (
                    f"has {member.file_size >> 20} MiB compressed in an .npz, which must be unpacked into memory, "
                    f"where all arrays of a file together may have {MAX_UNPACKED_BYTES >> 20} MiB; "
                    "save it with np.savez or np.save"
                )
            else:
                with archive.open(member) as stream:
                    place = _header(stream, key, member.file_size, packed=member.filename)
                unpacked += 0 if isinstance(place, str) else member.file_size
            if isinstance(place, str):
                left_out.append(f"array '{name[:80]}', which {place}")
            else:
                places[name] = place
    return NumpyContainer(key[0], places, left_out)


def _header(file: IO[bytes], key: FileKey, end: int, packed: str = "") -> _Place | str:
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
    absurd = len(shape) > MAX_DIMS or min(shape, default=1) < 0 or max(shape, default=1) >= 1 << 62
    if absurd or offset + size > end:
        return f"has the shape {shape}, which the file does not hold"
    return _Place(key, tuple(int(n) for n in shape), dtype.str, bool(fortran), offset, packed)


class _Members:
    """Compressed members that this process has unpacked."""

    def __init__(self, key: FileKey) -> None:
        _check_unchanged(key)
        self._path, self._found = key[0], dict[str, Array]()

    def get(self, name: str, place: _Place) -> Array:
        if name not in self._found:
            size = int(np.prod(place.shape, dtype=np.int64)) * np.dtype(place.dtype).itemsize
            with zipfile.ZipFile(self._path) as archive, archive.open(place.packed) as stream:
                stream.read(place.offset)
                data = io.BytesIO(stream.read(size)).getbuffer()
            if len(data) != size:
                raise DataError(f"{self._path}: array '{name}' is shorter than its header says", hint=_HINT)
            self._found[name] = np.frombuffer(data, np.uint8)
        return self._found[name]


def _map_unchanged(key: FileKey) -> Array:
    _check_unchanged(key)
    return map_file(key[0], follow_link=True)


def _check_unchanged(key: FileKey) -> None:
    if not os.path.exists(key[0]) or file_key(key[0]) != key:
        raise DataError(f"{key[0]} changed since it was checked", hint="open it again when nobody writes to it")


_maps: ProcessCache[Array] = ProcessCache(64)
_unpacked: ProcessCache[_Members] = ProcessCache(8)
