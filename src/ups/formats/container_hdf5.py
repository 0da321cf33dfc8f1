"""HDF5 and NetCDF-4 files as named arrays, behind the guard. Groups of equal content are one array with one more
dimension: a file with a group for each trajectory has `*/u` of shape (groups, ...).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from ups.errors import DataError
from ups.formats.base import Array
from ups.formats.container import Attribute, Container, Variable
from ups.formats.hdf5_arrays import Region, drop_hdf5, read_region
from ups.formats.hdf5_guard import FileKey, survey_tree_file
from ups.formats.hdf5_survey import ArraySurvey
from ups.formats.hdf5_tree import TreeSurvey

MAX_COMMON_VALUES = 1 << 16
# How xarray and netCDF call a dimension that has no name.
_NAMELESS = re.compile(r"phony_dim_\d+|dim_\d+")


class Hdf5Container(Container):
    """The arrays of one file."""

    def __init__(self, key: FileKey, survey: TreeSurvey) -> None:
        self._key = key
        self._arrays: dict[str, ArraySurvey | tuple[ArraySurvey, ...] | Array] = {}
        variables: dict[str, Variable] = {}
        left_out = list(survey.left_out)
        families = _families(survey)
        inside = {member for members in families.values() for member in members}
        for name, array in survey.arrays.items():
            if not inside.isdisjoint(_parents(name)):
                continue
            self._arrays[name] = array
            variables[name] = Variable(name, array.shape, _names(survey.dims[name]), survey.attributes[name])
        for parent, groups in families.items():
            left_out += self._add_family(survey, parent, groups, variables)
        attributes: dict[str, Attribute] = dict(survey.attributes.get("", {}))
        for path, found in survey.attributes.items():
            if path and path not in survey.arrays and inside.isdisjoint((path, *_parents(path))):
                attributes |= {f"{path}/{name}": value for name, value in found.items()}
        super().__init__(key[0], variables, attributes, left_out)

    def _add_family(
        self, survey: TreeSurvey, parent: str, groups: list[str], variables: dict[str, Variable]
    ) -> list[str]:
        """Arrays and attributes that all groups have, as arrays over the groups; returns what differs, in words."""
        left_out: list[str] = []
        prefix = f"{parent}/*" if parent else "*"
        members = [name.removeprefix(f"{groups[0]}/") for name in survey.arrays if name.startswith(f"{groups[0]}/")]
        for member in members:
            found = tuple(survey.arrays[f"{group}/{member}"] for group in groups)
            name = f"{prefix}/{member}"
            if any(array.shape != found[0].shape for array in found):
                lengths = sorted({array.shape for array in found})
                left_out.append(f"'{name}', whose shape differs between groups: {lengths[0]} and {lengths[-1]}")
                continue
            first = f"{groups[0]}/{member}"
            common = self._common(found)
            if common is not None:
                self._arrays[name] = common
                variables[name] = Variable(name, common.shape, _names(survey.dims[first]), survey.attributes[first])
                continue
            self._arrays[name] = found
            dims = ("", *_names(survey.dims[first]))
            variables[name] = Variable(name, (len(groups), *found[0].shape), dims, survey.attributes[first])
        everywhere: dict[str, list[Any]] = {}
        for group in groups:
            for key, value in survey.attributes.get(group, {}).items():
                everywhere.setdefault(key, []).append(value)
        for key, values in everywhere.items():
            if len(values) == len(groups) and all(isinstance(value, float) for value in values):
                name = f"{prefix}@{key}"
                self._arrays[name] = np.array(values, np.float64)
                variables[name] = Variable(name, (len(groups),), ("",))
            elif any(isinstance(value, float) for value in values):
                left_out.append(f"attribute '{key}', which only some of the groups '{prefix}' have as a number")
        return left_out

    def _common(self, found: tuple[ArraySurvey, ...]) -> Array | None:
        """The values of a coordinate that every group repeats; None for what differs."""
        shape = found[0].shape
        if len(shape) != 1 or shape[0] > MAX_COMMON_VALUES:
            return None
        region = (slice(0, shape[0], 1),)
        first = np.array(_region(self._key, found[0], region))
        for array in found[1:]:
            if not np.array_equal(_region(self._key, array, region), first):
                return None
        return first

    def read(self, name: str, region: Region) -> Array:
        array = self._arrays[name]
        if isinstance(array, np.ndarray):
            return np.asarray(array[region])
        if isinstance(array, ArraySurvey):
            return _region(self._key, array, region)
        chosen = array[region[0]]
        return np.stack([_region(self._key, one, region[1:]) for one in chosen])

    def close(self) -> None:
        drop_hdf5(self.path)


def open_hdf5(path: Path) -> Hdf5Container:
    """The arrays of a file. Raises DataError for one that HDF5 cannot open."""
    key, survey = survey_tree_file(path)
    drop_hdf5(key[0])
    if not survey.arrays:
        raise DataError(f"{path} has no arrays of numbers", hint="; ".join(survey.left_out[:3]))
    return Hdf5Container(key, survey)


def _region(key: FileKey, array: ArraySurvey, region: Region) -> Array:
    values = read_region(key, array, region)
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))


def _names(dims: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("" if _NAMELESS.fullmatch(name) else name for name in dims)


def _families(survey: TreeSurvey) -> dict[str, list[str]]:
    """Parent -> its groups, where it has at least two and all of them hold arrays of the same names."""
    contents: dict[str, set[str]] = {}
    for name in survey.arrays:
        for parent in _parents(name):
            contents.setdefault(parent, set()).add(name.removeprefix(f"{parent}/"))
    children: dict[str, list[str]] = {}
    for group in contents:
        children.setdefault(group.rpartition("/")[0], []).append(group)
    found: dict[str, list[str]] = {}
    for parent, groups in sorted(children.items()):
        alike = all(contents[group] == contents[groups[0]] for group in groups)
        if len(groups) > 1 and alike and not any(parent == p or parent.startswith(f"{p}/") or not p for p in found):
            found[parent] = sorted(groups, key=_natural)
    return found


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def _natural(name: str) -> list[tuple[int, int, str]]:
    """run_2 before run_10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part]
