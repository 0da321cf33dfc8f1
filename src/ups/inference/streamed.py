"""Frames of a rollout written to a file as they come: memory holds one chunk, whatever the number of steps.

Written under a temporary name and renamed at the end, so that a result of that name is always whole. Zarr stores have
consolidated metadata, so that they open with one request over a network.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from ups.errors import BundleError
from ups.inference.layout import Divergence, Frame, Layout
from ups.record.files import machine_error, temporary_name
from ups.record.manifest import make_temporary
from ups.spec.task import FieldSpec

# Frames are buffered up to this size before they are written as one chunk.
CHUNK_BYTES = 8 * 2**20
NETCDF_SUFFIXES = (".nc", ".nc4", ".cdf")


def open_streamed(layout: Layout, path: Path) -> StreamedSink:
    """A sink that writes the new file `path`: NetCDF by its name, else a Zarr store."""
    if path.exists():
        raise BundleError(f"'{path}' exists already", hint="choose another name, or remove it first")
    if not path.parent.is_dir():
        raise BundleError(f"there is no directory '{path.parent}' to write '{path.name}' into")
    return NetcdfSink(layout, path) if path.suffix in NETCDF_SUFFIXES else ZarrSink(layout, path)


class StreamedSink(ABC):
    """Buffers frames to chunks and writes these. Formats say how a variable is made and how a file is closed."""

    def __init__(self, layout: Layout, path: Path) -> None:
        self.layout, self.path = layout, path
        frame_bytes = max(1, layout.num_bytes // layout.num_frames)
        self.chunk = max(1, min(layout.num_frames, CHUNK_BYTES // frame_bytes))
        self.open()
        self.arrays = {field.name: self.create(field) for field in layout.fields}
        for name, values in layout.coordinates.items():
            self.small(name, (name,), np.asarray(values), layout.labels[name])
        for name, (labels, values) in layout.parameters.items():
            dims = ("sample",) if layout.batched else ()
            self.small(name, dims, values if layout.batched else values[0], labels)
        channels = sum(layout.components(field) for field in layout.fields)
        self.buffer = np.empty((layout.num_rows, self.chunk, channels, *layout.space), np.float32)
        self.buffered = self.written = 0
        self.divergence = Divergence(layout)

    @abstractmethod
    def open(self) -> None:
        """Begin under a temporary name."""

    @abstractmethod
    def create(self, field: FieldSpec) -> Any:
        """The variable of a field, which takes values by slices."""

    @abstractmethod
    def small(self, name: str, dims: tuple[str, ...], values: Any, attributes: dict[str, Any]) -> None:
        """Write a variable as a whole."""

    @abstractmethod
    def close(self, attributes: dict[str, Any]) -> Any:
        """Finish the file with some more attributes, give it its name, and open it as an xarray.Dataset."""

    def add(self, frame: Frame) -> None:
        self.buffer[:, self.buffered] = frame
        self.buffered += 1
        if self.buffered == self.chunk:
            self._flush()

    def _flush(self) -> None:
        layout, count = self.layout, self.buffered
        if not count:
            return
        place = slice(self.written, self.written + count)
        for name, part in layout.split(self.buffer[:, :count]).items():
            field = next(f for f in layout.fields if f.name == name)
            index = (slice(None),) * len(layout.lead)
            self.arrays[name][(*index, place) if not layout.task.steady else index or ...] = layout.squeeze(field, part)
        self.written += count
        self.buffered = 0

    def finish(self) -> Any:
        self._flush()
        for name, (dims, values, attributes) in self.layout.per_sample(self.divergence).items():
            self.small(name, dims, values, attributes)
        return self.close(self.divergence.attributes())

    @abstractmethod
    def abandon(self) -> None:
        """Remove what was written, of a rollout that does not come to its end."""

    def check_free(self) -> None:
        """Raises BundleError if somebody else has taken the name meanwhile."""
        if self.path.exists():
            raise BundleError(f"'{self.path}' appeared while the rollout ran, and is not replaced")


class ZarrSink(StreamedSink):
    """A Zarr v3 store."""

    def open(self) -> None:
        import zarr

        self.temporary = make_temporary(self.path)
        self.group = zarr.open_group(self.temporary, mode="w", attributes=dict(self.layout.attributes))

    def create(self, field: FieldSpec) -> Any:
        return self.group.create_array(
            field.name,
            shape=self.layout.shape(field, self.layout.num_frames),
            chunks=self.layout.shape(field, self.chunk),
            dtype=np.float32,
            fill_value=np.nan,
            dimension_names=self.layout.dims(field),
            attributes=self.layout.labels[field.name],
        )

    def small(self, name: str, dims: tuple[str, ...], values: Any, attributes: dict[str, Any]) -> None:
        data = np.asarray(values)
        dtype: Any = str if data.dtype == object else data.dtype
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that texts are young in this format; every reader of it has them
            array = self.group.create_array(
                name, shape=data.shape, dtype=dtype, dimension_names=dims, attributes=attributes
            )
            array[...] = data

    def close(self, attributes: dict[str, Any]) -> Any:
        import xarray
        import zarr

        self.group.attrs.update(attributes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not in the specification yet; who does not know it, ignores it
            zarr.consolidate_metadata(self.group.store)
        self.check_free()
        os.rename(self.temporary, self.path)
        return xarray.open_zarr(self.path, chunks=None, consolidated=True)

    def abandon(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)


class NetcdfSink(StreamedSink):
    """A NetCDF 4 file."""

    def open(self) -> None:
        import h5netcdf

        layout = self.layout
        self.temporary = temporary_name(self.path)
        try:
            self.file = h5netcdf.File(self.temporary, "w")
        except OSError as error:
            raise machine_error(f"cannot write {self.path}", error) from error
        sizes = {name: len(values) for name, values in layout.coordinates.items()}
        for field in layout.fields:
            sizes |= dict(zip(layout.dims(field), layout.shape(field, layout.num_frames), strict=True))
        self.file.dimensions = sizes
        for name, value in layout.attributes.items():
            self.file.attrs[name] = value

    def create(self, field: FieldSpec) -> Any:
        dims = self.layout.dims(field)
        chunks = self.layout.shape(field, self.chunk)
        variable = self.file.create_variable(field.name, dims, np.float32, chunks=chunks, fillvalue=np.float32(np.nan))
        return self._labeled(variable, self.layout.labels[field.name])

    def small(self, name: str, dims: tuple[str, ...], values: Any, attributes: dict[str, Any]) -> None:
        import h5py

        data = np.asarray(values)
        for dim, size in zip(dims, data.shape, strict=True):
            if dim not in self.file.dimensions:
                self.file.dimensions[dim] = size
        if data.dtype == object:
            kind: Any = h5py.string_dtype()
        elif data.dtype == bool:  # which NetCDF lacks; xarray knows it again by this attribute
            kind, data = np.dtype(np.int8), data.astype(np.int8)
            attributes = {**attributes, "dtype": "bool"}
        else:
            kind = data.dtype
        self._labeled(self.file.create_variable(name, dims, kind, data=data), attributes)

    def _labeled(self, variable: Any, attributes: dict[str, Any]) -> Any:
        for name, value in attributes.items():
            variable.attrs[name] = value
        return variable

    def close(self, attributes: dict[str, Any]) -> Any:
        import xarray

        for name, value in attributes.items():
            self.file.attrs[name] = value
        self.file.close()
        self.check_free()
        os.rename(self.temporary, self.path)
        return xarray.open_dataset(self.path, engine="h5netcdf")

    def abandon(self) -> None:
        with contextlib.suppress(Exception):  # a file that cannot be closed is removed all the same
            self.file.close()
        self.temporary.unlink(missing_ok=True)
