"""A file of named arrays, whatever its format: what is in it, and regions of it. What they mean is left to others.

Owns the contract; the formats are in `container_numpy`, `container_hdf5`, `container_zarr`, arrays in memory in
`container_memory`, and `open_container` chooses. A container is picklable, opens files lazily in each process and
carries no handle over a fork.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ups.buckets.path import data_path
from ups.errors import DataError
from ups.formats.base import Array
from ups.formats.hdf5_arrays import Region

# What a file may hold in small arrays that are read whole: coordinates, times, parameters.
MAX_SMALL_VALUES = 1 << 22
IDENTITY_BLOCKS = 64
IDENTITY_BLOCK_BYTES = 4096

Attribute = float | str


@dataclass(frozen=True, slots=True)
class Variable:
    """One array of numbers. dims: the names that the file gives to its dimensions, '' where it gives none.

    column_major: the writer varies the first dimension fastest (MATLAB), so that time usually stands after space.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    column_major: bool = False

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def as_row(self) -> Variable:
        """A row (1, n) or a column (n, 1) as (n,), for files whose writer has no other vectors; others as they are."""
        if len(self.shape) != 2 or min(self.shape) != 1 or self.size == 1:
            return self
        return replace(self, shape=(self.size,), dims=(self.dims[self.shape.index(self.size)],))


class Container(ABC):
    """An opened file. left_out: what it has that is not read, in words. attributes: numbers and texts of the file.

    part: what of the file this is, in words, where one file has several (trajectories of unequal length).
    assumption: how the files of a folder are read.
    """

    def __init__(
        self,
        path: str,
        variables: Mapping[str, Variable],
        attributes: Mapping[str, Attribute],
        left_out: Sequence[str] = (),
        part: str = "",
    ) -> None:
        self.path, self.variables, self.attributes = path, dict(variables), dict(attributes)
        self.left_out, self.part, self.assumption = tuple(left_out), part, ""

    @property
    def label(self) -> str:
        """The file, and what of it, for messages."""
        return f"{self.path} {self.part}" if self.part else self.path

    def parts(self) -> list[Container]:
        """The parts of a file that holds several; else itself alone."""
        return [self]

    @abstractmethod
    def read(self, name: str, region: Region) -> Array:
        """Values of a region, one slice with plain bounds for each dimension; may be a read-only view."""

    @abstractmethod
    def close(self) -> None:
        """Release what this process has open."""

    def identity(self) -> str:
        """Hash of the size and of a sample of the bytes."""
        files = self._files()
        sizes = [file.stat().st_size for file in files]
        digest = hashlib.sha256(json.dumps(["arrays", sizes]).encode())
        blocks = max(2, IDENTITY_BLOCKS // len(files)) if files else 2
        for file, size in zip(files[:1000], sizes, strict=False):
            with file.open("rb") as stream:
                for i in range(blocks):
                    stream.seek(i * max(0, size - IDENTITY_BLOCK_BYTES) // (blocks - 1))
                    digest.update(stream.read(IDENTITY_BLOCK_BYTES))
        return digest.hexdigest()

    def _files(self) -> list[Path]:
        path = data_path(self.path)
        return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]

    def whole(self, name: str) -> Array:
        """All values of a small array as float64."""
        variable = self.variables[name]
        if variable.size > MAX_SMALL_VALUES:
            raise DataError(
                f"{self.path}: array '{name}' of shape {variable.shape} is too large for what it is used as"
            )
        return self.decoded(name, tuple(slice(0, n, 1) for n in variable.shape), np.float64)

    def number(self, name: str) -> float:
        """The value of an array that holds one."""
        return float(self.whole(name).reshape(-1)[0])

    def decoded(self, name: str, region: Region, dtype: npt.DTypeLike | None = None) -> Array:
        """Values as meant: NetCDF and Zarr store packed ones with a scale, an offset and a number for what is missing.

        dtype: default that of the file.
        """
        values, attributes = np.asarray(self.read(name, region), dtype), self.variables[name].attributes
        for key in ("_FillValue", "missing_value"):
            mark = attributes.get(key)
            if isinstance(mark, float):
                values = np.where(values == mark, np.nan, values)
        scale, offset = (attributes.get(key) for key in ("scale_factor", "add_offset"))
        scale, offset = (scale if isinstance(scale, float) else 1.0), (offset if isinstance(offset, float) else 0.0)
        if scale == 0 or not math.isfinite(scale) or not math.isfinite(offset):
            raise DataError(
                f"{self.label}: array '{name}' has scale_factor {scale:g} and add_offset {offset:g}",
                hint="its values are value * scale_factor + add_offset, with finite numbers and a scale that is not 0: "
                "write the file again with the right attributes",
            )
        return values if (scale, offset) == (1.0, 0.0) else values * scale + offset
