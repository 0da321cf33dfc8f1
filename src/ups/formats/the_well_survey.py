"""What stands in a file of The Well: the groups of that format, their arrays and attributes.

Runs only in the process of `hdf5_guard`, with the checks of `hdf5_survey`.

A part of the format that is refused (a link, data stored elsewhere, an absurd size) refuses the file. What the format
does not know, and values that are no numbers, are left out and named.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from ups.errors import DataError
from ups.formats.hdf5_open import open_library, size_of
from ups.formats.hdf5_survey import (
    MAX_ATTRIBUTE_VALUES,
    MAX_ATTRIBUTES,
    MAX_GROUP_ENTRIES,
    MAX_TEXT_BYTES,
    ArraySurvey,
    check_kind,
    check_link,
    entries_of,
    survey_dataset,
)

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
        found.attributes[""] = _attributes(file, "", found)
        for name in names:
            if name not in GROUPS:
                _leave_out(found, f"'{name}'")
                continue
            check_link(file, name)
            if file.get(name, getclass=True) is not h5py.Group:
                raise DataError(f"'{name}' is not a group")
            _survey_group(file[name], name, found)
    return found


def _survey_group(group: Any, path: str, found: WellSurvey) -> None:
    import h5py

    found.attributes[path] = _attributes(group, path, found)
    for name in entries_of(group, MAX_GROUP_ENTRIES):
        key = f"{path}/{name}"
        if "/" in name or len(name) > 80:
            raise DataError(f"'{key[:120]}' is not a plain name")
        check_link(group, name)
        kind = group.get(name, getclass=True)
        if kind is h5py.Group:
            if path != BOUNDARIES:
                raise DataError(f"groups are nested too deeply at '{key}'")
            _survey_group(group[name], key, found)
            continue
        check_kind(kind, key)
        dataset = group[name]
        if path == "scalars" and not isinstance(dataset.id.get_type(), h5py.h5t.TypeFloatID | h5py.h5t.TypeIntegerID):
            _leave_out(found, f"'{key}', which is no number")
            continue
        is_field = path in FIELD_GROUPS
        given = {} if is_field else {"integers": True, "scalars": True, "flags": path.startswith(BOUNDARIES)}
        found.arrays[key] = survey_dataset(dataset, key, found.size, **given)
        found.attributes[key] = _attributes(dataset, key, found)


def _leave_out(found: WellSurvey, text: str) -> None:
    if len(found.left_out) < MAX_LEFT_OUT:
        found.left_out.append(text[:200])


def _attributes(owner: Any, path: str, found: WellSurvey) -> dict[str, Values]:
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
                _leave_out(found, f"attribute '{name[:80]}' of '{path}', which is not finite")
        elif isinstance(kind, h5py.h5t.TypeStringID):
            texts = [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in _flat(owner.attrs[name])]
            values[name] = [text[:1000] for text in texts]
        else:
            _leave_out(found, f"attribute '{name[:80]}' of '{path}', which is neither a number nor a text")
    return values


def _flat(value: Any) -> list[Any]:
    import numpy as np

    return list(np.asarray(value, dtype=object).reshape(-1))
