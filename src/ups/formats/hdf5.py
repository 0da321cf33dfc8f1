"""Looks at an untrusted HDF5 file in a separate process before this one opens it.

The HDF5 library is C that follows pointers in the file: damaged metadata can end in a crash, an endless loop or a
huge allocation, none of which Python can catch (docs/decisions/0007-hdf5-is-read-behind-a-guard.md). So the
structure is read by a child with limits on memory and time, and this process learns only the result. Contiguous data
is then mapped at the surveyed offset without the library; only chunked data is opened here, with metadata that the
child walked to the last chunk.
A file that passed is read here: a region is one slice per axis. Deflated chunks are inflated with a bound, because the
filter of the library grows its buffer as far as a hostile chunk asks for; the ratio of the other filters is bounded by
their format. Of a file in a bucket, contiguous data are read range by range.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import json
import math
import os
import subprocess
import tempfile
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from pydantic import TypeAdapter

import ups
from ups.buckets.cached_objects import forget
from ups.buckets.client import is_address
from ups.buckets.path import BucketPath, data_path, plain_name
from ups.errors import DataError, MachineError, UpsError, error_of_cause
from ups.formats.base import Array, FileField, FilesReader, TrajectoryFile
from ups.formats.shards import ObjectBytes, ProcessCache, map_file
from ups.record.files import load_object, open_regular, write_file_atomically
from ups.record.processes import module_command
from ups.record.run_dir import cache_directory

TIMEOUT_SECONDS = 120.0
# Every block of metadata is a request there.
BUCKET_TIMES = 10
_HINT = "get the file again from its source, and compare its checksum"
MAX_OPEN_MAPS = 64
MAX_OPEN_LIBRARY_FILES = 32
MAX_STORED_SURVEYS = 1000
# To be raised with every change of what a survey refuses or returns.
SURVEY_VERSION = 1
# The identity of a file is its size and a sample of its bytes, because a file of 93 GB takes minutes to hash.
SAMPLE_BLOCKS = 64
SAMPLE_BLOCK_BYTES = 4096
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
MATLAB_TEXT = b"MATLAB"
_T = TypeVar("_T")

# The groups of The Well.
FIELD_GROUPS = ("t0_fields", "t1_fields", "t2_fields")
BOUNDARIES = "boundary_conditions"
WELL_GROUPS = ("dimensions", "scalars", BOUNDARIES, *FIELD_GROUPS)

FileKey = tuple[str, int, int, int]
Region = tuple[slice, ...]
Values = list[float] | list[str]


@dataclass(frozen=True, slots=True)
class ArraySurvey:
    """One dataset. `offset`: where a contiguous one starts in the file, else None; `chunks` of a chunked one.

    column_major: `shape` is the reverse of what the file has, as MATLAB writes arrays.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int | None
    chunks: tuple[int, ...] | None
    filters: tuple[str, ...]
    column_major: bool = False


@dataclass
class FileSurvey:
    """Structure of one file. key: which state of which file it belongs to.

    arrays: by path without a leading '/'. dims: names of their dimensions, '' where the file gives none. attributes: of
    arrays and groups by path, '' for the file; numbers (true and false as 1 and 0) or texts, always as a list. unread:
    names of attributes that are neither. left_out: parts that are not read, a few words each.

    A PDEBench file may keep one group per trajectory. groups: their names, sorted. Arrays and attributes of such a
    group have '{}' for its name, and attributes are those of the first group. offsets: where the contiguous bytes of
    each array are, group by group. varying: attributes, and keys of the text `config`, that differ between groups.
    """

    size: int = 0
    key: FileKey = ("", 0, 0, 0)
    arrays: dict[str, ArraySurvey] = field(default_factory=dict)
    dims: dict[str, tuple[str, ...]] = field(default_factory=dict)
    attributes: dict[str, dict[str, Values]] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    groups: tuple[str, ...] = ()
    offsets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    varying: tuple[str, ...] = ()


def open_library(path: str) -> Any:
    """An `h5py.File` for reading: of this host by name, in a bucket as a file object over cached blocks."""
    import h5py

    location = data_path(path)
    if not isinstance(location, BucketPath):
        return h5py.File(path, "r", locking=False)
    file = h5py.File(location.open_object(), "r")
    if not _open_objects:
        atexit.register(_close_objects)
    _open_objects.add(file)
    return file


def _close_objects() -> None:
    """The library crashes in a file object that it still has open when Python has ended."""
    for file in list(_open_objects):
        with contextlib.suppress(Exception):
            file.close()


_open_objects: weakref.WeakSet[Any] = weakref.WeakSet()


def file_key(path: str | Path) -> FileKey:
    """(path, size, time of change, inode): equal until the file is changed."""
    name = plain_name(path)
    forget(name)  # of an address it is asked again
    status = data_path(name).stat()
    return (name, status.st_size, status.st_mtime_ns, status.st_ino)


def first_bytes(path: Path, count: int = 8) -> bytes:
    """How a file begins that may be hostile; nothing of what is no regular file, or cannot be read."""
    try:
        with open_regular(path, follow_link=True) as file:
            return b"" if file is None else file.read(count)
    except (OSError, ValueError):
        return b""


def starts_as_hdf5(start: bytes) -> bool:
    """Whether the first 520 bytes have the signature of HDF5; MATLAB puts 512 bytes before it."""
    return HDF5_MAGIC in (start[:8], start[512:])


def survey_files(paths: Sequence[str | Path], form: str = "pdebench") -> list[FileSurvey | DataError]:
    """Structure of each file, or the reason why it is refused. A file that passed once, also in another process of this
    user, is not surveyed again until it changes.

    form: what the files are read as, `pdebench`, `the_well`, `netcdf` or `tree` (`hdf5_survey`).
    """
    known = _surveys.setdefault(form, {})
    keys: list[FileKey | DataError] = [_key_or_error(path) for path in paths]
    waiting = list(dict.fromkeys(k for k in keys if not isinstance(k, DataError) and k not in known))
    known.update({key: survey for key in waiting if (survey := _load_survey(form, key)) is not None})
    waiting = [key for key in waiting if key not in known]
    while waiting:
        answers, problem = _ask_child([key[0] for key in waiting], form)
        if problem and len(answers) < len(waiting):
            blamed = f"{waiting[len(answers)][0]}: the HDF5 library {problem} while reading its structure"
            answers.append(DataError(blamed, hint=_HINT))
        for key, answer in zip(waiting, answers, strict=False):
            known[key] = answer
            if isinstance(answer, FileSurvey):
                answer.key = key
                _store_survey(form, answer)
        waiting = waiting[len(answers) :]
    return [k if isinstance(k, DataError) else known[k] for k in keys]


def survey_all(paths: Sequence[str | Path], form: str) -> list[FileSurvey]:
    """Structure of each file. Raises DataError for the first that is refused."""
    surveys: list[FileSurvey] = []
    for survey in survey_files(paths, form):
        if isinstance(survey, DataError):
            raise survey
        drop_hdf5(survey.key[0])  # what is open may be another file that had the name before
        surveys.append(survey)
    return surveys


def _survey_path(form: str, key: FileKey) -> Path | None:
    """Where the outcome is kept between commands: in the cache directory of the user. None for a file in a bucket.

    The time of the last change of the inode is part of the name, since no program can set it back.
    """
    cache = cache_directory()
    if cache is None or is_address(key[0]):
        return None
    changed = os.stat(key[0]).st_ctime_ns
    name = hashlib.sha256(json.dumps([ups.__version__, SURVEY_VERSION, form, key, changed]).encode()).hexdigest()
    return cache / "surveys" / f"{name}.json"


def _load_survey(form: str, key: FileKey) -> FileSurvey | None:
    with contextlib.suppress(OSError, ValueError):
        path = _survey_path(form, key)
        survey = _survey_type.validate_python(load_object(path)) if path is not None else None
        return survey if survey is not None and survey.key == key else None
    return None


def _store_survey(form: str, survey: FileSurvey) -> None:
    """Keep the outcome; where that is not possible the next command surveys the file again."""
    with contextlib.suppress(OSError, MachineError):
        path = _survey_path(form, survey.key)
        if path is None:
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file_atomically(path, json.dumps(asdict(survey)).encode())
        stored = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        for file in stored[:-MAX_STORED_SURVEYS]:
            file.unlink(missing_ok=True)


def _key_or_error(path: str | Path) -> FileKey | DataError:
    try:
        with open_regular(data_path(path), follow_link=True) as file:
            if file is None:
                return DataError(f"{path} is not a regular file, so it is not read", hint="name an HDF5 file")
            start = file.read(520)
            is_hdf5 = starts_as_hdf5(start)
        if start[:3] == b"CDF" and start[3:4] in (b"\x01", b"\x02", b"\x05"):
            return DataError(
                f"{path} is a NetCDF classic file (version 3), which is not read",
                hint="convert it to NetCDF-4, for instance with: nccopy -k nc4 OLD.nc NEW.nc",
            )
        if not is_hdf5 and (start.startswith(MATLAB_TEXT) or Path(path).suffix == ".mat"):
            return DataError(
                f"{path} is a MATLAB file of version 7 or older, and only version 7.3 is read",
                hint="save it from MATLAB as HDF5: save('NAME.mat', '-v7.3')",
            )
        if not is_hdf5:
            return DataError(f"{path} is not an HDF5 file", hint="stores end in .zarr; others must be HDF5")
        return file_key(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return DataError(f"{path} cannot be opened: {reason}")


def _ask_child(paths: list[str], form: str) -> tuple[list[FileSurvey | DataError], str]:
    """Answers of one child in order, and how it ended if it did not reach the last file ('' if it did)."""
    command = module_command("ups.formats.hdf5_survey", form)
    # Files, not pipes: thousands of groups make an answer of megabytes, and a killed child must not lose it.
    with tempfile.TemporaryFile() as names, tempfile.TemporaryFile() as output:
        names.write("\0".join(paths).encode())
        names.seek(0)
        # Threads of the client of a bucket reserve address space, of which the child has little.
        environment = {**os.environ, "TOKIO_WORKER_THREADS": "2", "MALLOC_ARENA_MAX": "2"}
        child = subprocess.Popen(command, stdin=names, stdout=output, stderr=subprocess.DEVNULL, env=environment)
        limit = TIMEOUT_SECONDS * (BUCKET_TIMES if any(map(is_address, paths)) else 1)
        try:
            _wait_while_it_answers(child, output, limit)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        output.seek(0)
        lines = output.read().split(b"\n")[:-1]
    answers: list[FileSurvey | DataError] = []
    for line in lines[: len(paths)]:
        data = json.loads(line)
        if "error" in data and data["cause"] != DataError.cause:
            raise error_of_cause(data["cause"], data["error"], data["hint"])
        if "error" in data:
            answers.append(DataError(data["error"], hint=data["hint"] or _HINT))
        else:
            answers.append(_survey_type.validate_python(data))
    code = child.returncode
    if code == 0 and len(answers) == len(paths):
        return answers, ""
    if code == -9:
        return answers, f"took longer than {limit:.0f} s"
    return answers, f"crashed (signal {-code})" if code < 0 else f"failed (exit code {code})"


def _wait_while_it_answers(child: subprocess.Popen[bytes], output: IO[bytes], limit: float) -> None:
    """Returns when the child has ended, or has answered nothing for `limit` seconds: it is for one file."""
    answered, deadline = 0, time.monotonic() + limit
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.1)
            return
        size = os.fstat(output.fileno()).st_size
        if size != answered:
            answered, deadline = size, time.monotonic() + limit


def read_region(key: FileKey, array: ArraySurvey, region: Region) -> Array:
    """Values of a region (slices with plain bounds inside the shape); a read-only view where the data is mapped."""
    if array.column_major:
        return read_region(key, replace(array, shape=array.shape[::-1], column_major=False), region[::-1]).T
    if array.offset is not None and is_address(key[0]):
        remote = open_unchanged(_objects, key, ObjectBytes)
        out = np.empty([len(r) for r in _indices(region)], array.dtype)
        for index, start, stop in _ranges(array, region):
            out[index] = remote[start:stop].view(array.dtype).reshape(out[index].shape)
        return out
    if array.offset is not None:
        count = int(np.prod(array.shape))
        dtype = np.dtype(array.dtype)
        mapped = open_unchanged(_maps, key, map_named)
        data = mapped[array.offset : array.offset + count * dtype.itemsize]
        return np.asarray(data.view(dtype).reshape(array.shape)[region])
    try:
        dataset = open_unchanged(_files, key, open_library)[array.name]
        objects = open_unchanged(_objects, key, ObjectBytes) if is_address(key[0]) else None
        plain = objects is not None and array.chunks is not None and set(array.filters) <= {"shuffle"}
        if plain or "deflate" in array.filters:
            return _inflate_region(dataset, array, region, objects)
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


def open_unchanged(cache: ProcessCache[_T], key: FileKey, opener: Callable[[str], _T]) -> _T:
    """What is open of a file, from a cache of this process. Raises DataError if the file changed after its survey."""

    def open_checked() -> _T:
        if not data_path(key[0]).exists() or file_key(key[0]) != key:
            raise DataError(f"{key[0]} changed since it was checked", hint="open it again when no program writes to it")
        return opener(key[0])

    return cache.get((key[0], ()), open_checked)


def map_named(path: str) -> Array:
    """The bytes of a file that the user named, mapped; it may be a link."""
    return map_file(path, follow_link=True)


def _indices(region: Region) -> list[range]:
    return [range(s.start, s.stop, s.step or 1) for s in region]


def _chunk_corners(array: ArraySurvey, wanted: list[range]) -> Iterator[tuple[int, ...]]:
    """First indices of the chunks that a region touches."""
    grids = [range(r.start // c * c, r[-1] + 1, c) for r, c in zip(wanted, array.chunks or (), strict=True)]
    return itertools.product(*grids)


def _ranges(array: ArraySurvey, region: Region) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """(index in the region, first byte, end) of every run of bytes that a region of a contiguous array consists of.

    The index has an entry for each axis before the last one that is cut, and for that one too where it has a step.
    """
    assert array.offset is not None
    itemsize = np.dtype(array.dtype).itemsize
    wanted = _indices(region)
    cut = max((i for i, (r, n) in enumerate(zip(wanted, array.shape, strict=True)) if len(r) != n), default=-1)
    single = cut >= 0 and wanted[cut].step != 1 and len(wanted[cut]) > 1
    outer = wanted[: cut + 1] if single else wanted[: max(cut, 0)]
    strides = [itemsize * math.prod(array.shape[i + 1 :]) for i in range(len(array.shape))]
    for index in itertools.product(*(range(len(r)) for r in outer)):
        start = array.offset + sum(outer[i][p] * strides[i] for i, p in enumerate(index))
        if single or cut < 0:
            length = strides[cut] if single else itemsize * math.prod(array.shape)
        else:
            start += wanted[cut].start * strides[cut]
            length = len(wanted[cut]) * strides[cut]
        yield index, start, start + length


def _inflate_region(dataset: Any, array: ArraySurvey, region: Region, objects: ObjectBytes | None) -> Array:
    """objects: the bytes of a file in a bucket. The library would let one thread at a time wait for the server."""
    wanted = _indices(region)
    out = np.empty(tuple(map(len, wanted)), array.dtype)
    for corner in _chunk_corners(array, wanted):
        target, source = [], []
        for r, start, length in zip(wanted, corner, array.chunks or (), strict=True):
            first = max(0, -(-(start - r.start) // r.step))
            last = min(len(r), -(-(start + length - r.start) // r.step))
            target.append(slice(first, last))
            source.append(slice(r.start + first * r.step - start, r.start + (last - 1) * r.step - start + 1, r.step))
        if any(t.stop <= t.start for t in target):
            continue
        out[tuple(target)] = _inflate(dataset, array, corner, objects)[tuple(source)]
    return out


def _inflate(dataset: Any, array: ArraySurvey, corner: tuple[int, ...], objects: ObjectBytes | None) -> Array:
    chunks = array.chunks or ()
    dtype = np.dtype(array.dtype)
    expected = int(np.prod(chunks)) * dtype.itemsize
    if objects is None:
        mask, stored = dataset.id.read_direct_chunk(corner)
    else:
        chunk = dataset.id.get_chunk_info_by_coord(corner)
        mask, stored = chunk.filter_mask, objects[chunk.byte_offset : chunk.byte_offset + chunk.size]
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


_survey_type = TypeAdapter(FileSurvey)
_surveys: dict[str, dict[FileKey, FileSurvey | DataError]] = {}
_maps: ProcessCache[Array] = ProcessCache(MAX_OPEN_MAPS)
_objects: ProcessCache[ObjectBytes] = ProcessCache(MAX_OPEN_MAPS)
_files: ProcessCache[Any] = ProcessCache(MAX_OPEN_LIBRARY_FILES)


def hash_sample(digest: Any, path: Path, size: int, num_blocks: int = SAMPLE_BLOCKS) -> None:
    """Add blocks that are spread over a file to a hash."""
    with path.open("rb") as file:
        for i in range(num_blocks):
            file.seek(i * max(0, size - SAMPLE_BLOCK_BYTES) // (num_blocks - 1))
            digest.update(file.read(SAMPLE_BLOCK_BYTES))


def files_identity(format_name: str, keys: Iterable[FileKey]) -> str:
    """Hash of what files are read as, their sizes and samples, in their order."""
    total = hashlib.sha256()
    for path, size, _, _ in keys:
        digest = hashlib.sha256(json.dumps([format_name, size]).encode())
        hash_sample(digest, data_path(path), size)
        total.update(digest.hexdigest().encode())
    return total.hexdigest()


@dataclass(frozen=True, slots=True)
class Hdf5File(TrajectoryFile):
    """A surveyed file. groups, offsets: as in `FileSurvey`, for a file with one group per trajectory."""

    key: FileKey
    groups: tuple[str, ...] = ()
    offsets: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def values(self, source: FileField, row: int, frames: slice) -> Array:
        array = source.array
        assert isinstance(array, ArraySurvey)
        if self.groups:
            array = array_of_group(array, self.groups[row], self.offsets, row)
        return read_region(self.key, array, source.region(row, frames))


def array_of_group(array: ArraySurvey, group: str, offsets: Mapping[str, tuple[int, ...]], row: int) -> ArraySurvey:
    """The dataset of one group of a file with one group per trajectory."""
    offset = offsets[array.name][row] if array.offset is not None else None
    return replace(array, name=array.name.replace("{}", group), offset=offset)


class Hdf5Reader(FilesReader):
    """Windows from surveyed files of one format."""

    format_name: str
    _files: tuple[Hdf5File, ...]

    def where(self, split: str, trajectory: int) -> str:
        number, row, _ = self._locate(split, trajectory)
        file = self._files[number]
        inside = f"group {file.groups[row]}" if file.groups else f"trajectory {row}"
        return f"{file.key[0]} {inside} ({split} trajectory {trajectory})"

    def close(self) -> None:
        for file in self._files:
            drop_hdf5(file.key[0])

    @property
    def remote(self) -> bool:
        return is_address(self._files[0].key[0])

    def _source_identity(self) -> str:
        return files_identity(self.format_name, [file.key for file in self._files])


@dataclass(frozen=True)
class NetcdfInput:
    """A NetCDF file as a rollout starts from it. dataset: an xarray.Dataset in memory; left_out: what else is in it.

    xarray and h5netcdf do not open the file: they follow links and external storage, and allocate every claimed size.
    """

    dataset: Any
    left_out: tuple[str, ...]


def read_netcdf(path: str | Path) -> NetcdfInput:
    """The variables of a file's root group, decoded by the CF conventions. Raises DataError.

    A dimension without a coordinate variable is a dimension without coordinates: nothing is known about its spacing.
    """
    import xarray

    (survey,) = survey_all([path], "netcdf")
    variables = {}
    for name, array in survey.arrays.items():
        whole = tuple(slice(0, n, 1) for n in array.shape)
        values = np.array(read_region(survey.key, array, whole))  # a copy: the map of the file is closed below
        dims = [dim or f"phony_dim_{i}" for i, dim in enumerate(survey.dims[name])]
        attributes = {key: value[0] for key, value in survey.attributes[name].items() if len(value) == 1}
        variables[name] = xarray.Variable(dims, values, attributes)
    drop_hdf5(survey.key[0])
    try:
        # A one-dimensional variable with the name of its dimension becomes that dimension's coordinate.
        dataset = xarray.decode_cf(xarray.Dataset(variables)).load()  # decoding is lazy: here, or outside of this guard
    except Exception as error:  # the decoders raise nearly every type for attributes that make no sense
        raise DataError(
            f"{path} cannot be decoded by the CF conventions: {str(error)[:200]}",
            hint="look at the attributes units, calendar, scale_factor, add_offset and _FillValue of its variables",
        ) from error
    return NetcdfInput(dataset, tuple(survey.left_out))
