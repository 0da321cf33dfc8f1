"""What stands in an HDF5 file: a bounded, strict walk over its structure. Runs only in the process of `hdf5_guard`.

Refuses whatever a data file never needs and a hostile one may use: links that leave the group (soft, external), data
stored elsewhere (external storage, virtual datasets), types other than plain floats, shapes that the file cannot
hold, chunks or attributes beyond a size, unknown filters. Reads no field values. The checks of links, datasets and
attributes also serve `netcdf_survey`.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from ups.errors import DataError
from ups.formats.hdf5_open import open_library, size_of

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
