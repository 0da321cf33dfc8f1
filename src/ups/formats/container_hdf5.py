"""HDF5 and NetCDF-4 files as named arrays, behind the guard. Groups of equal content are one array with one more
dimension: a file with a group for each trajectory has `*/u` of shape (groups, ...), and `*@nu`, `*/u@nu` of shape
(groups,) for numbers among the attributes of the groups, and for those of their arrays that differ. Where groups are of
unequal length, each is a part of the file with arrays of shape (1, ...) under the same names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ups.errors import DataError
from ups.formats.base import Array
from ups.formats.container import Attribute, Container, Variable, ambiguous, find_families, listed, parents
from ups.formats.hdf5 import ArraySurvey, FileKey, FileSurvey, Region, Values, drop_hdf5, read_region, survey_all

MAX_COMMON_VALUES = 1 << 16
# Attributes that say what the numbers of an array mean: it cannot be read as one where they differ.
_MEANING = frozenset({"scale_factor", "add_offset", "_FillValue", "missing_value", "units"})
# How xarray and netCDF call a dimension that has no name.
_NAMELESS = re.compile(r"phony_dim_\d+|dim_\d+")


# An array of the file, the arrays of its groups, or values.
_Source = ArraySurvey | tuple[ArraySurvey, ...] | Array


@dataclass(frozen=True, slots=True)
class _Unequal:
    """An array whose shape differs between groups. why: the words that say so."""

    prefix: str
    arrays: tuple[ArraySurvey, ...]
    dims: tuple[str, ...]
    attributes: dict[str, Attribute]
    why: str


class Hdf5Arrays(Container):
    """Arrays of one file, or of one group of it."""

    def __init__(
        self,
        key: FileKey,
        arrays: dict[str, _Source],
        variables: dict[str, Variable],
        attributes: dict[str, Attribute],
        left_out: Sequence[str],
        part: str = "",
    ) -> None:
        super().__init__(key[0], variables, attributes, left_out, part)
        self._key, self._arrays = key, arrays

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


class Hdf5Container(Hdf5Arrays):
    """All arrays of one file."""

    def __init__(self, survey: FileSurvey) -> None:
        unread = list(survey.left_out)
        attributes = {path: _single(path, values, unread) for path, values in survey.attributes.items()}
        super().__init__(survey.key, {}, {}, attributes.get("", {}), unread)
        self._unequal: dict[str, _Unequal] = {}
        self._by_group: dict[str, str] = {}  # array whose first dimension is over groups -> which groups
        self._groups: dict[str, list[str]] = {}
        families = find_families(survey.arrays)
        inside = {member for members in families.values() for member in members}
        for name, array in survey.arrays.items():
            if inside.isdisjoint(parents(name)):
                dims = _names(survey.dims[name])
                self._arrays[name] = array
                self.variables[name] = Variable(name, array.shape, dims, attributes[name], array.column_major)
        for path, own in attributes.items():
            if path and path not in survey.arrays and inside.isdisjoint((path, *parents(path))):
                self.attributes |= {f"{path}/{name}": value for name, value in own.items()}
        content: dict[str, list[str]] = {group: [] for group in inside}
        for path in attributes:
            for group in inside.intersection((path, *parents(path))):
                content[group].append(path.removeprefix(group))
        for parent, groups in families.items():
            prefix = f"{parent}/*" if parent else "*"
            self._groups[prefix] = groups
            members = [member for member in content[groups[0]] if f"{groups[0]}{member}" in survey.arrays]
            for member in members:
                self._add_array(survey, attributes, prefix, groups, member)
            for owner in dict.fromkeys(path for group in groups for path in content[group]):
                if owner not in members:
                    own_of_groups = [attributes.get(f"{group}{owner}", {}) for group in groups]
                    self._add_attributes(prefix, f"{prefix}{owner}", own_of_groups)
        for names in ambiguous({name: len(variable.shape) for name, variable in self.variables.items()}):
            for name in names:
                del self.variables[name], self._arrays[name]
            self.left_out.append(
                f"{listed(names)}: whether groups that hold an array of the same name are trajectories, fields or "
                "splits is not known (groups of trajectories have names that differ by a number, and the same arrays)"
            )

    def parts(self) -> list[Container]:
        """A part for each group, where the largest array of the file is one whose length differs between them."""
        fields = [u for u in self._unequal.values() if len(u.arrays[0].shape) > 1]
        size = max((sum(int(np.prod(a.shape)) for a in u.arrays) for u in fields), default=0)
        if len({u.prefix for u in fields}) != 1 or any(v.size > size for v in self.variables.values()):
            return [self]
        prefix = fields[0].prefix
        groups = self._groups[prefix]
        reasons = {u.why for u in self._unequal.values() if u.prefix == prefix}
        left_out = [text for text in self.left_out if text not in reasons]
        # A row of the file with a number for each group, if it is not as long as something else.
        lengths = {n for u in fields for array in u.arrays for n in array.shape}
        rows = {
            name: self.whole(name)
            for name, v in self.variables.items()
            if v.shape == (len(groups),) and name not in self._by_group and len(groups) not in lengths
        }
        return [self._part(number, prefix, rows, left_out) for number in range(len(groups))]

    def _part(self, number: int, prefix: str, rows: dict[str, Array], left_out: list[str]) -> Hdf5Arrays:
        arrays: dict[str, _Source] = {}
        variables: dict[str, Variable] = {}
        for name, variable in self.variables.items():
            array = rows.get(name, self._arrays[name])
            if name in rows or self._by_group.get(name) == prefix:
                assert not isinstance(array, ArraySurvey)
                array = array[number : number + 1]
                variable = replace(variable, shape=(1, *variable.shape[1:]))
            arrays[name], variables[name] = array, variable
        for name, unequal in self._unequal.items():
            if unequal.prefix != prefix:
                continue
            one, dims = unequal.arrays[number], unequal.dims
            row = len(one.shape) == 1  # such as the times of the group
            arrays[name] = one if row else (one,)
            shape = one.shape if row else (1, *one.shape)
            variables[name] = Variable(name, shape, dims if row else ("", *dims), unequal.attributes)
        part = f"group {self._groups[prefix][number]}"
        return Hdf5Arrays(self._key, arrays, variables, self.attributes, left_out, part)

    def _add_array(
        self,
        survey: FileSurvey,
        attributes: dict[str, dict[str, Attribute]],
        prefix: str,
        groups: list[str],
        member: str,
    ) -> None:
        """An array that each group has as an array over groups; what differs is left out."""
        arrays = tuple(survey.arrays[f"{group}{member}"] for group in groups)
        name, shape = f"{prefix}{member}", arrays[0].shape
        dims = _names(survey.dims[f"{groups[0]}{member}"])
        equal, differing = _over_groups([attributes[f"{group}{member}"] for group in groups])
        decisive = sorted(_MEANING.intersection(differing))
        if decisive:
            self.left_out.append(f"'{name}', whose attribute '{decisive[0]}' differs between groups")
            return
        if any(array.shape != shape for array in arrays):
            shapes = sorted({array.shape for array in arrays})
            why = f"'{name}', whose shape differs between groups: {shapes[0]} and {shapes[-1]}"
            self.left_out.append(why)
            if len({len(array.shape) for array in arrays}) == 1 and shape:
                self._unequal[name] = _Unequal(prefix, arrays, dims, equal, why)
                self._add_differing(prefix, name, differing)
            return
        common = self._common(arrays)
        if common is None:
            shape, dims = (len(groups), *shape), ("", *dims)
            self._by_group[name] = prefix
        self._arrays[name] = arrays if common is None else common
        self.variables[name] = Variable(name, shape, dims, equal)
        self._add_differing(prefix, name, differing)

    def _add_attributes(self, prefix: str, name: str, of_groups: list[dict[str, Attribute]]) -> None:
        """Numbers among the attributes of the groups, or of a group in each of them, as arrays over them."""
        equal, differing = _over_groups(of_groups)
        for key, value in equal.items():
            if isinstance(value, float):
                differing[key] = [value] * len(of_groups)  # a number of each trajectory, though it is the same
            else:
                self.attributes[f"{name}@{key}"] = value
        self._add_differing(prefix, name, differing)

    def _add_differing(self, prefix: str, owner: str, differing: dict[str, list[Attribute | None]]) -> None:
        """Numbers of each group as an array over the groups; the others are left out."""
        for key, values in differing.items():
            name = f"{owner}@{key}"
            numbers = sum(isinstance(value, float) for value in values)
            if numbers == len(values):
                self._arrays[name] = np.array(values, np.float64)
                self.variables[name] = Variable(name, (len(values),), ("",))
                self._by_group[name] = prefix
            elif numbers:
                self.left_out.append(f"attribute '{key}', which only some of the groups '{owner}' have as a number")
            else:
                self.left_out.append(f"attribute '{key}' of '{owner}', a text that differs between groups")

    def _common(self, arrays: tuple[ArraySurvey, ...]) -> Array | None:
        """The values of a coordinate that every group repeats; None for what differs."""
        shape = arrays[0].shape
        if len(shape) != 1 or shape[0] > MAX_COMMON_VALUES:
            return None
        region = (slice(0, shape[0], 1),)
        first = np.array(_region(self._key, arrays[0], region))
        same = all(np.array_equal(_region(self._key, array, region), first) for array in arrays[1:])
        return first if same else None


def open_hdf5(path: Path) -> Hdf5Container:
    """The arrays of a file. Raises DataError for one that HDF5 cannot open."""
    container = Hdf5Container(*survey_all([path], "tree"))
    if not container.variables and len(container.parts()) == 1:
        reasons = "; ".join(container.left_out[:3])
        raise DataError(f"{path} has no arrays of numbers that can be read" + (f": {reasons}" if reasons else ""))
    return container


def _region(key: FileKey, array: ArraySurvey, region: Region) -> Array:
    values = read_region(key, array, region)
    return values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("="))


def _names(dims: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("" if _NAMELESS.fullmatch(name) else name for name in dims)


def _single(path: str, attributes: dict[str, Values], left_out: list[str]) -> dict[str, Attribute]:
    """Attributes by name; of several numbers each by its index, so that a description can point at it."""
    values: dict[str, Attribute] = {}
    for name, items in attributes.items():
        if len(items) == 1:
            values[name] = items[0]
        elif any(isinstance(item, str) for item in items):
            left_out.append(f"attribute '{name}' of '{path or '/'}', a list of texts")
        else:
            values |= {f"{name}[{i}]": v for i, v in enumerate(items) if isinstance(v, float) and math.isfinite(v)}
    return values


def _over_groups(
    of_groups: list[dict[str, Attribute]],
) -> tuple[dict[str, Attribute], dict[str, list[Attribute | None]]]:
    """(attributes that are equal in all groups, the others with their value in each group: None where it lacks)."""
    keys = {key: None for attributes in of_groups for key in attributes}
    values = {key: [attributes.get(key) for attributes in of_groups] for key in keys}
    equal: dict[str, Attribute] = {}
    for key in keys:
        first = values[key][0]
        if first is not None and all(value == first for value in values[key]):
            equal[key] = first
            del values[key]
    return equal, values
