"""What stands in an HDF5 file: a bounded, strict walk over its structure. Runs only in the child process of `hdf5`.

Refuses whatever a data file never needs and a hostile one may use: links that leave the group (soft, external), data
stored elsewhere (external storage, virtual datasets), types other than plain floats, shapes that the file cannot
hold, chunks or attributes beyond a size, unknown filters. Reads no field values.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import re
import sys
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ups.buckets.path import BucketPath, data_path
from ups.errors import DataError, UpsError


def open_library(path: str) -> Any:
    """An `h5py.File` for reading."""
    import h5py

    found = data_path(path)
    if isinstance(found, BucketPath):
        file = h5py.File(found.open_object(), "r")
        if not _open_files:
            atexit.register(_close_all)
        _open_files.add(file)
        return file
    return h5py.File(path, "r", locking=False)


def size_of(path: str) -> int:
    """Bytes of the file."""
    found = data_path(path)
    return found.stat().st_size if isinstance(found, BucketPath) else os.path.getsize(path)


def _close_all() -> None:
    """The library crashes in a file object that it still has open when Python has ended."""
    for file in list(_open_files):
        with contextlib.suppress(Exception):
            file.close()


_open_files: weakref.WeakSet[Any] = weakref.WeakSet()


MEMORY_LIMIT_BYTES = 1 << 30
MAX_ROOT_ENTRIES = 200_000
MAX_GROUP_ENTRIES = 64
MAX_ATTRIBUTES = 64
MAX_TEXT_BYTES = 1 << 16
MAX_ATTRIBUTE_VALUES = 64
MAX_DIMS = 7  # trajectory, time, three of space, and two of a tensor
MAX_CHUNKS = 1 << 23
MAX_CHUNK_BYTES = 256 << 20
MAX_COMPACT_BYTES = 1 << 16
ELSEWHERE_HINT = "a data file must hold its data itself: copy the data into it if you trust where it points"
_FILTERS = {1: "deflate", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}
_PIPELINES = {
    (),
    ("deflate",),
    ("shuffle",),
    ("shuffle", "deflate"),
    ("lzf",),
    ("shuffle", "lzf"),
    ("fletcher32",),
}


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

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ArraySurvey:
        """The inverse of `asdict` after a round through JSON."""
        chunks = None if data["chunks"] is None else tuple(data["chunks"])
        shape, filters = tuple(data["shape"]), tuple(data["filters"])
        return cls(data["name"], shape, data["dtype"], data["offset"], chunks, filters, data["column_major"])


@dataclass(frozen=True, slots=True)
class FileSurvey:
    """Structure of one file.

    datasets: those in the root. groups: names of the trajectory groups, sorted, for files with one group each;
    `members` are the datasets of such a group with '{}' for its name, `offsets` where each one's contiguous bytes are,
    group by group. attributes: numbers and texts of the root and, for files of groups, those of the first group;
    unread: names of those that are neither; varying: names of those, and keys of the text `config`, that are not the
    same in every group.
    """

    size: int
    datasets: dict[str, ArraySurvey]
    groups: tuple[str, ...] = ()
    members: dict[str, ArraySurvey] = field(default_factory=dict)
    offsets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    varying: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FileSurvey:
        """The inverse of `to_json`."""

        return cls(
            size=data["size"],
            datasets={k: ArraySurvey.from_json(v) for k, v in data["datasets"].items()},
            groups=tuple(data["groups"]),
            members={k: ArraySurvey.from_json(v) for k, v in data["members"].items()},
            offsets={k: tuple(v) for k, v in data["offsets"].items()},
            attributes=data["attributes"],
            unread=tuple(data["unread"]),
            varying=tuple(data["varying"]),
        )


def survey_file(path: str) -> FileSurvey:
    """The structure of a file. Raises DataError for what is refused, OSError for what HDF5 cannot open."""
    import h5py

    size = size_of(path)
    with open_library(path) as file:
        if "_NCProperties" in file.attrs:
            raise DataError(
                "a NetCDF file, not a PDEBench file",
                hint="`ups init DIR --data FILE` describes it to train on it; `ups rollout` starts from NetCDF files",
            )
        names = entries_of(file, MAX_ROOT_ENTRIES)
        groups: list[str] = []
        datasets: dict[str, ArraySurvey] = {}
        for name in names:
            check_link(file, name)
            kind = file.get(name, getclass=True)
            if kind is h5py.Group:
                groups.append(name)
            else:
                check_kind(kind, name)
                if len(datasets) == MAX_GROUP_ENTRIES:
                    raise DataError(f"more than {MAX_GROUP_ENTRIES} datasets in the root")
                datasets[name] = survey_dataset(file[name], name, size)
        attributes, unread = attributes_of(file)
        if not groups:
            return FileSurvey(size, datasets, attributes=attributes, unread=unread)
        groups.sort()
        members, offsets = _survey_groups(file, groups, size)
        first, first_unread = attributes_of(file[groups[0]])
        return FileSurvey(
            size,
            datasets,
            tuple(groups),
            members,
            offsets,
            attributes={**first, **attributes},
            unread=tuple(dict.fromkeys((*unread, *first_unread))),
            varying=_varying(file, groups, first),
        )


def _survey_groups(
    file: Any, groups: list[str], size: int
) -> tuple[dict[str, ArraySurvey], dict[str, tuple[int, ...]]]:
    members: dict[str, ArraySurvey] = {}
    offsets: dict[str, list[int]] = {}
    for number, name in enumerate(groups):
        if "{" in name or "}" in name or "/" in name or len(name) > 64:
            raise DataError(f"group name {name[:80]!r} is not a plain name")
        found = _survey_tree(file[name], "{}", size)
        if number == 0:
            members = found
            offsets = {k: [] for k, a in found.items() if a.offset is not None}
        if {k: _form(a) for k, a in found.items()} != {k: _form(a) for k, a in members.items()}:
            raise DataError(f"group '{name}' differs from group '{groups[0]}' in its datasets, shapes or types")
        for key, values in offsets.items():
            offset = found[key].offset
            if offset is None:
                raise DataError(f"group '{name}' stores '{key}' differently from group '{groups[0]}'")
            values.append(offset)
    return members, {k: tuple(v) for k, v in offsets.items()}


def _varying(file: Any, groups: list[str], first: dict[str, Any]) -> tuple[str, ...]:
    """Attributes, and keys of the text `config`, in which a later group differs from the first: at most 64 names."""
    found: set[str] = set()
    lines = set(str(first.get("config", "")).splitlines())
    for name in groups[1:]:
        here, _ = attributes_of(file[name])
        found |= {k for k in first.keys() | here.keys() if k != "config" and first.get(k) != here.get(k)}
        if here.get("config") != first.get("config"):
            # By lines, not by parsing: a file may have ten thousand of these texts.
            changed = lines ^ set(str(here.get("config", "")).splitlines())
            found |= {m.group(1) for line in changed if (m := re.match(r"\s*([\w.-]{1,64})\s*:", line))}
    return tuple(sorted(found)[:MAX_ATTRIBUTES])


def _survey_tree(group: Any, prefix: str, size: int, depth: int = 0) -> dict[str, ArraySurvey]:
    import h5py

    found: dict[str, ArraySurvey] = {}
    for name in entries_of(group, MAX_GROUP_ENTRIES):
        check_link(group, name)
        kind = group.get(name, getclass=True)
        key = f"{prefix}/{name}"
        if kind is h5py.Group:
            if depth == 2:
                raise DataError(f"groups are nested too deeply at '{key}'")
            found.update(_survey_tree(group[name], key, size, depth + 1))
        else:
            check_kind(kind, key)
            found[key] = survey_dataset(group[name], key, size)
    return found


def _form(array: ArraySurvey) -> tuple[Any, ...]:
    return (array.shape, array.dtype, array.chunks, array.filters)


def entries_of(group: Any, limit: int) -> list[str]:
    if group.id.get_num_objs() > limit:
        raise DataError(f"'{group.name}' has more than {limit} entries")
    names: list[str] = []
    for name in group:
        names.append(name)
        if len(names) > limit:
            raise DataError(f"'{group.name}' has more than {limit} entries")
    return names


def check_link(group: Any, name: str) -> None:
    import h5py

    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise DataError(f"'{name[:80]}' is a soft or external link, which is not followed", hint=ELSEWHERE_HINT)


def check_kind(kind: Any, name: str) -> None:
    import h5py

    if kind is not h5py.Dataset:
        raise DataError(f"'{name[:80]}' is neither a group nor a dataset")


def survey_dataset(
    dataset: Any, name: str, size: int, *, integers: bool = False, scalars: bool = False, flags: bool = False
) -> ArraySurvey:
    """One dataset, checked. integers: these are read, too. scalars: so is a single number, of shape (). flags: so are
    true and false, which HDF5 has as an enumeration of one byte."""
    import h5py

    kind = dataset.id.get_type()
    if flags and isinstance(kind, h5py.h5t.TypeEnumID) and kind.get_size() == 1:
        kind = kind.get_super()
    whole = (integers or flags) and isinstance(kind, h5py.h5t.TypeIntegerID)
    if not whole and (not isinstance(kind, h5py.h5t.TypeFloatID) or kind.get_size() not in (4, 8)):
        raise DataError(f"dataset '{name}' does not hold float32 or float64 numbers")
    dtype = kind.dtype
    if dtype.kind not in ("iu" if whole else "f") or dtype.itemsize != kind.get_size():
        raise DataError(f"dataset '{name}' has an unusual number type")
    extent = dataset.id.get_space().get_simple_extent_type()
    if extent != h5py.h5s.SIMPLE and not (scalars and extent == h5py.h5s.SCALAR):
        raise DataError(f"dataset '{name}' is not an array")
    shape = tuple(int(n) for n in dataset.shape)
    if not (scalars and not shape) and (not 1 <= len(shape) <= MAX_DIMS or min(shape) < 1 or max(shape) > 1 << 40):
        raise DataError(f"dataset '{name}' has the absurd shape {shape}")
    num_bytes = math.prod(shape) * int(dtype.itemsize)
    if num_bytes > 1 << 52:
        raise DataError(f"dataset '{name}' claims {num_bytes} bytes")
    plist = dataset.id.get_create_plist()
    if plist.get_external_count():
        raise DataError(f"dataset '{name}' keeps its data in other files", hint=ELSEWHERE_HINT)
    layout = plist.get_layout()
    if layout == h5py.h5d.CHUNKED:
        chunks, filters = _survey_chunks(dataset, plist, name, size, shape, int(dtype.itemsize))
        return ArraySurvey(name, shape, dtype.str, None, chunks, filters)
    if layout == h5py.h5d.CONTIGUOUS:
        offset = dataset.id.get_offset()
        if offset is None or offset < 0 or offset + num_bytes > size or plist.get_nfilters():
            raise DataError(f"dataset '{name}' claims {num_bytes} bytes, which the file of {size} bytes does not hold")
        return ArraySurvey(name, shape, dtype.str, int(offset), None, ())
    if layout == h5py.h5d.COMPACT and num_bytes <= MAX_COMPACT_BYTES:
        return ArraySurvey(name, shape, dtype.str, None, None, ())
    raise DataError(f"dataset '{name}' is virtual or of an unknown layout")


def _survey_chunks(
    dataset: Any, plist: Any, name: str, size: int, shape: tuple[int, ...], itemsize: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    chunks = tuple(int(n) for n in plist.get_chunk())
    if len(chunks) != len(shape) or min(chunks) < 1 or math.prod(chunks) * itemsize > MAX_CHUNK_BYTES:
        raise DataError(f"dataset '{name}' has chunks of absurd shape {chunks}")
    codes = [int(plist.get_filter(i)[0]) for i in range(min(plist.get_nfilters(), 8))]
    filters = tuple(_FILTERS.get(code, "?") for code in codes)
    if filters not in _PIPELINES:
        raise DataError(f"dataset '{name}' needs the filters {codes} in this order, which are not read")
    expected = math.prod(-(-n // c) for n, c in zip(shape, chunks, strict=True))
    if expected > MAX_CHUNKS:
        raise DataError(f"dataset '{name}' has {expected} chunks, more than {MAX_CHUNKS}")
    nominal = math.prod(chunks) * itemsize
    seen: set[tuple[int, ...]] = set()

    def check(info: Any) -> None:
        start = tuple(int(n) for n in info.chunk_offset)
        inside = len(start) == len(shape) and all(
            s % c == 0 and s < n for s, c, n in zip(start, chunks, shape, strict=True)
        )
        fits = info.byte_offset is not None and info.size > 0 and info.byte_offset + info.size <= size
        # Bit i of the mask: filter i was left out, as compressors are where they would not make a chunk smaller.
        packed = [name for i, name in enumerate(filters) if name != "shuffle" and not info.filter_mask >> i & 1]
        right = 0 <= info.filter_mask < 1 << len(filters)
        right = right and (info.size == nominal if not packed else info.size <= 2 * nominal + 4096)
        if not (inside and fits and right) or start in seen or len(seen) >= expected:
            raise DataError(f"chunk at {start} of dataset '{name}' is not where or what it should be")
        seen.add(start)

    dataset.id.chunk_iter(check)
    if len(seen) != expected:
        raise DataError(f"dataset '{name}' has {len(seen)} of its {expected} chunks: it was not written completely")
    return chunks, filters


def attributes_of(owner: Any, skip: frozenset[str] = frozenset()) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Numbers and short texts, and the names of what is neither; anything large is refused. skip: not looked at."""
    import h5py

    if h5py.h5a.get_num_attrs(owner.id) > MAX_ATTRIBUTES:
        raise DataError(f"'{owner.name}' has more than {MAX_ATTRIBUTES} attributes")
    found: dict[str, Any] = {}
    unread: list[str] = []
    for name in list(owner.attrs):
        if name in skip:
            continue
        handle = owner.attrs.get_id(name)
        if handle.get_storage_size() > MAX_TEXT_BYTES or math.prod(handle.shape or ()) > MAX_ATTRIBUTE_VALUES:
            raise DataError(f"attribute '{name[:80]}' of '{owner.name}' is absurdly large")
        value = _attribute_value(owner, name, handle)
        if value is None:
            unread.append(name)
        else:
            found[name] = value
    return found, tuple(unread)


def _attribute_value(owner: Any, name: str, handle: Any) -> float | str | None:
    """One finite number or one text; None for anything else."""
    import h5py

    kind = handle.get_type()
    if isinstance(kind, h5py.h5t.TypeFloatID | h5py.h5t.TypeIntegerID):
        values = [float(v) for v in owner.attrs[name].reshape(-1)] if handle.shape else [float(owner.attrs[name])]
        return values[0] if len(values) == 1 and math.isfinite(values[0]) else None
    if not isinstance(kind, h5py.h5t.TypeStringID) or handle.shape:
        return None
    text = owner.attrs[name]
    text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
    if len(text) > MAX_TEXT_BYTES:
        raise DataError(f"attribute '{name[:80]}' of '{owner.name}' is absurdly long")
    return text


def short_text(dataset: Any, name: str) -> str:
    """A short text attribute; '' if there is none."""
    import h5py

    if name not in dataset.attrs:
        return ""
    handle = dataset.attrs.get_id(name)
    if not isinstance(handle.get_type(), h5py.h5t.TypeStringID) or handle.shape or handle.get_storage_size() > 1024:
        return ""
    value = dataset.attrs[name]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


MAX_ARRAYS = 50_000
MAX_DEPTH = 5
MAX_TREE_LEFT_OUT = 200
MAX_TREE_ATTRIBUTES = 256
_ONLY_A_DIMENSION = "This is a netCDF dimension but not a netCDF variable"
_TREE_BOOKKEEPING = frozenset(
    {"CLASS", "NAME", "DIMENSION_LIST", "DIMENSION_LABELS", "REFERENCE_LIST", "_Netcdf4Dimid", "_Netcdf4Coordinates"}
) | {"_NCProperties", "_nc3_strict", "H5PATH"}


@dataclass
class TreeSurvey:
    """Arrays by their path without a leading '/'; attributes of arrays and groups by path, '' for the file."""

    arrays: dict[str, ArraySurvey] = field(default_factory=dict)
    dims: dict[str, tuple[str, ...]] = field(default_factory=dict)
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TreeSurvey:
        """The inverse of `to_json`."""
        return cls(
            {name: ArraySurvey.from_json(value) for name, value in data["arrays"].items()},
            {name: tuple(value) for name, value in data["dims"].items()},
            data["attributes"],
            data["left_out"],
        )


def survey_tree(path: str) -> TreeSurvey:
    """The arrays of a file. Raises OSError for what HDF5 cannot open, DataError for absurd sizes."""

    found = TreeSurvey()
    with open_library(path) as file:
        _walk_tree(file, file, "", size_of(path), found, {_address(file)})
    return found


def _walk_tree(file: Any, group: Any, prefix: str, size: int, found: TreeSurvey, above: set[int]) -> None:
    import h5py

    found.attributes[prefix.removesuffix("/")] = _tree_attributes(group, prefix.removesuffix("/"), found)
    if group.id.get_num_objs() > MAX_ARRAYS:
        raise DataError(f"'{group.name}' has more than {MAX_ARRAYS} entries")
    for name in group:
        path = f"{prefix}{name}"
        if path.startswith("#"):
            continue  # where MATLAB keeps the content of its cells, which are named as left out
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            _leave_out_of_tree(found, f"'{path}', a link to somewhere else")
            continue
        kind = group.get(name, getclass=True)
        if kind is h5py.Group and (address := _address(group[name])) in above:
            _leave_out_of_tree(found, f"'{path}', a group that it lies in itself")
        elif kind is h5py.Group and len(above) <= MAX_DEPTH:
            _walk_tree(file, group[name], f"{path}/", size, found, above | {address})
        elif kind is not h5py.Dataset:
            _leave_out_of_tree(found, f"'{path}', which is no array or nested too deep")
        elif len(found.arrays) >= MAX_ARRAYS:
            raise DataError(f"it has more than {MAX_ARRAYS} arrays")
        else:
            _take_array(file, group[name], path, size, found)


def _address(group: Any) -> int:
    """What tells a group from others of the file: it may be linked from several places, even from inside."""
    import h5py

    return int(h5py.h5o.get_info(group.id).addr)


def _take_array(file: Any, dataset: Any, path: str, size: int, found: TreeSurvey) -> None:
    import h5py

    if short_text(dataset, "NAME").startswith(_ONLY_A_DIMENSION):
        return
    kind, of_matlab = dataset.id.get_type(), short_text(dataset, "MATLAB_class")
    if isinstance(kind, h5py.h5t.TypeReferenceID):
        _leave_out_of_tree(
            found, f"'{path}', a cell or an array of structs of MATLAB: make one array of it, as cat(3, c{{:}})"
        )
        return
    if not isinstance(kind, h5py.h5t.TypeFloatID | h5py.h5t.TypeIntegerID) or of_matlab == "char":
        _leave_out_of_tree(found, f"'{path}', which does not hold numbers")
        return
    if "MATLAB_empty" in dataset.attrs:
        _leave_out_of_tree(found, f"'{path}', which is empty")
        return
    try:
        array = survey_dataset(dataset, path, size, integers=True, scalars=True)
    except DataError as error:
        _leave_out_of_tree(found, f"'{path}': {error.message}")
        return
    dims = _dims(file, dataset, path)
    if of_matlab:  # as MATLAB shows it: it writes the first dimension last
        array, dims = replace(array, shape=array.shape[::-1], column_major=True), dims[::-1]
    found.arrays[path], found.dims[path] = array, dims
    found.attributes[path] = _tree_attributes(dataset, path, found)


def _leave_out_of_tree(found: TreeSurvey, text: str) -> None:
    if len(found.left_out) < MAX_TREE_LEFT_OUT:
        found.left_out.append(text[:300])


def _dims(file: Any, dataset: Any, path: str) -> tuple[str, ...]:
    """Names of the dimensions: of the scales they refer to, else their labels, else ''."""
    import h5py

    rank = len(dataset.shape)
    names = [""] * rank
    if rank == 1 and short_text(dataset, "CLASS") == "DIMENSION_SCALE":
        return (path.split("/")[-1],)
    if "DIMENSION_LIST" in dataset.attrs:
        handle = dataset.attrs.get_id("DIMENSION_LIST")
        if handle.shape == (rank,) and isinstance(handle.get_type(), h5py.h5t.TypeVlenID):
            for i, references in enumerate(dataset.attrs["DIMENSION_LIST"]):
                target = file[references[0]] if len(references) else None
                if isinstance(target, h5py.Dataset) and target.shape == (dataset.shape[i],):
                    names[i] = target.name.split("/")[-1]
    for i in range(rank):
        if not names[i]:
            names[i] = str(dataset.dims[i].label)[:80]
    return tuple(name if names.count(name) == 1 else "" for name in names)


def _tree_attributes(owner: Any, path: str, found: TreeSurvey) -> dict[str, Any]:
    """Finite numbers and short texts; other attributes are left out, and named."""
    import h5py

    values: dict[str, Any] = {}
    where = f" of '{path}'" if path else ""
    if h5py.h5a.get_num_attrs(owner.id) > MAX_TREE_ATTRIBUTES:
        _leave_out_of_tree(found, f"the attributes{where}, which are more than {MAX_TREE_ATTRIBUTES}")
        return values
    for name in list(owner.attrs):
        if name in _TREE_BOOKKEEPING or name.startswith("MATLAB_"):
            continue
        handle = owner.attrs.get_id(name)
        count = math.prod(handle.shape or ())
        if handle.get_storage_size() > MAX_TEXT_BYTES or count > MAX_ATTRIBUTE_VALUES:
            _leave_out_of_tree(found, f"attribute '{name[:80]}'{where}, which is large")
            continue
        kind = handle.get_type()
        if isinstance(kind, h5py.h5t.TypeFloatID | h5py.h5t.TypeIntegerID):
            numbers = [float(v) for v in owner.attrs[name].reshape(-1)] if handle.shape else [float(owner.attrs[name])]
            # A scale that is not finite is kept: whoever decodes the array refuses it.
            if len(numbers) == 1 and (math.isfinite(numbers[0]) or name in ("scale_factor", "add_offset")):
                values[name] = numbers[0]
            elif len(numbers) > 1:
                # Named one by one, so that a description can point at each.
                values |= {f"{name}[{i}]": v for i, v in enumerate(numbers) if math.isfinite(v)}
            elif name not in ("_FillValue", "missing_value"):
                _leave_out_of_tree(found, f"attribute '{name[:80]}'{where}, which is not finite")
        elif isinstance(kind, h5py.h5t.TypeStringID) and not handle.shape:
            text = owner.attrs[name]
            text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
            values[name] = text[:1000]
        else:
            _leave_out_of_tree(found, f"attribute '{name[:80]}'{where}, which is neither a number nor a text")
    return values


# A rollout starts from a few frames; the whole input is held in memory.
MAX_INPUT_BYTES = 4 << 30
_BOOKKEEPING = frozenset(
    {"CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST", "_Netcdf4Dimid", "_Netcdf4Coordinates", "_NCProperties"}
)


@dataclass(frozen=True, slots=True)
class NetcdfSurvey:
    """Variables of the root with their dimensions and their attributes; `left_out` names what is not read."""

    variables: dict[str, ArraySurvey]
    dims: dict[str, tuple[str, ...]]
    attributes: dict[str, dict[str, Any]]
    left_out: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> NetcdfSurvey:
        """The inverse of `to_json`."""
        return cls(
            variables={name: ArraySurvey.from_json(v) for name, v in data["variables"].items()},
            dims={name: tuple(v) for name, v in data["dims"].items()},
            attributes=data["attributes"],
            left_out=tuple(data["left_out"]),
        )


def survey_netcdf(path: str) -> NetcdfSurvey:
    """The variables of a file. Raises DataError for what is refused, OSError for what HDF5 cannot open."""
    import h5py

    size = size_of(path)
    variables: dict[str, ArraySurvey] = {}
    dims: dict[str, tuple[str, ...]] = {}
    attributes: dict[str, dict[str, Any]] = {}
    left_out: list[str] = []
    with open_library(path) as file:
        names = entries_of(file, MAX_GROUP_ENTRIES)
        for name in names:
            check_link(file, name)
        for name in names:
            kind = file.get(name, getclass=True)
            if kind is h5py.Group:
                left_out.append(f"group '{name[:80]}'")
                continue
            check_kind(kind, name)
            dataset = file[name]
            if short_text(dataset, "NAME").startswith(_ONLY_A_DIMENSION):
                continue
            number = dataset.id.get_type()
            if not isinstance(number, h5py.h5t.TypeFloatID | h5py.h5t.TypeIntegerID):
                _refuse_storage_elsewhere(dataset, name)
                left_out.append(f"variable '{name[:80]}', which does not hold numbers")
                continue
            variables[name] = survey_dataset(dataset, name, size, integers=True, scalars=True)
            dims[name] = _dims_of(file, dataset, name, names)
            attributes[name] = attributes_of(dataset, _BOOKKEEPING)[0]
    num_bytes = sum(math.prod(a.shape) * 8 for a in variables.values())  # as float64, which a simulator works with
    if num_bytes > MAX_INPUT_BYTES:
        raise DataError(
            f"its variables would take {num_bytes / 2**30:.1f} GiB of memory, more than {MAX_INPUT_BYTES >> 30} GiB",
            hint="keep only the fields and the last frames that a rollout starts from",
        )
    return NetcdfSurvey(variables, dims, attributes, tuple(left_out))


def _refuse_storage_elsewhere(dataset: Any, name: str) -> None:
    import h5py

    plist = dataset.id.get_create_plist()
    if plist.get_external_count() or plist.get_layout() not in (
        h5py.h5d.CHUNKED,
        h5py.h5d.CONTIGUOUS,
        h5py.h5d.COMPACT,
    ):
        raise DataError(f"dataset '{name[:80]}' keeps its data in other files", hint=ELSEWHERE_HINT)


def _dims_of(file: Any, dataset: Any, name: str, names: list[str]) -> tuple[str, ...]:
    """Names of a variable's dimensions: those it refers to, its own name for a coordinate, else 'phony_dim_0', ..."""
    import h5py

    rank = len(dataset.shape)
    if rank > MAX_DIMS:
        raise DataError(f"variable '{name}' has {rank} dimensions")
    found: list[str] = []
    if "DIMENSION_LIST" in dataset.attrs:
        handle = dataset.attrs.get_id("DIMENSION_LIST")
        if handle.shape != (rank,) or not isinstance(handle.get_type(), h5py.h5t.TypeVlenID):
            raise DataError(f"the dimensions of variable '{name}' are not a list of {rank} references")
        for i, references in enumerate(dataset.attrs["DIMENSION_LIST"]):
            target = file[references[0]].name.removeprefix("/") if len(references) else ""
            if target not in names or file[target].shape != (dataset.shape[i],):
                raise DataError(f"dimension {i} of variable '{name}' does not refer to a dimension of its length")
            found.append(target)
    elif rank == 1 and short_text(dataset, "CLASS") == "DIMENSION_SCALE":
        found = [name]
    else:
        found = [f"phony_dim_{i}" for i in range(rank)]
    if len(set(found)) != rank:
        raise DataError(f"variable '{name}' has one of its dimensions twice")
    return tuple(found)


FIELD_GROUPS = ("t0_fields", "t1_fields", "t2_fields")
BOUNDARIES = "boundary_conditions"
GROUPS = ("dimensions", "scalars", BOUNDARIES, *FIELD_GROUPS)
MAX_LEFT_OUT = 50

Values = list[float] | list[str]


@dataclass
class WellSurvey:
    """Arrays by path (`t0_fields/density`); attributes by path ('' for the file) and name, always as a list.

    True and false are 1 and 0. left_out: what is there and not listed, a few words each.
    """

    size: int = 0
    arrays: dict[str, ArraySurvey] = field(default_factory=dict)
    attributes: dict[str, dict[str, Values]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> WellSurvey:
        """The inverse of `to_json`."""
        arrays = {name: ArraySurvey.from_json(value) for name, value in data["arrays"].items()}
        return cls(data["size"], arrays, data["attributes"], data["left_out"])


def survey_well(path: str) -> WellSurvey:
    """The structure of a file. Raises DataError for what is refused, OSError for what HDF5 cannot open."""
    import h5py

    found = WellSurvey(size_of(path))
    with open_library(path) as file:
        names = entries_of(file, MAX_GROUP_ENTRIES)
        if not {"dimensions"} < set(names) & set(GROUPS):
            raise DataError(
                f"not a file of The Well: in its root are {', '.join(names)[:200] or 'no groups'}",
                hint="a file of The Well has the groups dimensions and t0_fields, t1_fields or t2_fields",
            )
        found.attributes[""] = _well_attributes(file, "", found)
        for name in names:
            if name not in GROUPS:
                _leave_out_of_well(found, f"'{name}'")
                continue
            check_link(file, name)
            if file.get(name, getclass=True) is not h5py.Group:
                raise DataError(f"'{name}' is not a group")
            _survey_well_group(file[name], name, found)
    return found


def _survey_well_group(group: Any, path: str, found: WellSurvey) -> None:
    import h5py

    found.attributes[path] = _well_attributes(group, path, found)
    for name in entries_of(group, MAX_GROUP_ENTRIES):
        key = f"{path}/{name}"
        if "/" in name or len(name) > 80:
            raise DataError(f"'{key[:120]}' is not a plain name")
        check_link(group, name)
        kind = group.get(name, getclass=True)
        if kind is h5py.Group:
            if path != BOUNDARIES:
                raise DataError(f"groups are nested too deeply at '{key}'")
            _survey_well_group(group[name], key, found)
            continue
        check_kind(kind, key)
        dataset = group[name]
        if path == "scalars" and not isinstance(dataset.id.get_type(), h5py.h5t.TypeFloatID | h5py.h5t.TypeIntegerID):
            _leave_out_of_well(found, f"'{key}', which is no number")
            continue
        is_field = path in FIELD_GROUPS
        given = {} if is_field else {"integers": True, "scalars": True, "flags": path.startswith(BOUNDARIES)}
        found.arrays[key] = survey_dataset(dataset, key, found.size, **given)
        found.attributes[key] = _well_attributes(dataset, key, found)


def _leave_out_of_well(found: WellSurvey, text: str) -> None:
    if len(found.left_out) < MAX_LEFT_OUT:
        found.left_out.append(text[:200])


def _well_attributes(owner: Any, path: str, found: WellSurvey) -> dict[str, Values]:
    """Numbers, truth values and texts, each as a list; others are left out. Raises DataError for absurd sizes."""
    import h5py

    if h5py.h5a.get_num_attrs(owner.id) > MAX_ATTRIBUTES:
        raise DataError(f"'{path}' has more than {MAX_ATTRIBUTES} attributes")
    values: dict[str, Values] = {}
    for name in list(owner.attrs):
        handle = owner.attrs.get_id(name)
        if handle.shape is None or 0 in handle.shape:
            values[name] = []  # an empty list, as of fields that there are none of
            continue
        if handle.get_storage_size() > MAX_TEXT_BYTES or math.prod(handle.shape or ()) > MAX_ATTRIBUTE_VALUES:
            raise DataError(f"attribute '{name[:80]}' of '{path}' is absurdly large")
        kind = handle.get_type()
        flag = isinstance(kind, h5py.h5t.TypeEnumID) and kind.get_size() == 1
        if flag or isinstance(kind, h5py.h5t.TypeFloatID | h5py.h5t.TypeIntegerID):
            numbers = [float(v) for v in _flat(owner.attrs[name])]
            if all(map(math.isfinite, numbers)):
                values[name] = numbers
            else:
                _leave_out_of_well(found, f"attribute '{name[:80]}' of '{path}', which is not finite")
        elif isinstance(kind, h5py.h5t.TypeStringID):
            texts = [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in _flat(owner.attrs[name])]
            values[name] = [text[:1000] for text in texts]
        else:
            _leave_out_of_well(found, f"attribute '{name[:80]}' of '{path}', which is neither a number nor a text")
    return values


def _flat(value: Any) -> list[Any]:
    import numpy as np

    return list(np.asarray(value, dtype=object).reshape(-1))


def main() -> None:
    """The child: surveys the files that are named, one JSON line each."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    surveys: dict[str, Callable[[str], FileSurvey | NetcdfSurvey | TreeSurvey | WellSurvey]] = {
        "--netcdf": survey_netcdf,
        "--tree": survey_tree,
        "--well": survey_well,
    }
    survey = surveys.get(sys.argv[1] if len(sys.argv) > 1 else "", survey_file)
    # Names come through standard input: a command line has a limit.
    for path in sys.stdin.buffer.read().decode().split("\0"):
        try:
            answer = survey(path).to_json()
        except UpsError as error:
            answer = {"error": f"{path}: {error.message}", "hint": error.hint, "cause": error.cause}
        except MemoryError:
            answer = {"error": f"{path}: reading its structure needs absurdly much memory", "hint": "", "cause": "data"}
        except Exception as error:  # noqa: BLE001 - h5py raises nearly every type for damaged files
            answer = {"error": f"{path}: {type(error).__name__}: {str(error)[:200]}", "hint": "", "cause": "data"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
