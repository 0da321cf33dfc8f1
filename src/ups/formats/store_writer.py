"""Writes a store (docs/store-format.md): trajectories are appended one by one, files are filled in order.

Memory does not grow with the store: one trajectory at a time, and the index of the shard being written. Everything
goes to a temporary directory and is committed at the end (`ups.record.manifest`), so a store that can be opened is
complete; a writer that dies leaves the old store, if there was one, as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

import ups
from ups.errors import DataError
from ups.formats.base import FLOAT32_HINT, SPLITS
from ups.formats.shards import MAX_CHUNK_BYTES, ArrayLayout, array_json, encode_index, group_json
from ups.formats.zarr_store import DIFFERING, DIFFERING_VERSION, FORMAT, VERSION
from ups.record.files import machine_errors
from ups.record.manifest import Manifest, check_replaceable, commit_directory, make_temporary
from ups.spec.task import Role, TaskSpec

TARGET_SHARD_BYTES = 256 << 20
TARGET_CHUNK_BYTES = 32 << 20
MAX_SHARD_ROWS = 1 << 14
PARAMETER_ROWS = 4096
_MISSING = 2**64 - 1

FrameSource = Callable[[int, int], npt.NDArray[np.float32]]


class StoreWriter:
    """Appends trajectories to a new store and commits it.

        with StoreWriter(path, task, coordinates, num_frames) as writer:
            writer.append("train", state=..., parameters=...)

    coordinates: one increasing (n,) array per axis. num_frames: frames of every trajectory, or of the longest one (see
    `append`); 0 for a steady task.
    times (T,): default 0, dt, 2 dt, ... generator: JSON-able facts about where the data comes from.
    compression: None (fast: mapped by the reader) or "zstd" (small). An exception inside the block discards everything.
    manifest: the hashes of what was committed, from then on.
    """

    def __init__(
        self,
        path: str | Path,
        task: TaskSpec,
        coordinates: Sequence[npt.ArrayLike],
        num_frames: int,
        *,
        times: npt.ArrayLike | None = None,
        generator: Mapping[str, Any] | None = None,
        compression: str | None = None,
        overwrite: bool = False,
    ) -> None:
        if compression not in (None, "zstd"):
            raise DataError(f"compression must be none or zstd, not {compression!r}")
        self.path = Path(path).absolute()
        if self.path.exists() and not overwrite:
            raise DataError(
                f"{self.path} exists already",
                hint="choose another name, or allow it to be replaced",
                command_hint="choose another name, or replace it with --overwrite",
            )
        check_replaceable(self.path)
        self.task, self.num_frames = task, num_frames
        self._coordinates = tuple(np.asarray(c, np.float64) for c in coordinates)
        self._times = np.asarray(np.arange(num_frames) * task.dt if times is None else times, np.float64)
        self.space = tuple(len(c) for c in self._coordinates)
        self._check_grid()
        self._generator = dict(generator or {})
        self.compression = compression
        self._temporary = make_temporary(self.path)
        self._splits: dict[str, _SplitWriter] = {}
        # Of finished files, taken while they were written: (SHA-256, size) by name.
        self.hashes: dict[str, tuple[str, int]] = {}

    def append(
        self,
        split: str,
        *,
        state: npt.ArrayLike | FrameSource | None = None,
        static: npt.ArrayLike | None = None,
        target: npt.ArrayLike | None = None,
        parameters: npt.ArrayLike = (),
        frames: int | None = None,
        dt: float | None = None,
    ) -> None:
        """Add one trajectory: state (T, C, *S), static (C, *S), target (C, *S), parameters (P,); stored as float32.

        A trajectory too large for memory is given as a function: state(first, stop) -> frames (stop - first, C, *S).
        frames: T, if it is fewer than those of the longest. dt: the time between two frames, if it is not the task's.
        """
        if split not in SPLITS:
            raise DataError(f"splits are {', '.join(SPLITS)}, not '{split}'")
        length, step = self._checked_time(frames, dt)
        fields: dict[Role, npt.ArrayLike | FrameSource | None] = {"state": state, "static": static, "target": target}
        arrays: dict[str, FrameSource] = {}
        for role, values in fields.items():
            channels, what = self.task.num_channels(role), f"{role} of '{self.task.name}'"
            frame_shape = (channels, *self.space)
            if channels and callable(values):
                source = _checked_source(values, frame_shape, what)
                arrays[role] = _filled(source, length, frame_shape) if role == "state" else source
            elif channels:
                count = length if role == "state" else 1
                whole = _checked(values if role == "state" else [values], (count, *frame_shape), what)
                arrays[role] = _filled(_slices_of(whole), count, frame_shape)
            elif values is not None and np.size(values):  # type: ignore[arg-type]
                raise DataError(f"task '{self.task.name}' has no {role} fields, but {role} values are given")
        if self.task.parameters or np.size(parameters):
            row = _checked([parameters], (1, len(self.task.parameters)), f"parameters of '{self.task.name}'")
            arrays["parameters"] = _slices_of(row)
        writer = self._splits.get(split)
        if writer is None:
            writer = self._splits[split] = _SplitWriter(self, split, arrays)
        with machine_errors(f"cannot write the store {self.path}"):
            writer.append(arrays)
            writer.frames.append(length)
            writer.steps.append(step)

    def assume(self, text: str) -> None:
        """Add a sentence to what the store says about its data."""
        self._generator["assumptions"] = [text, *self._generator.get("assumptions", ())]

    def _checked_time(self, frames: int | None, dt: float | None) -> tuple[int, float]:
        """Frames and time step of a trajectory."""
        name = self.task.name
        if self.task.steady and (frames is not None or dt is not None):
            raise DataError(f"steady task '{name}' has neither frames nor a time step")
        if frames is not None and not 1 <= frames <= self.num_frames:
            raise DataError(f"a trajectory of task '{name}' has 1 to {self.num_frames} frames, not {frames}")
        if dt is not None and not (math.isfinite(dt) and dt > 0):
            raise DataError(f"the time step of a trajectory of task '{name}' must be above 0, not {dt!r}")
        return self.num_frames if frames is None else int(frames), self.task.dt if dt is None else float(dt)

    def commit(self) -> Manifest:
        """Finish the files and publish the store under its name in one instant."""
        if not self._splits:
            raise DataError(f"store {self.path} would be empty: no trajectory was appended")
        splits = self._splits.values()
        differs = {
            "frames": any(n != self.num_frames for s in splits for n in s.frames),
            "dt": any(step != self.task.dt for s in splits for step in s.steps),
        }
        differing = [what for what, true in differs.items() if true]
        attributes = {
            "format": FORMAT,
            "version": DIFFERING_VERSION if differing else VERSION,
            "task": self.task.to_json(),
            "num_frames": self.num_frames,
            "splits": {s: self._splits[s].count if s in self._splits else 0 for s in SPLITS},
            "generator": {"ups_version": ups.__version__, **self._generator},
        }
        if differing:
            attributes["differing"] = differing
        with machine_errors(f"cannot write the store {self.path}"):
            for split, writer in self._splits.items():
                writer.finish()
                self.write_json(split, group_json({}))
                for axis, values in zip(self.task.axes, self._coordinates, strict=True):
                    self._write_vector(f"{split}/{axis.name}", axis.name, values)
                if not self.task.steady:
                    self._write_vector(f"{split}/time", "time", self._times)
                for what in differing:
                    values = np.array(writer.frames if what == "frames" else writer.steps, np.float64)
                    self._write_vector(f"{split}/{DIFFERING[what]}", "trajectory", values)
            self.write_json("", group_json({"ups": attributes}))
        self.manifest = commit_directory(self._temporary, self.path, known_hashes=self.hashes)
        return self.manifest

    def abort(self) -> None:
        """Throw away what was written; a store of that name stays as it was."""
        for writer in self._splits.values():
            writer.close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self.commit()
            except BaseException:
                self.abort()
                raise
        else:
            self.abort()

    def open_file(self, name: str) -> IO[bytes]:
        """A new file of the store, to be written once."""
        path = self._temporary / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("xb")

    def write_json(self, folder: str, data: Mapping[str, Any]) -> None:
        """`zarr.json` of a group or array."""
        target = self._temporary / folder
        target.mkdir(parents=True, exist_ok=True)
        (target / "zarr.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")

    def _write_vector(self, name: str, dimension: str, values: npt.NDArray[np.float64]) -> None:
        layout = ArrayLayout(name, values.shape, "<f8", values.shape, values.shape, False, None, (dimension,))
        self.write_json(name, array_json(layout))
        with self.open_file(f"{name}/c/0") as file:
            file.write(np.ascontiguousarray(values, "<f8").tobytes())

    def _check_grid(self) -> None:
        task = self.task
        if len(self._coordinates) != len(task.axes):
            raise DataError(f"task '{task.name}' has {len(task.axes)} axes, but {len(self._coordinates)} coordinates")
        if (self.num_frames != 0) if task.steady else (self.num_frames < 1):
            raise DataError(f"task '{task.name}' cannot have {self.num_frames} frames")
        if self._times.shape != (self.num_frames,):
            raise DataError(f"task '{task.name}': {self.num_frames} frames, but {self._times.size} times")
        reserved = {"state", "static", "target", "parameters", "time", *DIFFERING.values()}
        named = [(a.name, c) for a, c in zip(task.axes, self._coordinates, strict=True)]
        for name, values in [*named, ("time", self._times)]:
            fits = values.ndim == 1 and len(values) >= (0 if name == "time" else 2)
            if not fits or not np.isfinite(values).all() or (np.diff(values) <= 0).any():
                raise DataError(f"coordinate '{name}' of task '{task.name}' must be finite and increasing")
        if reserved & {a.name for a in task.axes}:
            raise DataError(f"axes of task '{task.name}' must not be called {', '.join(sorted(reserved))}")


class _SplitWriter:
    """The arrays of one split."""

    def __init__(self, store: StoreWriter, split: str, first: Mapping[str, FrameSource]) -> None:
        self.count = 0
        self.frames: list[int] = []
        self.steps: list[float] = []
        self._arrays: dict[str, _ShardedWriter | _RowWriter] = {}
        axes = tuple(a.name for a in store.task.axes)
        for name in first:
            if name == "parameters":
                self._arrays[name] = _RowWriter(store, f"{split}/{name}", len(store.task.parameters))
            else:
                names = ("trajectory", *(("time",) if name == "state" else ()), f"{name}_channel", *axes)
                frames = (store.num_frames,) if name == "state" else ()
                channels = store.task.num_channels(name)  # type: ignore[arg-type]
                shape = (*frames, channels, *store.space)
                self._arrays[name] = _ShardedWriter(store, f"{split}/{name}", shape, names)

    def append(self, arrays: Mapping[str, FrameSource]) -> None:
        for name, values in arrays.items():
            self._arrays[name].append(values)
        self.count += 1

    def finish(self) -> None:
        for writer in self._arrays.values():
            writer.finish(self.count)

    def close(self) -> None:
        for writer in self._arrays.values():
            writer.close()


class _ShardedWriter:
    """One sharded array: `state`, `static` or `target`. At most one row of shard files (along time) is open."""

    def __init__(self, store: StoreWriter, name: str, item_shape: tuple[int, ...], names: tuple[str, ...]) -> None:
        self._store, self._name, self._shape, self._names = store, name, item_shape, names
        self._has_time = names[1] == "time"
        self._num_frames = item_shape[0] if self._has_time else 1
        frame_shape = item_shape[1:] if self._has_time else item_shape
        frame_bytes = 4 * math.prod(frame_shape)
        if frame_bytes > MAX_CHUNK_BYTES:
            raise DataError(
                f"a frame of {name} has {frame_bytes >> 20} MiB; at most {MAX_CHUNK_BYTES >> 20} are possible"
            )
        chunk_frames = max(1, min(self._num_frames, TARGET_CHUNK_BYTES // frame_bytes))
        self._chunks = -(-self._num_frames // chunk_frames)  # per trajectory
        self._chunk_frames = -(-self._num_frames // self._chunks)
        chunk_bytes = self._chunk_frames * frame_bytes
        row_bytes = self._chunks * chunk_bytes
        self._rows = max(1, min(MAX_SHARD_ROWS, TARGET_SHARD_BYTES // row_bytes))
        # A trajectory larger than a shard is cut along time.
        most = self._chunks if self._rows > 1 else max(1, TARGET_SHARD_BYTES // chunk_bytes)
        self._shard_chunks = min(self._chunks, most)
        self._row, self._shard_row = 0, 0
        self._open: list[_ShardFileWriter] = []

    def append(self, frames: FrameSource) -> None:
        if self._row == self._rows:
            self._close_row(self._rows)
        if not self._open:
            for column in range(-(-self._chunks // self._shard_chunks)):
                time_part = [str(column)] if self._has_time else []
                zeros = ["0"] * (len(self._names) - 1 - len(time_part))
                path = "/".join([self._name, "c", str(self._shard_row), *time_part, *zeros])
                self._open.append(_ShardFileWriter(self._store, path))
        for number in range(self._chunks):
            first = number * self._chunk_frames
            chunk = frames(first, min(first + self._chunk_frames, self._num_frames))
            missing = self._chunk_frames - len(chunk)
            if missing:
                chunk = np.concatenate([chunk, np.zeros((missing, *chunk.shape[1:]), np.float32)])
            slot = self._row * self._shard_chunks + number % self._shard_chunks
            self._open[number // self._shard_chunks].add(slot, chunk)
        self._row += 1

    def finish(self, count: int) -> None:
        rows = min(self._rows, count)
        self._close_row(rows)
        chunk, shard = self._shape, self._shape
        if self._has_time:
            chunk = (self._chunk_frames, *self._shape[1:])
            shard = (self._chunk_frames * self._shard_chunks, *self._shape[1:])
        layout = ArrayLayout(
            directory=self._name,
            shape=(count, *self._shape),
            dtype="<f4",
            shard_shape=(rows, *shard),
            chunk_shape=(1, *chunk),
            sharded=True,
            compressor=self._store.compression,
            dimension_names=self._names,
        )
        self._store.write_json(self._name, array_json(layout))

    def close(self) -> None:
        for file in self._open:
            file.close()
        self._open = []

    def _close_row(self, rows: int) -> None:
        for file in self._open:
            file.finish(rows * self._shard_chunks)
        self._open, self._row, self._shard_row = [], 0, self._shard_row + 1


class _ShardFileWriter:
    """One shard: chunks one after another, then the index. The hash is taken on the way."""

    def __init__(self, store: StoreWriter, name: str) -> None:
        self._store, self._name = store, name
        self._file = store.open_file(name)
        self._hash = hashlib.sha256()
        self._size = 0
        self._entries: dict[int, tuple[int, int]] = {}

    def add(self, slot: int, chunk: npt.NDArray[np.float32]) -> None:
        data: Any = np.ascontiguousarray(chunk, "<f4").data.cast("B")
        if self._store.compression == "zstd":
            from numcodecs import zstd  # type: ignore[import-untyped]

            data = zstd.compress(bytes(data), 3)
        self._entries[slot] = (self._size, len(data))
        self._put(data)

    def finish(self, num_slots: int) -> None:
        index = np.full((num_slots, 2), _MISSING, np.uint64)
        for slot, entry in self._entries.items():
            index[slot] = entry
        self._put(encode_index(index))
        self._file.close()
        self._store.hashes[self._name] = (self._hash.hexdigest(), self._size)

    def close(self) -> None:
        """Let go of the file of a store that is given up: what its buffer holds may not fit on the disk either."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _put(self, data: Any) -> None:
        self._file.write(data)
        self._hash.update(data)
        self._size += len(data)


class _RowWriter:
    """The parameters: (trajectory, parameter) in plain chunks of many rows, written at the end."""

    def __init__(self, store: StoreWriter, name: str, width: int) -> None:
        self._store, self._name, self._width = store, name, width
        self._values: list[npt.NDArray[np.float32]] = []

    def append(self, row: FrameSource) -> None:
        self._values.append(row(0, 1)[0])

    def finish(self, count: int) -> None:
        rows = min(count, PARAMETER_ROWS)
        for number, first in enumerate(range(0, count, rows)):
            block = np.zeros((rows, self._width), "<f4")
            block[: count - first] = self._values[first : first + rows]
            with self._store.open_file(f"{self._name}/c/{number}/0") as file:
                file.write(block.tobytes())
        names, chunk = ("trajectory", "parameter"), (rows, self._width)
        layout = ArrayLayout(self._name, (count, self._width), "<f4", chunk, chunk, False, None, names)
        self._store.write_json(self._name, array_json(layout))

    def close(self) -> None:
        """No file is open."""


def _checked(values: object, shape: tuple[int, ...], what: str) -> npt.NDArray[np.float32]:
    try:
        with np.errstate(over="raise"):
            array = np.asarray(values if values is not None else (), np.float32)
    except FloatingPointError as error:
        raise DataError(f"{what} has finite values that float32 cannot hold", hint=FLOAT32_HINT) from error
    if array.shape != shape:
        raise DataError(f"{what} must have shape {shape}, not {array.shape}")
    return array


def _checked_source(source: FrameSource, frame_shape: tuple[int, ...], what: str) -> FrameSource:
    return lambda first, stop: _checked(source(first, stop), (stop - first, *frame_shape), what)


def _filled(source: FrameSource, length: int, frame_shape: tuple[int, ...]) -> FrameSource:
    """Frames of a trajectory of `length` frames, and NaN after its end."""

    def frames(first: int, stop: int) -> npt.NDArray[np.float32]:
        if stop <= length:
            return source(first, stop)
        there = source(first, length) if first < length else np.empty((0, *frame_shape), np.float32)
        missing = np.full((stop - first - len(there), *frame_shape), np.nan, np.float32)
        return np.concatenate([there, missing])

    return frames


def _slices_of(values: npt.NDArray[np.float32]) -> FrameSource:
    return lambda first, stop: values[first:stop]
