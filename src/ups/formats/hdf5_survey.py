"""What stands in an HDF5 file: a bounded walk over its structure. Runs only in the child process of `hdf5`.

Four forms share one walk: `pdebench`, `the_well`, `netcdf` (the root of a NetCDF-4 file, for a rollout) and `tree` (any
other file: all arrays in all groups). Refused is whatever a data file never needs and a hostile one may use: links that
leave the group (soft, external), data stored elsewhere (external storage, virtual datasets), types other than plain
numbers, shapes that the file cannot hold, chunks or attributes beyond a size, unknown filters. In the form `tree` such
a part is left out and named; in the others it refuses the file. No field values are read.

    python -m ups.formats.hdf5_survey FORM     names on standard input; one JSON line per file
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import h5py
import numpy as np

from ups.buckets.path import data_path
from ups.errors import DataError, UpsError
from ups.formats.hdf5 import BOUNDARIES, FIELD_GROUPS, WELL_GROUPS, ArraySurvey, FileSurvey, Values, open_library

MEMORY_LIMIT_BYTES = 1 << 30
MAX_ROOT_ENTRIES = 200_000
MAX_GROUP_ENTRIES = 64
MAX_ARRAYS = 50_000
MAX_DEPTH = 5
MAX_LEFT_OUT = 200
MAX_ATTRIBUTES = 64
MAX_TREE_ATTRIBUTES = 256
MAX_TEXT_BYTES = 1 << 16
MAX_TEXT_CHARACTERS = 1000
MAX_ATTRIBUTE_VALUES = 64
MAX_DIMS = 7  # trajectory, time, three of space, and two of a tensor
MAX_CHUNKS = 1 << 23
MAX_CHUNK_BYTES = 256 << 20
MAX_COMPACT_BYTES = 1 << 16
# A rollout starts from a few frames; the whole input is held in memory.
MAX_INPUT_BYTES = 4 << 30
_ELSEWHERE_HINT = "a data file must hold its data itself: copy the data into it if you trust where it points"
_FILTERS = {1: "deflate", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}
_PIPELINES = {"", "deflate", "shuffle", "shuffle deflate", "lzf", "shuffle lzf", "fletcher32"}
# A dimension of NetCDF-4 without a coordinate variable is a dataset with this text in its attribute NAME.
_ONLY_A_DIMENSION = "This is a netCDF dimension but not a netCDF variable"
_BOOKKEEPING = frozenset(
    {"CLASS", "NAME", "DIMENSION_LIST", "DIMENSION_LABELS", "REFERENCE_LIST", "_Netcdf4Dimid", "_Netcdf4Coordinates"}
) | {"_NCProperties", "_nc3_strict", "H5PATH"}
_NUMBERS = h5py.h5t.TypeFloatID | h5py.h5t.TypeIntegerID


def survey_file(path: str, form: str) -> FileSurvey:
    """The structure of a file. Raises DataError for what is refused, OSError for what HDF5 cannot open."""
    location = data_path(path)
    size = location.stat().st_size
    with open_library(path) as file:
        walk = _Walk(file, size, form)
        _FORMS[form](walk)
    return walk.survey


class _Walk:
    """The walk over one file. strict: a part that may not be read refuses the file; else it is left out and named.

    numbers: kinds that are read, of 'fiub' (float, integer, flag), single numbers only with integers. texts: what holds
    no numbers is left out and does not refuse the file.
    """

    def __init__(self, file: Any, size: int, form: str) -> None:
        self.file, self.form, self.strict = file, form, form != "tree"
        self.texts = form in ("tree", "netcdf")
        self.numbers = "fiu" if self.texts else "f"
        self.survey = FileSurvey(size)

    def refuse(self, text: str, hint: str = "") -> None:
        if self.strict:
            raise DataError(text, hint=hint)
        self.leave_out(text)

    def leave_out(self, text: str) -> None:
        if len(self.survey.left_out) < MAX_LEFT_OUT:
            self.survey.left_out.append(text[:300])

    def kind_of(self, group: Any, name: str, path: str) -> Any:
        """h5py.Group or h5py.Dataset; None for what is refused."""
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            self.refuse(f"'{path[:80]}' is a soft or external link, which is not followed", _ELSEWHERE_HINT)
            return None
        kind = group.get(name, getclass=True)
        if kind in (h5py.Group, h5py.Dataset):
            return kind
        self.refuse(f"'{path[:80]}' is neither a group nor a dataset")
        return None

    def group(
        self, group: Any, prefix: str, levels: int, above: frozenset[int] = frozenset()
    ) -> dict[str, ArraySurvey]:
        """Arrays of a group and of the groups in it. levels: of groups that may be nested in it.

        above: addresses of the groups that it lies in; a hard link may make a circle.
        """
        arrays: dict[str, ArraySurvey] = {}
        above = above | {_address(group)}
        for name in _entries(group, MAX_GROUP_ENTRIES if self.strict else MAX_ARRAYS):
            path = f"{prefix}/{name}" if prefix else name
            if path.startswith("#"):
                continue  # where MATLAB keeps the content of its cells, which are named as left out
            kind = self.kind_of(group, name, path)
            if kind is h5py.Group:
                if _address(group[name]) in above:
                    self.refuse(f"group '{path[:80]}' contains itself")
                elif levels == 0:
                    self.refuse(f"group '{path[:80]}' is nested too deep")
                else:
                    self.describe(group[name], path)
                    arrays |= self.group(group[name], path, levels - 1, above)
            elif kind is h5py.Dataset:
                array = self.array(group[name], path)
                if array is not None:
                    arrays[path] = array
                    self.describe(group[name], path)
            if len(arrays) > MAX_ARRAYS:
                raise DataError(f"it has more than {MAX_ARRAYS} arrays")
        return arrays

    def array(self, dataset: Any, path: str) -> ArraySurvey | None:
        """One dataset; None if it is left out."""
        if _short_text(dataset, "NAME").startswith(_ONLY_A_DIMENSION):
            return None
        kind = dataset.id.get_type()
        matlab = "" if self.strict else _short_text(dataset, "MATLAB_class")
        try:
            _check_storage(dataset, path)
            if isinstance(kind, h5py.h5t.TypeReferenceID) and not self.strict:
                self.leave_out(f"'{path}', a cell or an array of structs of MATLAB: make one array, as cat(3, c{{:}})")
            elif self.texts and (not isinstance(kind, _NUMBERS) or matlab == "char"):
                self.leave_out(f"'{path}', which does not hold numbers")
            elif matlab and "MATLAB_empty" in dataset.attrs:
                self.leave_out(f"'{path}', which is empty")
            else:
                array = _survey_dataset(dataset, path, self.survey.size, self.numbers)
                # As MATLAB shows it: it writes the first dimension last.
                return replace(array, shape=array.shape[::-1], column_major=True) if matlab else array
        except DataError as error:
            self.refuse(error.message, error.hint or "")
        return None

    def describe(self, owner: Any, path: str) -> None:
        """Keep the attributes of a group or an array, and the names of the dimensions of an array.

        PDEBench has neither, and there may be ten thousand groups.
        """
        if self.form == "pdebench":
            return
        self.survey.attributes[path] = self.attributes(owner, path)
        if isinstance(owner, h5py.Dataset) and self.form != "the_well":
            self.survey.dims[path] = self._dims(owner, path)

    def attributes(self, owner: Any, path: str, max_characters: int = MAX_TEXT_CHARACTERS) -> dict[str, Values]:
        """Numbers, truth values and texts, each as a list."""
        of_path = f" of '{path}'" if path else ""
        limit = MAX_ATTRIBUTES if self.strict else MAX_TREE_ATTRIBUTES
        count = h5py.h5a.get_num_attrs(owner.id)
        if count > limit:
            self.refuse(f"{count} attributes{of_path}, more than {limit}")
            return {}
        values: dict[str, Values] = {}
        for name in list(owner.attrs):
            if name in _BOOKKEEPING or name.startswith("MATLAB_"):
                continue
            label = f"attribute '{name[:80]}'{of_path}"
            try:
                value = _attribute(owner, name, label, max_characters)
            except DataError as error:
                self.refuse(error.message)
                continue
            problem = value if isinstance(value, str) else _not_finite(name, value, self.strict)
            if not isinstance(value, str) and not problem:
                values[name] = value
            elif name not in ("_FillValue", "missing_value"):
                self.leave_out(f"{label}, which {problem}")
                if name not in self.survey.unread:
                    self.survey.unread.append(name)
        return values

    def _dims(self, dataset: Any, path: str) -> tuple[str, ...]:
        """Names of the dimensions: of the scales they refer to, else their labels, else ''."""
        rank = len(dataset.shape)
        if rank == 1 and _short_text(dataset, "CLASS") == "DIMENSION_SCALE":
            return (path.split("/")[-1],)
        names = [""] * rank
        if "DIMENSION_LIST" in dataset.attrs:
            handle = dataset.attrs.get_id("DIMENSION_LIST")
            if handle.shape != (rank,) or not isinstance(handle.get_type(), h5py.h5t.TypeVlenID):
                self.refuse(f"the dimensions of '{path}' must be a list of {rank} references")
                return tuple(names)
            for i, references in enumerate(dataset.attrs["DIMENSION_LIST"]):
                target = self.file[references[0]] if len(references) else None
                if isinstance(target, h5py.Dataset) and target.shape == (dataset.shape[i],):
                    names[i] = target.name.split("/")[-1]
                else:
                    self.refuse(f"dimension {i} of '{path}' does not refer to a dimension of its length")
        names = [name or str(dataset.dims[i].label)[:80] for i, name in enumerate(names)]
        return tuple(name if names.count(name) == 1 else "" for name in names)


def _tree(walk: _Walk) -> None:
    walk.describe(walk.file, "")
    walk.survey.arrays = walk.group(walk.file, "", MAX_DEPTH)


def _netcdf(walk: _Walk) -> None:
    """Variables of the root; groups below it, and variables that hold no numbers, are left out."""
    for name in _entries(walk.file, MAX_GROUP_ENTRIES):
        if walk.kind_of(walk.file, name, name) is h5py.Group:
            walk.leave_out(f"group '{name[:80]}'")
            continue
        array = walk.array(walk.file[name], name)
        if array is not None:
            walk.survey.arrays[name] = array
            walk.describe(walk.file[name], name)
    num_bytes = sum(math.prod(a.shape) * 8 for a in walk.survey.arrays.values())  # as float64, as a simulator has them
    if num_bytes > MAX_INPUT_BYTES:
        raise DataError(
            f"its variables would take {num_bytes / 2**30:.1f} GiB of memory, more than {MAX_INPUT_BYTES >> 30} GiB",
            hint="keep only the fields and the last frames that a rollout starts from",
        )


def _the_well(walk: _Walk) -> None:
    """The groups of the format; what the format does not know is left out."""
    names = _entries(walk.file, MAX_GROUP_ENTRIES)
    if not {"dimensions"} < set(names) & set(WELL_GROUPS):
        raise DataError(
            f"not a file of The Well: in its root are {', '.join(names)[:200] or 'no groups'}",
            hint="a file of The Well has the groups dimensions and t0_fields, t1_fields or t2_fields",
        )
    walk.describe(walk.file, "")
    for name in names:
        if name not in WELL_GROUPS:
            walk.leave_out(f"'{name}'")
            continue
        if walk.kind_of(walk.file, name, name) is not h5py.Group:
            raise DataError(f"'{name}' is not a group")
        group = walk.file[name]
        walk.describe(group, name)
        walk.numbers = "f" if name in FIELD_GROUPS else "fiub" if name == BOUNDARIES else "fiu"
        walk.texts = name == "scalars"
        walk.survey.arrays |= walk.group(group, name, levels=int(name == BOUNDARIES))


def _pdebench(walk: _Walk) -> None:
    """Datasets of the root, or one group per trajectory."""
    file, survey = walk.file, walk.survey
    if "_NCProperties" in file.attrs:
        raise DataError(
            "a NetCDF file, not a PDEBench file",
            hint="`ups init DIR --data FILE` describes it to train on it; `ups rollout` starts from NetCDF files",
        )
    groups: list[str] = []
    for name in _entries(file, MAX_ROOT_ENTRIES):
        if walk.kind_of(file, name, name) is h5py.Group:
            groups.append(name)
            continue
        if len(survey.arrays) == MAX_GROUP_ENTRIES:
            raise DataError(f"more than {MAX_GROUP_ENTRIES} datasets in the root")
        array = walk.array(file[name], name)
        survey.arrays |= {name: array} if array is not None else {}
    survey.attributes[""] = walk.attributes(file, "", MAX_TEXT_BYTES)
    if groups:
        survey.groups = tuple(sorted(groups))
        members, survey.offsets = _alike_groups(walk)
        survey.arrays |= members
        first = walk.attributes(file[survey.groups[0]], survey.groups[0], MAX_TEXT_BYTES)
        survey.attributes["{}"] = first
        survey.varying = _varying(walk, first)


def _alike_groups(walk: _Walk) -> tuple[dict[str, ArraySurvey], dict[str, tuple[int, ...]]]:
    """Arrays of the first group, and offsets of those of all groups, which must have the same form."""
    groups = walk.survey.groups
    members: dict[str, ArraySurvey] = {}
    offsets: dict[str, list[int]] = {}
    for number, name in enumerate(groups):
        if "{" in name or "}" in name or len(name) > 64:
            raise DataError(f"group name {name[:80]!r} is not a plain name")
        arrays = walk.group(walk.file[name], "{}", levels=2)
        if number == 0:
            members = arrays
            offsets = {k: [] for k, a in arrays.items() if a.offset is not None}
        if {k: _form(a) for k, a in arrays.items()} != {k: _form(a) for k, a in members.items()}:
            raise DataError(f"group '{name}' differs from group '{groups[0]}' in its datasets, shapes or types")
        for key, values in offsets.items():
            offset = arrays[key].offset
            if offset is None:
                raise DataError(f"group '{name}' stores '{key}' differently from group '{groups[0]}'")
            values.append(offset)
    return members, {k: tuple(v) for k, v in offsets.items()}


def _varying(walk: _Walk, first: dict[str, Values]) -> tuple[str, ...]:
    """Attributes, and keys of the text `config`, in which a later group differs from the first: at most 64 names."""
    names: set[str] = set()
    config = str((first.get("config") or [""])[0])
    lines = set(config.splitlines())
    for name in walk.survey.groups[1:]:
        here = walk.attributes(walk.file[name], name, MAX_TEXT_BYTES)
        names |= {k for k in first.keys() | here.keys() if k != "config" and first.get(k) != here.get(k)}
        own = str((here.get("config") or [""])[0])
        if own != config:
            # By lines, not by parsing: a file may have ten thousand of these texts.
            changed = lines ^ set(own.splitlines())
            names |= {m.group(1) for line in changed if (m := re.match(r"\s*([\w.-]{1,64})\s*:", line))}
    return tuple(sorted(names)[:MAX_ATTRIBUTES])


_FORMS: dict[str, Callable[[_Walk], None]]
_FORMS = {"tree": _tree, "netcdf": _netcdf, "the_well": _the_well, "pdebench": _pdebench}


def _form(array: ArraySurvey) -> tuple[Any, ...]:
    return (array.shape, array.dtype, array.chunks, array.filters)


def _entries(group: Any, limit: int) -> list[str]:
    names: list[str] = []
    if group.id.get_num_objs() <= limit:
        names = list(itertools.islice(group, limit + 1))
    if len(names) > limit or group.id.get_num_objs() > limit:
        raise DataError(f"'{group.name}' has more than {limit} entries")
    return names


def _address(group: Any) -> int:
    """What tells a group from others of the file: it may be linked from several places, even from inside."""
    return int(h5py.h5o.get_info(group.id).addr)


def _check_storage(dataset: Any, path: str) -> None:
    """Raises DataError for data that lie in other files."""
    plist = dataset.id.get_create_plist()
    inside = (h5py.h5d.CHUNKED, h5py.h5d.CONTIGUOUS, h5py.h5d.COMPACT)
    if plist.get_external_count() or plist.get_layout() not in inside:
        raise DataError(f"dataset '{path[:80]}' keeps its data in other files", hint=_ELSEWHERE_HINT)


def _survey_dataset(dataset: Any, name: str, size: int, numbers: str) -> ArraySurvey:
    """One dataset whose data lie in the file, checked. numbers: see `_Walk`."""
    kind = dataset.id.get_type()
    if "b" in numbers and isinstance(kind, h5py.h5t.TypeEnumID) and kind.get_size() == 1:
        kind = kind.get_super()  # HDF5 has true and false as an enumeration of one byte
    whole = "i" in numbers and isinstance(kind, h5py.h5t.TypeIntegerID)
    if not whole and (not isinstance(kind, h5py.h5t.TypeFloatID) or kind.get_size() not in (4, 8)):
        raise DataError(f"dataset '{name}' does not hold float32 or float64 numbers")
    dtype = kind.dtype
    if dtype.kind not in ("iu" if whole else "f") or dtype.itemsize != kind.get_size():
        raise DataError(f"dataset '{name}' has the unusual number type {dtype}")
    extent = dataset.id.get_space().get_simple_extent_type()
    scalar = "i" in numbers and extent == h5py.h5s.SCALAR
    if extent != h5py.h5s.SIMPLE and not scalar:
        raise DataError(f"dataset '{name}' is not an array")
    shape = tuple(int(n) for n in dataset.shape)
    if not scalar and (not 1 <= len(shape) <= MAX_DIMS or min(shape) < 1 or max(shape) > 1 << 40):
        raise DataError(f"dataset '{name}' must have 1 to {MAX_DIMS} dimensions of 1 to 2^40 entries, got {shape}")
    num_bytes = math.prod(shape) * int(dtype.itemsize)
    if num_bytes > 1 << 52:
        raise DataError(f"dataset '{name}' claims {num_bytes} bytes")
    plist = dataset.id.get_create_plist()
    layout = plist.get_layout()
    if layout == h5py.h5d.CHUNKED:
        chunks, filters = _survey_chunks(dataset, plist, name, size, shape, int(dtype.itemsize))
        return ArraySurvey(name, shape, dtype.str, None, chunks, filters)
    if layout == h5py.h5d.CONTIGUOUS:
        offset = dataset.id.get_offset()
        if offset is None or offset < 0 or offset + num_bytes > size or plist.get_nfilters():
            raise DataError(f"dataset '{name}' claims {num_bytes} bytes, which the file of {size} bytes does not hold")
        return ArraySurvey(name, shape, dtype.str, int(offset), None, ())
    if num_bytes > MAX_COMPACT_BYTES:
        raise DataError(f"dataset '{name}' claims {num_bytes} bytes in a compact layout")
    return ArraySurvey(name, shape, dtype.str, None, None, ())


def _survey_chunks(
    dataset: Any, plist: Any, name: str, size: int, shape: tuple[int, ...], itemsize: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    chunks = tuple(int(n) for n in plist.get_chunk())
    nominal = math.prod(chunks) * itemsize
    if len(chunks) != len(shape) or min(chunks) < 1 or nominal > MAX_CHUNK_BYTES:
        raise DataError(f"chunks of dataset '{name}' must have at most {MAX_CHUNK_BYTES >> 20} MiB, got shape {chunks}")
    codes = [int(plist.get_filter(i)[0]) for i in range(min(plist.get_nfilters(), 8))]
    filters = tuple(_FILTERS.get(code, "?") for code in codes)
    if " ".join(filters) not in _PIPELINES:
        raise DataError(f"dataset '{name}' needs the filters {codes} in this order, which are not read")
    expected = math.prod(-(-n // c) for n, c in zip(shape, chunks, strict=True))
    if expected > MAX_CHUNKS:
        raise DataError(f"dataset '{name}' has {expected} chunks, more than {MAX_CHUNKS}")
    seen: set[tuple[int, ...]] = set()

    def check(info: Any) -> None:
        start = tuple(int(n) for n in info.chunk_offset)
        places = zip(start, chunks, shape, strict=False)
        inside = len(start) == len(shape) and all(s % c == 0 and s < n for s, c, n in places)
        fits = info.byte_offset is not None and info.size > 0 and info.byte_offset + info.size <= size
        # Bit i of the mask: filter i was left out, as compressors are where they would not make a chunk smaller.
        packed = [name for i, name in enumerate(filters) if name != "shuffle" and not info.filter_mask >> i & 1]
        right = 0 <= info.filter_mask < 1 << len(filters)
        right = right and (info.size == nominal if not packed else info.size <= 2 * nominal + 4096)
        if not (inside and fits and right) or start in seen or len(seen) >= expected:
            raise DataError(f"chunk at {start} of dataset '{name}' has a wrong position, size or filter mask")
        seen.add(start)

    dataset.id.chunk_iter(check)
    if len(seen) != expected:
        raise DataError(f"dataset '{name}' has {len(seen)} of its {expected} chunks: it was not written completely")
    return chunks, filters


def _attribute(owner: Any, name: str, label: str, max_characters: int) -> Values | str:
    """Numbers or texts, or why it is neither. Raises DataError if it is too large."""
    handle = owner.attrs.get_id(name)
    if handle.shape is None or 0 in handle.shape:
        return []  # as of fields that there are none of
    if handle.get_storage_size() > MAX_TEXT_BYTES or math.prod(handle.shape) > MAX_ATTRIBUTE_VALUES:
        raise DataError(f"{label} is larger than {MAX_TEXT_BYTES} bytes or {MAX_ATTRIBUTE_VALUES} values")
    kind = handle.get_type()
    is_flag = isinstance(kind, h5py.h5t.TypeEnumID) and kind.get_size() == 1
    if is_flag or isinstance(kind, _NUMBERS):
        return [float(v) for v in np.asarray(owner.attrs[name]).reshape(-1)]
    if not isinstance(kind, h5py.h5t.TypeStringID):
        return "is neither a number nor a text"
    items = np.asarray(owner.attrs[name], dtype=object).reshape(-1)
    texts = [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in items]
    if max(map(len, texts)) > MAX_TEXT_BYTES:
        raise DataError(f"{label} is a text of more than {MAX_TEXT_BYTES} characters")
    return [text[:max_characters] for text in texts]


def _not_finite(name: str, values: Values, strict: bool) -> str:
    """Why numbers are not read; '' if they are. A scale that is not finite is refused when the array is decoded."""
    several = len(values) > 1 and not strict  # the finite ones are read one by one
    if several or name in ("scale_factor", "add_offset") or all(isinstance(v, str) or math.isfinite(v) for v in values):
        return ""
    return "is not finite"


def _short_text(dataset: Any, name: str) -> str:
    """A short text attribute; '' if there is none."""
    if name not in dataset.attrs:
        return ""
    handle = dataset.attrs.get_id(name)
    if not isinstance(handle.get_type(), h5py.h5t.TypeStringID) or handle.shape or handle.get_storage_size() > 1024:
        return ""
    value = dataset.attrs[name]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def main() -> None:
    """The child: surveys the files that are named, one JSON line each."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Names come through standard input: a command line has a limit.
    for path in sys.stdin.buffer.read().decode().split("\0"):
        try:
            answer = asdict(survey_file(path, sys.argv[1]))
        except UpsError as error:
            answer = {"error": f"{path}: {error.message}", "hint": error.hint, "cause": error.cause}
        except MemoryError:
            limit = f"more than {MEMORY_LIMIT_BYTES >> 20} MiB of memory"
            answer = {"error": f"{path}: reading its structure needs {limit}", "hint": "", "cause": "data"}
        except Exception as error:  # noqa: BLE001 - h5py raises nearly every type for damaged files
            answer = {"error": f"{path}: {type(error).__name__}: {str(error)[:200]}", "hint": "", "cause": "data"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
