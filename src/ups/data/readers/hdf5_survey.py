"""What stands in an HDF5 file: a bounded, strict walk over its structure. Runs only in the process of `hdf5_guard`.

Refuses whatever a data file never needs and a hostile one may use: links that leave the group (soft, external), data
stored elsewhere (external storage, virtual datasets), types other than plain floats, shapes that the file cannot
hold, chunks or attributes beyond a size, unknown filters. Reads no field values.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from ups.errors import DataError

MAX_ROOT_ENTRIES = 200_000
MAX_GROUP_ENTRIES = 64
MAX_ATTRIBUTES = 64
MAX_TEXT_BYTES = 1 << 16
MAX_ATTRIBUTE_VALUES = 64
MAX_DIMS = 6
MAX_CHUNKS = 1 << 23
MAX_CHUNK_BYTES = 256 << 20
MAX_COMPACT_BYTES = 1 << 16
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
    """One dataset. `offset`: where a contiguous one starts in the file, else None; `chunks` of a chunked one."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int | None
    chunks: tuple[int, ...] | None
    filters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FileSurvey:
    """Structure of one file.

    datasets: those in the root. groups: names of the trajectory groups, sorted, for files with one group each;
    `members` are the datasets of such a group with '{}' for its name, `offsets` where each one's contiguous bytes are,
    group by group. attributes: those of the root and, for files of groups, those of the first group.
    """

    size: int
    datasets: dict[str, ArraySurvey]
    groups: tuple[str, ...] = ()
    members: dict[str, ArraySurvey] = field(default_factory=dict)
    offsets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> FileSurvey:
        """The inverse of `to_json`."""

        def array(d: dict[str, Any]) -> ArraySurvey:
            chunks = None if d["chunks"] is None else tuple(d["chunks"])
            return ArraySurvey(d["name"], tuple(d["shape"]), d["dtype"], d["offset"], chunks, tuple(d["filters"]))

        return cls(
            size=data["size"],
            datasets={k: array(v) for k, v in data["datasets"].items()},
            groups=tuple(data["groups"]),
            members={k: array(v) for k, v in data["members"].items()},
            offsets={k: tuple(v) for k, v in data["offsets"].items()},
            attributes=data["attributes"],
        )


def survey_file(path: str) -> FileSurvey:
    """The structure of a file. Raises DataError for what is refused, OSError for what HDF5 cannot open."""
    import h5py

    size = os.path.getsize(path)
    with h5py.File(path, "r", locking=False) as file:
        names = _entries(file, MAX_ROOT_ENTRIES)
        groups: list[str] = []
        datasets: dict[str, ArraySurvey] = {}
        for name in names:
            _check_link(file, name)
            kind = file.get(name, getclass=True)
            if kind is h5py.Group:
                groups.append(name)
            else:
                _check_kind(kind, name)
                if len(datasets) == MAX_GROUP_ENTRIES:
                    raise DataError(f"more than {MAX_GROUP_ENTRIES} datasets in the root")
                datasets[name] = _survey_dataset(file[name], name, size)
        attributes = _attributes(file)
        if not groups:
            return FileSurvey(size, datasets, attributes=attributes)
        groups.sort()
        members, offsets = _survey_groups(file, groups, size)
        attributes = {**_attributes(file[groups[0]]), **attributes}
        return FileSurvey(size, datasets, tuple(groups), members, offsets, attributes)


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


def _survey_tree(group: Any, prefix: str, size: int, depth: int = 0) -> dict[str, ArraySurvey]:
    import h5py

    found: dict[str, ArraySurvey] = {}
    for name in _entries(group, MAX_GROUP_ENTRIES):
        _check_link(group, name)
        kind = group.get(name, getclass=True)
        key = f"{prefix}/{name}"
        if kind is h5py.Group:
            if depth == 2:
                raise DataError(f"groups are nested too deeply at '{key}'")
            found.update(_survey_tree(group[name], key, size, depth + 1))
        else:
            _check_kind(kind, key)
            found[key] = _survey_dataset(group[name], key, size)
    return found


def _form(array: ArraySurvey) -> tuple[Any, ...]:
    return (array.shape, array.dtype, array.chunks, array.filters)


def _entries(group: Any, limit: int) -> list[str]:
    if group.id.get_num_objs() > limit:
        raise DataError(f"'{group.name}' has more than {limit} entries")
    names: list[str] = []
    for name in group:
        names.append(name)
        if len(names) > limit:
            raise DataError(f"'{group.name}' has more than {limit} entries")
    return names


def _check_link(group: Any, name: str) -> None:
    import h5py

    if not isinstance(group.get(name, getlink=True), h5py.HardLink):
        raise DataError(f"'{name[:80]}' is a soft or external link, which is not followed")


def _check_kind(kind: Any, name: str) -> None:
    import h5py

    if kind is not h5py.Dataset:
        raise DataError(f"'{name[:80]}' is neither a group nor a dataset")


def _survey_dataset(dataset: Any, name: str, size: int) -> ArraySurvey:
    import h5py

    kind = dataset.id.get_type()
    if not isinstance(kind, h5py.h5t.TypeFloatID) or kind.get_size() not in (4, 8):
        raise DataError(f"dataset '{name}' does not hold float32 or float64 numbers")
    dtype = kind.dtype
    if dtype.kind != "f" or dtype.itemsize != kind.get_size():
        raise DataError(f"dataset '{name}' has an unusual float type")
    if dataset.id.get_space().get_simple_extent_type() != h5py.h5s.SIMPLE:
        raise DataError(f"dataset '{name}' is not an array")
    shape = tuple(int(n) for n in dataset.shape)
    if not 1 <= len(shape) <= MAX_DIMS or min(shape) < 1 or max(shape) > 1 << 40:
        raise DataError(f"dataset '{name}' has the absurd shape {shape}")
    num_bytes = math.prod(shape) * int(dtype.itemsize)
    if num_bytes > 1 << 52:
        raise DataError(f"dataset '{name}' claims {num_bytes} bytes")
    plist = dataset.id.get_create_plist()
    if plist.get_external_count():
        raise DataError(f"dataset '{name}' keeps its data in other files")
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


def _attributes(owner: Any) -> dict[str, Any]:
    """Numbers and short texts; anything else that is small is left out, anything large is refused."""
    import h5py

    if h5py.h5a.get_num_attrs(owner.id) > MAX_ATTRIBUTES:
        raise DataError(f"'{owner.name}' has more than {MAX_ATTRIBUTES} attributes")
    found: dict[str, Any] = {}
    for name in list(owner.attrs):
        handle = owner.attrs.get_id(name)
        if handle.get_storage_size() > MAX_TEXT_BYTES or math.prod(handle.shape or ()) > MAX_ATTRIBUTE_VALUES:
            raise DataError(f"attribute '{name[:80]}' of '{owner.name}' is absurdly large")
        kind = handle.get_type()
        if isinstance(kind, h5py.h5t.TypeFloatID | h5py.h5t.TypeIntegerID):
            values = [float(v) for v in owner.attrs[name].reshape(-1)] if handle.shape else [float(owner.attrs[name])]
            if len(values) == 1 and math.isfinite(values[0]):
                found[name] = values[0]
        elif isinstance(kind, h5py.h5t.TypeStringID) and not handle.shape:
            text = owner.attrs[name]
            text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
            if len(text) > MAX_TEXT_BYTES:
                raise DataError(f"attribute '{name[:80]}' of '{owner.name}' is absurdly long")
            found[name] = text
    return found
