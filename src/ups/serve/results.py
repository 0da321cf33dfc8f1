"""Results of a server: replies in three formats, and the Zarr v3 store of a job that is read while the job runs.

A store has its final shape from the start. Its metadata come from memory, and frames that are not computed yet are
absent chunks, which readers take for NaN. A chunk is a file of plain little-endian numbers, renamed when it is whole.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from ups.inference.results import Layout, MemorySink, Sink
from ups.record.files import machine_errors
from ups.serve.requests import JSON, NETCDF

# A chunk of a job's store is written when it has this size, or a twentieth of the frames.
CHUNK_BYTES, CHUNKS = 2**20, 20
# Between two looks at what is stated about a running job; all of it is written again.
SECONDS_BETWEEN = 1.0
ABOUT = "about"


def encode(sink: MemorySink, media_type: str) -> bytes:
    """A result as JSON that `xarray.Dataset.from_dict` takes, as npz with its labels as JSON in `about`, or NetCDF."""
    layout = sink.layout
    if media_type == NETCDF:
        return bytes(sink.finish().to_netcdf(engine="h5netcdf"))
    arrays: dict[str, Any] = {}
    about: dict[str, Any] = {"attrs": plain(layout.attributes | sink.divergence.attributes())}
    about |= {"coords": {}, "data_vars": {}}
    for name, (dims, values, attributes) in layout.variables(sink.divergence, layout.split(sink.buffer)).items():
        array = np.asarray(values)
        arrays[name] = array.astype(str) if array.dtype.kind == "O" else array
        label = {"dims": list(dims), "attrs": plain(attributes)} | (
            {"data": plain(array)} if media_type == JSON else {}
        )
        about["coords" if name in layout.coordinates else "data_vars"][name] = label
    if media_type == JSON:
        return json.dumps(about, allow_nan=False).encode()
    return write_npz(arrays | {ABOUT: np.array(json.dumps(about))})


def plain(value: Any) -> Any:
    """A value as JSON has it: arrays as lists, and null for what is not finite."""
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind == "f":
            value = np.asarray(value)
            if not np.isfinite(value).all():
                holed = value.astype(object)
                holed[~np.isfinite(value)] = None
                return holed.tolist()
        return value.tolist()
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None


def write_npz(arrays: dict[str, Any]) -> bytes:
    """An npz file without compression."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)
    return stream.getvalue()


class StoreSink(Sink):
    """The store of a job in a new directory. Attributes of the store: those of the result, `frames_done`, `status`."""

    def __init__(self, layout: Layout, path: Path) -> None:
        frames = max(1, layout.num_frames)
        frame_bytes = max(1, layout.num_bytes // frames)
        super().__init__(layout, max(1, min(CHUNK_BYTES // frame_bytes, -(-frames // CHUNKS))))
        self.path, self.status = path, "running"
        self._last = 0.0
        with machine_errors(f"cannot write the job's store {path}"):
            path.mkdir()
        variables = layout.variables(self.divergence, {})
        self.arrays: dict[str, dict[str, Any]] = {}
        for field in layout.fields:
            shape, dims = layout.shape(field, layout.num_frames), layout.dims(field)
            chunks = [self.buffer.shape[1] if dim == "time" else size for dim, size in zip(dims, shape, strict=True)]
            self.arrays[field.name] = _document(np.dtype("<f4"), shape, chunks, dims, layout.labels[field.name])
        for name, (dims, values, attributes) in variables.items():
            array = np.asarray(values)
            self.arrays[name] = _document(array.dtype, array.shape, array.shape, dims, attributes)
        self._write_rest(variables)

    def document(self, key: str) -> dict[str, Any] | None:
        """The metadata of the store ('') or of an array in it."""
        if key:
            return self.arrays.get(key)
        attributes: dict[str, Any] = self.layout.attributes | self.divergence.attributes()
        attributes = attributes | {"frames_done": self.written, "status": self.status}
        consolidated: dict[str, Any] = {"kind": "inline", "must_understand": False, "metadata": self.arrays}
        group: dict[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": plain(attributes)}
        return group | {"consolidated_metadata": consolidated}

    def file(self, key: str) -> Path | None:
        """The file of a chunk, 'u/c/0/3'; None for a key of no array here. The file may not be there yet."""
        name, _, chunk = key.partition("/")
        if name not in self.arrays or not re.fullmatch(r"c(/\d{1,9}){0,9}", chunk, re.ASCII):
            return None
        return self.path / f"{name}.{chunk.replace('/', '.')}"

    def flush(self) -> None:
        if not self.buffered:
            return
        layout, steady = self.layout, self.layout.task.steady
        chunk = self.written // self.buffer.shape[1]
        self.buffer[:, self.buffered :] = np.nan  # chunks at the end are whole, too
        for name, values in layout.split(self.buffer).items():
            dims = self.arrays[name]["dimension_names"]
            position = ".".join(str(chunk if dim == "time" and not steady else 0) for dim in dims)
            self._write(f"{name}.c.{position}", np.ascontiguousarray(values, "<f4").tobytes())
        self.written += self.buffered
        self.buffered = 0
        if time.monotonic() - self._last > SECONDS_BETWEEN:
            self._write_rest(layout.variables(self.divergence, {}))

    def finish(self) -> None:
        self.flush()
        self._write_rest(self.layout.variables(self.divergence, {}))

    def abandon(self) -> None:
        """What was computed stays readable, until the job is removed."""

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def _write_rest(self, variables: dict[str, tuple[tuple[str, ...], Any, dict[str, Any]]]) -> None:
        """Everything but the fields. Numbers of frames to come are NaN, where they can be."""
        self._last = time.monotonic()
        for name, (dims, values, _) in variables.items():
            array = np.asarray(values)
            if array.dtype.kind == "f" and "time" in dims and name not in self.layout.coordinates:
                array = array.copy()
                array[(slice(None),) * dims.index("time") + (slice(self.written, None),)] = np.nan
            self._write(".".join([name, "c", *"0" * array.ndim]), _bytes(array))

    def _write(self, name: str, content: bytes) -> None:
        with machine_errors(f"cannot write the job's store {self.path}"):
            temporary = self.path / f"{name}.partial"
            temporary.write_bytes(content)
            os.rename(temporary, self.path / name)


def _document(dtype: Any, shape: Any, chunks: Any, dims: Any, attributes: dict[str, Any]) -> dict[str, Any]:
    is_text = dtype.kind == "O"
    codec = {"name": "vlen-utf8"} if is_text else {"name": "bytes", "configuration": {"endian": "little"}}
    empty: Any = {"f": "NaN", "b": False, "O": ""}.get(dtype.kind, 0)
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": "string" if is_text else dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunks)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": empty,
        "codecs": [codec],
        "attributes": plain(attributes),
        "dimension_names": list(dims),
    }


def _bytes(array: Any) -> bytes:
    if array.dtype.kind != "O":
        return bytes(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
    texts = [str(text).encode() for text in array.flat]
    return b"".join([len(texts).to_bytes(4, "little"), *(len(t).to_bytes(4, "little") + t for t in texts)])
