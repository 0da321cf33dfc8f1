"""Looks at an untrusted HDF5 file in a separate process before this one opens it.

The HDF5 library is C that follows pointers in the file: damaged metadata can end in a crash, an endless loop or a
huge allocation, none of which Python can catch (docs/decisions/0007-hdf5-is-read-behind-a-guard.md). So the
structure is read by a child with limits on memory and time, and this process learns only the result. Contiguous data
is then mapped at the surveyed offset without the library; only chunked data is opened here, with metadata that the
child walked to the last chunk.

    python -m ups.formats.hdf5_survey [--netcdf | --tree | --well]   names on standard input; one JSON line per file
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from ups.buckets.cached_objects import forget
from ups.buckets.client import is_address
from ups.buckets.path import data_path, plain_name
from ups.errors import DataError, UpsError, error_of_cause
from ups.formats.base import Array
from ups.formats.hdf5_survey import (
    ArraySurvey,
    FileSurvey,
    NetcdfSurvey,
    TreeSurvey,
    WellSurvey,
    open_library,
)
from ups.formats.shards import ObjectBytes, ProcessCache, map_file
from ups.record.files import open_regular
from ups.record.processes import module_command

TIMEOUT_SECONDS = 120.0
# Every block of metadata is a request there.
BUCKET_TIMES = 10
_HINT = "get the file again from its source, and compare its checksum"
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
MATLAB_TEXT = b"MATLAB"

FileKey = tuple[str, int, int, int]
_Survey = TypeVar("_Survey", FileSurvey, WellSurvey)
_surveys: dict[FileKey, FileSurvey | DataError] = {}
_well_surveys: dict[FileKey, WellSurvey | DataError] = {}


def file_key(path: str | Path) -> FileKey:
    """(path, size, time of change, inode): equal as long as nobody touched the file."""
    name = plain_name(path)
    forget(name)  # of an address it is asked again
    status = data_path(name).stat()
    return (name, status.st_size, status.st_mtime_ns, status.st_ino)


def starts_as_hdf5(file: IO[bytes]) -> bool:
    """Whether a file has the signature of HDF5: at its beginning, or after the 512 bytes that MATLAB puts before it."""
    return any(file.seek(place) == place and file.read(8) == HDF5_MAGIC for place in (0, 512))


def survey_files(paths: Sequence[str | Path]) -> list[FileSurvey | DataError]:
    """Structure of each file, or the reason why it is refused; files seen before by this process are not read again."""
    return _survey_all(paths, _surveys, FileSurvey.from_json)


def survey_well_files(paths: Sequence[str | Path]) -> list[WellSurvey | DataError]:
    """The same for files of The Well."""
    return _survey_all(paths, _well_surveys, WellSurvey.from_json, "--well")


def _survey_all(
    paths: Sequence[str | Path],
    known: dict[FileKey, _Survey | DataError],
    parse: Callable[[dict[str, Any]], _Survey],
    *options: str,
) -> list[_Survey | DataError]:
    keys: list[FileKey | DataError] = [_key_or_error(path) for path in paths]
    waiting = list(dict.fromkeys(k for k in keys if not isinstance(k, DataError) and k not in known))
    while waiting:
        answers, problem = _ask_child([key[0] for key in waiting], *options)
        found: list[_Survey | DataError] = [a if isinstance(a, DataError) else parse(a) for a in answers]
        if problem and len(found) < len(waiting):
            found.append(_blamed(waiting[len(found)], problem))
        known.update(zip(waiting, found, strict=False))
        waiting = waiting[len(found) :]
    return [k if isinstance(k, DataError) else known[k] for k in keys]


def survey_netcdf_file(path: str | Path) -> tuple[FileKey, NetcdfSurvey]:
    """Structure of a NetCDF-4 file, and what it belongs to. Raises DataError for a file that is refused."""
    key, answer = _survey_one(path, "--netcdf")
    return key, NetcdfSurvey.from_json(answer)


def survey_tree_file(path: str | Path) -> tuple[FileKey, TreeSurvey]:
    """All arrays of any HDF5 file, and what it belongs to. Raises DataError for a file that cannot be opened."""
    key, answer = _survey_one(path, "--tree")
    return key, TreeSurvey.from_json(answer)


def _survey_one(path: str | Path, option: str) -> tuple[FileKey, dict[str, Any]]:
    key = _key_or_error(path)
    if isinstance(key, DataError):
        raise key
    answers, problem = _ask_child([key[0]], option)
    answer = answers[0] if answers else _blamed(key, problem)
    if isinstance(answer, DataError):
        raise answer
    return key, answer


def _blamed(key: FileKey, problem: str) -> DataError:
    return DataError(f"{key[0]}: the HDF5 library {problem} while reading its structure", hint=_HINT)


def _key_or_error(path: str | Path) -> FileKey | DataError:
    try:
        with open_regular(data_path(path), follow_link=True) as file:
            if file is None:
                return DataError(f"{path} is not a regular file, so it is not read", hint="name an HDF5 file")
            start = file.read(8)
            is_hdf5 = starts_as_hdf5(file)
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


def _ask_child(paths: list[str], *options: str) -> tuple[list[dict[str, Any] | DataError], str]:
    """Answers of one child in order, and how it ended if it did not reach the last file ('' if it did)."""
    command = module_command("ups.formats.hdf5_survey", *options)
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
    answers: list[dict[str, Any] | DataError] = []
    for line in lines[: len(paths)]:
        data = json.loads(line)
        if "error" in data and data["cause"] != DataError.cause:
            raise error_of_cause(data["cause"], data["error"], data["hint"])
        answers.append(DataError(data["error"], hint=data["hint"] or _HINT) if "error" in data else data)
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


Region = tuple[slice, ...]
MAX_OPEN_MAPS = 64
MAX_OPEN_LIBRARY_FILES = 32


def read_region(key: FileKey, array: ArraySurvey, region: Region) -> Array:
    """Values of a region (slices with plain bounds inside the shape); a read-only view where the data is mapped."""
    if array.column_major:
        return read_region(key, replace(array, shape=array.shape[::-1], column_major=False), region[::-1]).T
    if array.offset is not None and is_address(key[0]):
        found = _objects.get((key[0], ()), lambda: _object_unchanged(key))
        return _read_ranges(found, array, region)
    if array.offset is not None:
        count = int(np.prod(array.shape))
        dtype = np.dtype(array.dtype)
        mapped = _maps.get((key[0], ()), lambda: map_unchanged(key))
        data = mapped[array.offset : array.offset + count * dtype.itemsize]
        return np.asarray(data.view(dtype).reshape(array.shape)[region])
    try:
        dataset = _files.get((key[0], ()), lambda: _open_unchanged(key))[array.name]
        if "deflate" in array.filters:
            return _inflate_region(dataset, array, region)
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


def map_unchanged(key: FileKey) -> Array:
    check_unchanged(key)
    return map_file(key[0], follow_link=True)


def _open_unchanged(key: FileKey) -> Any:
    check_unchanged(key)
    return open_library(key[0])


def _object_unchanged(key: FileKey) -> ObjectBytes:
    check_unchanged(key)
    return ObjectBytes(key[0])


def check_unchanged(key: FileKey) -> None:
    if not data_path(key[0]).exists() or file_key(key[0]) != key:
        raise DataError(f"{key[0]} changed since it was checked", hint="open it again when nobody writes to it")


def bring_region(key: FileKey, array: ArraySurvey, region: Region) -> list[str]:
    """Bring the bytes of a region into the cache of this host, if the file is in a bucket; returns its blocks there."""
    if not is_address(key[0]):
        return []
    found = _objects.get((key[0], ()), lambda: _object_unchanged(key))
    if array.offset is not None:
        return [block for _, start, stop in _ranges(array, region) for block in found.bring(start, stop)]
    dataset = _files.get((key[0], ()), lambda: _open_unchanged(key))[array.name]
    wanted = [range(s.start, s.stop, s.step or 1) for s in region]
    grid = [range(r.start // c, r[-1] // c + 1) for r, c in zip(wanted, array.chunks or (), strict=True)]
    blocks: list[str] = []
    for place in itertools.product(*grid):
        chunk = dataset.id.get_chunk_info_by_coord(tuple(p * c for p, c in zip(place, array.chunks or (), strict=True)))
        if chunk.byte_offset is not None:
            blocks += found.bring(chunk.byte_offset, chunk.byte_offset + chunk.size)
    return blocks


def _ranges(array: ArraySurvey, region: Region) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """(place in the region, first byte, end) of every run of bytes that a region of a contiguous array consists of.

    The place has an index for each axis before the last one that is cut, and for that one too where it has a step.
    """
    assert array.offset is not None
    itemsize = np.dtype(array.dtype).itemsize
    wanted = [range(s.start, s.stop, s.step or 1) for s in region]
    cut = max((i for i, (r, n) in enumerate(zip(wanted, array.shape, strict=True)) if len(r) != n), default=-1)
    single = cut >= 0 and wanted[cut].step != 1 and len(wanted[cut]) > 1
    outer = wanted[: cut + 1] if single else wanted[: max(cut, 0)]
    strides = [itemsize * math.prod(array.shape[i + 1 :]) for i in range(len(array.shape))]
    for place in itertools.product(*(range(len(r)) for r in outer)):
        start = array.offset + sum(outer[i][p] * strides[i] for i, p in enumerate(place))
        if single or cut < 0:
            length = strides[cut] if single else itemsize * math.prod(array.shape)
        else:
            start += wanted[cut].start * strides[cut]
            length = len(wanted[cut]) * strides[cut]
        yield place, start, start + length


def _read_ranges(found: ObjectBytes, array: ArraySurvey, region: Region) -> Array:
    out = np.empty(tuple(len(range(s.start, s.stop, s.step or 1)) for s in region), array.dtype)
    for place, start, stop in _ranges(array, region):
        out[place] = found[start:stop].view(array.dtype).reshape(out[place].shape)
    return out


def _inflate_region(dataset: Any, array: ArraySurvey, region: Region) -> Array:
    chunks = array.chunks or ()
    wanted = [range(s.start, s.stop, s.step or 1) for s in region]
    out = np.empty(tuple(len(r) for r in wanted), array.dtype)
    grid = [range(r.start // c, r[-1] // c + 1) for r, c in zip(wanted, chunks, strict=True)]
    for place in itertools.product(*grid):
        corner = tuple(p * c for p, c in zip(place, chunks, strict=True))
        target, source = [], []
        for r, start, length in zip(wanted, corner, chunks, strict=True):
            first = max(0, -(-(start - r.start) // r.step))
            last = min(len(r), -(-(start + length - r.start) // r.step))
            target.append(slice(first, last))
            source.append(slice(r.start + first * r.step - start, r.start + (last - 1) * r.step - start + 1, r.step))
        if any(t.stop <= t.start for t in target):
            continue
        out[tuple(target)] = _inflate(dataset, array, corner)[tuple(source)]
    return out


def _inflate(dataset: Any, array: ArraySurvey, corner: tuple[int, ...]) -> Array:
    chunks = array.chunks or ()
    dtype = np.dtype(array.dtype)
    expected = int(np.prod(chunks)) * dtype.itemsize
    mask, stored = dataset.id.read_direct_chunk(corner)
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


_maps: ProcessCache[Array] = ProcessCache(MAX_OPEN_MAPS)
_objects: ProcessCache[ObjectBytes] = ProcessCache(MAX_OPEN_MAPS)
_files: ProcessCache[Any] = ProcessCache(MAX_OPEN_LIBRARY_FILES)


BLOCKS = 64
BLOCK_BYTES = 4096


def file_identity(format_name: str, key: FileKey) -> str:
    """Hash of what the file is read as, its size and its sample."""
    size = key[1]
    digest = hashlib.sha256(json.dumps([format_name, size]).encode())
    with data_path(key[0]).open("rb") as file:
        for i in range(BLOCKS):
            file.seek(i * max(0, size - BLOCK_BYTES) // (BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def files_identity(format_name: str, keys: Iterable[FileKey]) -> str:
    """Hash of those of several files, in their order."""
    digest = hashlib.sha256()
    for key in keys:
        digest.update(file_identity(format_name, key).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class NetcdfInput:
    """dataset: an xarray.Dataset in memory; left_out: what else the file has, in words."""

    dataset: Any
    left_out: tuple[str, ...]


def read_netcdf(path: str | Path) -> NetcdfInput:
    """The variables of a file's root group, decoded by the CF conventions. Raises DataError.

    A dimension without a coordinate variable is a dimension without coordinates: nothing is known about its spacing.
    """
    import xarray

    key, survey = survey_netcdf_file(path)
    drop_hdf5(key[0])
    variables = {}
    for name, array in survey.variables.items():
        whole = tuple(slice(0, n, 1) for n in array.shape)
        values = np.array(read_region(key, array, whole))  # a copy: the map of the file is let go below
        variables[name] = xarray.Variable(survey.dims[name], values, survey.attributes[name])
    drop_hdf5(key[0])
    try:
        # A one-dimensional variable with the name of its dimension becomes that dimension's coordinate.
        dataset = xarray.decode_cf(xarray.Dataset(variables)).load()  # decoding is lazy: here, or outside of this guard
    except Exception as error:  # the decoders raise nearly every type for attributes that make no sense
        raise DataError(
            f"{path} cannot be decoded by the CF conventions: {str(error)[:200]}",
            hint="look at the attributes units, calendar, scale_factor, add_offset and _FillValue of its variables",
        ) from error
    return NetcdfInput(dataset, survey.left_out)
