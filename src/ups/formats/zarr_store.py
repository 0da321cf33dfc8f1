"""Reader of our own store: a Zarr v3 group per task, local files that are mapped, or objects (docs/store-format.md).

Leaves metadata and bytes of arrays to `shards`, the writing to `store_writer`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, Field, ValidationError, model_validator

from ups.buckets.cached_objects import forget
from ups.buckets.path import BucketPath, data_path
from ups.errors import DataError, IntegrityError
from ups.formats import shards
from ups.formats.base import FULL, SPLITS, Array, Int64, Reader, Source, Subsampling
from ups.record.files import safe_read
from ups.record.manifest import read_manifest
from ups.record.text import printable
from ups.spec.batch import Float64
from ups.spec.task import Role, TaskSpec

FORMAT = "ups-store"
VERSION = 1
# Of a store whose trajectories differ in length or time step: an older reader would take filling for data.
DIFFERING_VERSION = 2
# What may differ between trajectories, and the array that says how.
DIFFERING = {"frames": "trajectory_frames", "dt": "trajectory_dt"}
MAX_COORDINATES = 1 << 20
MAX_ASSUMPTIONS = 64
_ZEROS = (0,) * 8


class StoreReader(Reader):
    """Windows from one `NAME.zarr`."""

    def __init__(self, path: str | Path, subsampling: Subsampling = FULL) -> None:
        self.path = data_path(path).absolute()
        forget(str(self.path))
        shards.drop_files(str(self.path))  # maps of a store that was replaced under this name since
        _refuse_links(self.path)
        self.attributes = read_store_attributes(self.path)
        try:
            stored = _Attributes.model_validate(self.attributes)
        except ValidationError as error:
            hint = "use the ups that wrote it, or pack the original files again"
            raise DataError(f"attributes of store {self.path}: {shards.first_problem(error)}", hint=hint) from error
        task = TaskSpec.from_json(self.attributes.get("task"))
        self._layouts = {split: _read_split(self.path, split, task) for split in SPLITS if stored.splits.get(split)}
        if not self._layouts:
            raise DataError(f"store {self.path} has no trajectories")
        counts = {split: _agree(self.path / split, task, arrays) for split, arrays in self._layouts.items()}
        for split, (count, _, _) in counts.items():
            if count != stored.splits[split]:
                raise DataError(f"store {self.path}: split '{split}' has {count} trajectories, not as many as declared")
        if len({(frames, space) for _, frames, space in counts.values()}) != 1:
            raise DataError(f"store {self.path}: the splits differ in frames or grid")
        first = next(iter(counts))
        _, num_frames, space = counts[first]
        coordinates = tuple(
            _read_vector(self.path / first / axis.name, axis.name, size)
            for axis, size in zip(task.axes, space, strict=True)
        )
        times = np.zeros(1) if task.steady else _read_vector(self.path / first / "time", "time", num_frames)
        steps = np.diff(times)
        if len(steps) and (steps <= 0).any():
            raise DataError(f"store {self.path}: its times are not increasing")
        if len(steps) and not np.allclose(steps, task.dt, rtol=1e-3):
            raise DataError(f"store {self.path}: its times are not {task.dt:g} apart, as the task says")
        totals = {s: n for s, (n, _, _) in counts.items()}
        differing = {
            what: {s: _read_vector(self.path / s / DIFFERING[what], what, n) for s, n in totals.items()}
            for what in stored.differing
        }
        frames = {s: _whole(self.path / s, values) for s, values in differing.get("frames", {}).items()}
        facts = (float(times[0]), stored.assumptions, frames or None, differing.get("dt"))
        super().__init__(Source(task, coordinates, num_frames, totals, *facts), subsampling)
        shards.drop_files(str(self.path))  # mapped for the coordinates; nothing stays open before a fork

    @property
    def layouts(self) -> Mapping[str, Mapping[str, shards.ArrayLayout]]:
        """Arrays of each split that has trajectories."""
        return self._layouts

    def where(self, split: str, trajectory: int) -> str:
        return f"{self.path} {split} trajectory {trajectory}"

    def close(self) -> None:
        shards.drop_files(str(self.path))

    def _frames(self, split: str, trajectory: int, start: int, stop: int, step: int) -> Array:
        layout = self._layouts[split]["state"]
        frames_per_chunk, frames_per_shard = layout.chunk_shape[1], layout.shard_shape[1]
        if start // frames_per_chunk == (stop - 1) // frames_per_chunk:
            per_shard = frames_per_shard // frames_per_chunk
            shard, inside = _shard_of(layout, trajectory, start // frames_per_chunk, per_shard)
            base = start // frames_per_chunk * frames_per_chunk
            return shard.frames(inside, start - base, stop - base, step)
        wanted = range(start, stop, step)
        out = np.empty((len(wanted), *layout.shape[2:]), layout.dtype)
        filled = 0
        while filled < len(wanted):
            number = wanted[filled] // frames_per_chunk
            base = number * frames_per_chunk
            shard, inside = _shard_of(layout, trajectory, number, frames_per_shard // frames_per_chunk)
            part = shard.frames(inside, wanted[filled] - base, min(stop - base, frames_per_chunk), step)
            out[filled : filled + len(part)] = part
            filled += len(part)
        return out

    def _given(self, split: str, trajectory: int, role: Role) -> Array:
        layout = self._layouts[split][role]
        per_shard = layout.shard_shape[0]
        shard = shards.open_shard(layout, (trajectory // per_shard, *(0,) * (len(layout.shape) - 1)))
        return shard.chunk(trajectory % per_shard)[0]  # type: ignore[no-any-return]

    def _parameters(self, split: str, trajectory: int) -> Array:
        layout = self._layouts[split]["parameters"]
        rows = layout.chunk_shape[0]
        return shards.open_shard(layout, (trajectory // rows, 0)).chunk(0)[trajectory % rows]  # type: ignore[no-any-return]

    @property
    def remote(self) -> bool:
        return isinstance(self.path, BucketPath)

    def _source_identity(self) -> str:
        return store_identity(self.path)


def _refuse_links(path: Path) -> None:
    """A part that is a link leads to data outside of the manifest. The store itself may be a link."""
    if isinstance(path, BucketPath):
        return
    parts = (part for pattern in ("*", "*/*", "*/*/c") for part in path.glob(pattern))
    link = next((part for part in parts if part.is_symlink()), None)
    if link is not None:
        raise DataError(
            f"{link} is a symbolic link, and a store is made of its own files", hint="copy what it points to"
        )


def is_store(path: str | Path) -> bool:
    """Whether a path looks like one of our stores (a directory with the metadata of a Zarr v3 group)."""
    return (data_path(path) / "zarr.json").is_file()


def is_own_store(path: str | Path) -> bool:
    """Whether a path is a store of this package, or one that is damaged, and no other Zarr group."""
    try:
        return is_store(path) and "ups" in shards.read_group(data_path(path))
    except DataError:
        return True


class _Attributes(BaseModel):
    """The root attribute `ups` of a store, but for its task. What is not named here is not checked."""

    version: Literal[1, 2]
    splits: dict[str, Annotated[int, Field(strict=True, ge=0)]]
    differing: list[Literal["frames", "dt"]] = []
    generator: Any = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if not set(self.splits) <= set(SPLITS):
            raise ValueError(f"splits are {', '.join(SPLITS)}")
        if (self.version == DIFFERING_VERSION) != bool(self.differing):
            raise ValueError(f"version {DIFFERING_VERSION}, and no other, says what differs between trajectories")
        return self

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What `ups data pack` knew to be assumed about the files that a store was made of."""
        stored = self.generator.get("assumptions") if isinstance(self.generator, dict) else None
        texts = stored[:MAX_ASSUMPTIONS] if isinstance(stored, list) else []
        return tuple(printable(text[:1000]) for text in texts if isinstance(text, str))


def read_store_attributes(path: Path) -> dict[str, Any]:
    """The root attribute `ups` of a store. Raises DataError if there is none."""
    attributes = shards.read_group(path).get("ups")
    if not isinstance(attributes, dict) or attributes.get("format") != FORMAT:
        raise DataError(
            f"{path} is a Zarr group, but not a store of ups: the attribute 'ups' is missing",
            hint="`ups init DIR --data FILE` describes other arrays, `ups data import` makes a store of them",
        )
    return attributes


def store_identity(path: Path) -> str:
    """SHA-256 over all metadata and the manifest of a store: a few small files, whatever the size of the data."""
    try:
        manifest = read_manifest(path)
    except IntegrityError as error:
        raise DataError(f"store {error.message}", hint="pack or generate it again, or rewrite it with pack") from error
    digest = hashlib.sha256(manifest.sha256.encode())
    if isinstance(path, BucketPath):  # a web server cannot list
        names = [name for name in manifest.files if name.rpartition("/")[2] == "zarr.json" and name.count("/") < 3]
        files: list[Path] = [path / name for name in sorted(names, key=lambda name: (name.count("/"), name))]
    else:
        patterns = ("zarr.json", "*/zarr.json", "*/*/zarr.json")
        files = [file for pattern in patterns for file in sorted(path.glob(pattern))]
    for file in files:
        try:
            data = safe_read(file, shards.MAX_JSON_BYTES, follow_link=True)
        except (OSError, ValueError) as error:
            raise DataError(f"{file} cannot be read: {error}", hint="the store is damaged: pack it again") from error
        digest.update(json.dumps([str(file.relative_to(path)), len(data)]).encode() + data)
    return digest.hexdigest()


def _whole(group: Path, values: Float64) -> Int64:
    if (values != np.floor(values)).any() or (values > MAX_COORDINATES).any():
        raise DataError(f"{group}: the frames of its trajectories are not whole numbers")
    return values.astype(np.int64)


def _read_split(path: Path, split: str, task: TaskSpec) -> dict[str, shards.ArrayLayout]:
    shards.read_group(path / split)
    names: list[str] = [role for role in ("state", "static", "target") if task.num_channels(role)]
    if task.parameters:
        names.append("parameters")
    return {name: shards.read_array(path / split / name) for name in names}


def _agree(group: Path, task: TaskSpec, arrays: dict[str, shards.ArrayLayout]) -> tuple[int, int, tuple[int, ...]]:
    """(trajectories, frames, space) of a split, after checking that all its arrays and the task agree on them."""
    dims, main = task.num_spatial_dims, arrays[task.predicted]
    count, space = main.shape[0], main.shape[-dims:]
    num_frames = 0 if task.steady else main.shape[1]
    for name, layout in arrays.items():
        if name == "parameters":
            expected: tuple[int, ...] = (count, len(task.parameters))
            fits = layout.shard_shape[1:] == layout.shape[1:] and not layout.sharded
        else:
            frames = (num_frames,) if name == "state" else ()
            channels = task.num_channels(name)  # type: ignore[arg-type]
            expected = (count, *frames, channels, *space)
            whole = 1 + len(frames)  # axes from here on are never cut
            fits = layout.chunk_shape[0] == 1 and layout.sharded
            fits = fits and layout.shape[whole:] == layout.chunk_shape[whole:] == layout.shard_shape[whole:]
        if layout.shape != expected:
            raise DataError(f"array {group / name} has shape {layout.shape}; the task needs {expected}")
        if not fits or layout.dtype != "<f4" or count < 1 or min(space) < 2 or (num_frames < 1 and not task.steady):
            raise DataError(f"array {group / name}: type, chunks or shards are not of the form in docs/store-format.md")
    return count, num_frames, space


def _read_vector(directory: Path, name: str, size: int) -> Float64:
    layout = shards.read_array(directory)
    if layout.shape != (size,) or layout.shard_shape != (size,) or layout.sharded or size > MAX_COORDINATES:
        raise DataError(f"array {directory} must hold the {size} values of '{name}' in one plain chunk")
    values = np.array(shards.open_shard(layout, (0,)).chunk(0), np.float64)
    if not np.isfinite(values).all():
        raise DataError(f"array {directory} holds values that are not finite")
    return values


def _shard_of(
    layout: shards.ArrayLayout, trajectory: int, frame_chunk: int, chunks_per_shard: int
) -> tuple[shards.ShardFile, int]:
    """The file of a chunk of frames, and its number in there."""
    rows = layout.shard_shape[0]
    position = (trajectory // rows, frame_chunk // chunks_per_shard, *_ZEROS[: len(layout.shape) - 2])
    return shards.open_shard(layout, position), trajectory % rows * chunks_per_shard + frame_chunk % chunks_per_shard


class StoreFormat:
    """A store of this package: one directory."""

    def recognizes(self, path: Path) -> bool:
        """Whether this is a directory with the metadata of a Zarr group."""
        return is_store(path)

    def open(
        self,
        paths: Sequence[Path],
        subsampling: Subsampling,
        *,
        valid_fraction: float,
        test_fraction: float,
        problem: str | None,
    ) -> StoreReader:
        """The reader of one store, which has its splits and its task inside."""
        if len(paths) > 1:
            raise DataError(f"{len(paths)} paths are named; a store is one path", hint="make them several tasks")
        if problem is not None:
            raise DataError(f"{paths[0]} is a store, which says itself what it holds", hint="leave `problem` out")
        return StoreReader(paths[0], subsampling)


STORE = StoreFormat()
