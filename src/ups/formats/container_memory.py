"""Arrays of a running program as a container: a mapping of names to arrays, or an xarray.Dataset (read lazily)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ups.errors import DataError
from ups.formats.base import Array
from ups.formats.container import Attribute, Container, Variable
from ups.formats.hdf5_arrays import Region


class MemoryContainer(Container):
    """Arrays by name; of an xarray.Dataset its variables and coordinates."""

    def __init__(self, arrays: Any) -> None:
        self._arrays: dict[str, Any] = {}
        variables: dict[str, Variable] = {}
        left_out: list[str] = []
        dataset = hasattr(arrays, "data_vars")
        for key, value in (arrays.variables if dataset else arrays).items():
            name = str(key)
            array = value if dataset else np.asarray(value)
            attributes = _numbers_and_texts(value.attrs, left_out, name) if dataset else {}
            if np.dtype(array.dtype).kind in "mM" and array.size:
                # As xarray decodes them: dates become seconds since the first, durations seconds.
                array = np.asarray(array)
                since = array.reshape(-1)[0] if array.dtype.kind == "M" else np.timedelta64(0, "s")
                array = (array - since) / np.timedelta64(1, "s")
                attributes["units"] = "s"
            if np.dtype(array.dtype).kind not in "fiu":
                left_out.append(f"'{name}', which does not hold numbers ({array.dtype})")
                continue
            dims = tuple(str(d) for d in value.dims) if dataset else ("",) * array.ndim
            self._arrays[name] = array
            variables[name] = Variable(name, tuple(int(n) for n in array.shape), dims, attributes)
        if not variables:
            raise DataError("no array of numbers was given", hint="give {'u': array, 'x': coordinates, ...}")
        facts = _numbers_and_texts(arrays.attrs, left_out, "") if dataset else {}
        super().__init__("the given arrays", variables, facts, left_out)

    def read(self, name: str, region: Region) -> Array:
        part = self._arrays[name][region]
        return np.asarray(getattr(part, "values", part))

    def close(self) -> None:
        """Nothing is open."""

    def identity(self) -> str:
        shapes = [(name, variable.shape) for name, variable in sorted(self.variables.items())]
        digest = hashlib.sha256(repr(shapes).encode())
        for name, variable in sorted(self.variables.items()):
            region = tuple(slice(0, max(1, min(n, 16)), 1) for n in variable.shape)
            digest.update(np.ascontiguousarray(self.read(name, region), np.float64).tobytes())
        return digest.hexdigest()


def _numbers_and_texts(found: Mapping[Any, Any], left_out: list[str], owner: str) -> dict[str, Attribute]:
    values: dict[str, Attribute] = {}
    for key, value in found.items():
        numbers = np.asarray(value).reshape(-1) if not isinstance(value, str) else None
        if isinstance(value, str):
            values[str(key)] = value[:1000]
        elif numbers is not None and numbers.dtype.kind in "fiu" and 0 < numbers.size <= 64:
            names = [str(key)] if numbers.size == 1 else [f"{key}[{i}]" for i in range(numbers.size)]
            values |= {n: float(v) for n, v in zip(names, numbers, strict=True) if np.isfinite(v)}
        else:
            left_out.append(f"attribute '{key}'" + (f" of '{owner}'" if owner else ""))
    return values
