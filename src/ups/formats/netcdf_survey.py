"""What stands in a NetCDF-4 file: the checks of `hdf5_survey` for the variables of its root group. Runs only in the
process of `hdf5_guard`.

NetCDF-4 is HDF5 with conventions: a dimension is a dataset that other datasets refer to. A dimension without a
coordinate variable is such a dataset with a fixed text in its attribute NAME, and nothing stored behind it. Variables
that are no numbers (texts, enumerations) and groups below the root are left out, and named.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ups.errors import DataError
from ups.formats.hdf5_open import open_library, size_of
from ups.formats.hdf5_survey import (
    ELSEWHERE_HINT,
    MAX_DIMS,
    MAX_GROUP_ENTRIES,
    ArraySurvey,
    attributes_of,
    check_kind,
    check_link,
    entries_of,
    short_text,
    survey_dataset,
)

# A rollout starts from a few frames; the whole input is held in memory.
MAX_INPUT_BYTES = 4 << 30
_ONLY_A_DIMENSION = "This is a netCDF dimension but not a netCDF variable"
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
