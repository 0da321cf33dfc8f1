"""What stands in any HDF5 or NetCDF-4 file: all arrays of numbers with their dimensions and attributes, in any group.

Runs only in the process of `hdf5_guard`, with the checks of `hdf5_survey`. Where those readers refuse a file, this one
leaves out the part and names it: a person's own file may hold a link or a text beside the data.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ups.errors import DataError
from ups.formats.hdf5_open import open_library, size_of
from ups.formats.hdf5_survey import MAX_ATTRIBUTE_VALUES, MAX_TEXT_BYTES, ArraySurvey, short_text, survey_dataset

MAX_ARRAYS = 50_000
MAX_DEPTH = 5
MAX_LEFT_OUT = 200
MAX_ATTRIBUTES = 256
_ONLY_A_DIMENSION = "This is a netCDF dimension but not a netCDF variable"
_BOOKKEEPING = frozenset(
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
        _walk(file, file, "", size_of(path), found, {_address(file)})
    return found


def _walk(file: Any, group: Any, prefix: str, size: int, found: TreeSurvey, above: set[int]) -> None:
    import h5py

    found.attributes[prefix.removesuffix("/")] = _attributes(group, prefix.removesuffix("/"), found)
    if group.id.get_num_objs() > MAX_ARRAYS:
        raise DataError(f"'{group.name}' has more than {MAX_ARRAYS} entries")
    for name in group:
        path = f"{prefix}{name}"
        if path.startswith("#"):
            continue  # where MATLAB keeps the content of its cells, which are named as left out
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            _leave_out(found, f"'{path}', a link to somewhere else")
            continue
        kind = group.get(name, getclass=True)
        if kind is h5py.Group and (address := _address(group[name])) in above:
            _leave_out(found, f"'{path}', a group that it lies in itself")
        elif kind is h5py.Group and len(above) <= MAX_DEPTH:
            _walk(file, group[name], f"{path}/", size, found, above | {address})
        elif kind is not h5py.Dataset:
            _leave_out(found, f"'{path}', which is no array or nested too deep")
        elif len(found.arrays) >= MAX_ARRAYS:
            raise DataError(f"it has more than {MAX_ARRAYS} arrays")
        else:
            _take(file, group[name], path, size, found)


def _address(group: Any) -> int:
    """What tells a group from others of the file: it may be linked from several places, even from inside."""
    import h5py

    return int(h5py.h5o.get_info(group.id).addr)


def _take(file: Any, dataset: Any, path: str, size: int, found: TreeSurvey) -> None:
    import h5py

    if short_text(dataset, "NAME").startswith(_ONLY_A_DIMENSION):
        return
    kind, of_matlab = dataset.id.get_type(), short_text(dataset, "MATLAB_class")
    if isinstance(kind, h5py.h5t.TypeReferenceID):
        _leave_out(found, f"'{path}', a cell or an array of structs of MATLAB: make one array of it, as cat(3, c{{:}})")
        return
    if not isinstance(kind, h5py.h5t.TypeFloatID | h5py.h5t.TypeIntegerID) or of_matlab == "char":
        _leave_out(found, f"'{path}', which does not hold numbers")
        return
    if "MATLAB_empty" in dataset.attrs:
        _leave_out(found, f"'{path}', which is empty")
        return
    try:
        array = survey_dataset(dataset, path, size, integers=True, scalars=True)
    except DataError as error:
        _leave_out(found, f"'{path}': {error.message}")
        return
    dims = _dims(file, dataset, path)
    if of_matlab:  # as MATLAB shows it: it writes the first dimension last
        array, dims = replace(array, shape=array.shape[::-1], column_major=True), dims[::-1]
    found.arrays[path], found.dims[path] = array, dims
    found.attributes[path] = _attributes(dataset, path, found)


def _leave_out(found: TreeSurvey, text: str) -> None:
    if len(found.left_out) < MAX_LEFT_OUT:
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


def _attributes(owner: Any, path: str, found: TreeSurvey) -> dict[str, Any]:
    """Finite numbers and short texts; other attributes are left out, and named."""
    import h5py

    values: dict[str, Any] = {}
    where = f" of '{path}'" if path else ""
    if h5py.h5a.get_num_attrs(owner.id) > MAX_ATTRIBUTES:
        _leave_out(found, f"the attributes{where}, which are more than {MAX_ATTRIBUTES}")
        return values
    for name in list(owner.attrs):
        if name in _BOOKKEEPING or name.startswith("MATLAB_"):
            continue
        handle = owner.attrs.get_id(name)
        count = math.prod(handle.shape or ())
        if handle.get_storage_size() > MAX_TEXT_BYTES or count > MAX_ATTRIBUTE_VALUES:
            _leave_out(found, f"attribute '{name[:80]}'{where}, which is large")
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
                _leave_out(found, f"attribute '{name[:80]}'{where}, which is not finite")
        elif isinstance(kind, h5py.h5t.TypeStringID) and not handle.shape:
            text = owner.attrs[name]
            text = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
            values[name] = text[:1000]
        else:
            _leave_out(found, f"attribute '{name[:80]}'{where}, which is neither a number nor a text")
    return values
