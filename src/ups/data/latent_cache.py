"""Latents of a frozen encoder on disk: of what, where each one lies, whether they may be used, how they are written.

A cache is a committed directory (`ups.record.manifest`): `cache.json` says what decides its bytes, and each task has a
folder of plain arrays, which are mapped into memory. Processes of a host share them in the page cache. Latents are
those of the train split: of a transient task one for each position of the context frames in a trajectory, of a steady
task two for each sample (of the given fields and of the target). Parameters are kept too, so that a stage that needs no
field reads nothing else. Encoders are torch and not known here.

The writer collects files in `.NAME.partial` next to the cache, which a killed writer finds again. What decides their
bytes is written there first: files of anything else are removed. The bytes do not depend on the number of processes,
on the order of files or on interruptions.

N tokens along each axis, Z channels of a token, B samples, L latents of a sample.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from ups.data.rank_source import EXTRA, Array, read_arrays
from ups.errors import ConfigError, DataError, DiskFullError, IntegrityError, UpsError
from ups.formats.base import Int64, Reader
from ups.formats.shards import ProcessCache, map_file
from ups.record.files import hold_partial, load_object, machine_errors, read_object, write_file_atomically
from ups.record.manifest import COMMITTED_NAME, Manifest, clean_temporaries, commit_directory, is_committed, verify
from ups.record.processes import kernel_number
from ups.spec.batch import LATENTS, Float32
from ups.spec.statistics import Statistics

FORMAT, VERSION = "ups-latent-cache", 1
CACHE_NAME = "cache.json"
SPLIT = "train"
# bfloat16 is no type of numpy: its bits are the upper half of a float32.
STORED = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
# A file holds whole trajectories up to this size, at least one.
FILE_BYTES = 64 << 20
_MAX_OPEN_FILES = 256
_WRITE = "write it with: ups data cache RECIPE"
_AGAIN = "write it again: ups data cache RECIPE --overwrite"


class CacheKey(BaseModel, frozen=True):
    """Everything that decides the bytes of a cache.

    encoder: hash of the weights; '' where it is not known and not to be compared. model: the settings that decide what
    a latent is. tasks: name -> (identity of the data, hash of the statistics).
    """

    dtype: str
    encoder: str
    model: dict[str, Any]
    context_frames: int
    tasks: dict[str, tuple[str, str]]

    @classmethod
    def of(
        cls,
        readers: Sequence[Reader],
        statistics: Mapping[str, Statistics],
        *,
        dtype: str,
        model: Mapping[str, object],
        context_frames: int,
        encoder: str = "",
    ) -> CacheKey:
        """The key of latents of this data."""
        tasks = {r.task.name: (r.identity(), _hash(statistics[r.task.name].to_json())) for r in readers}
        tasks = dict(sorted(tasks.items()))
        return cls(dtype=dtype, encoder=encoder, model=dict(model), context_frames=context_frames, tasks=tasks)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return self.model_dump(mode="json")

    @property
    def hash(self) -> str:
        """One name for all of it."""
        return _hash(self.to_json())

    def difference(self, wanted: CacheKey) -> str:
        """'' if latents of this key are the wanted ones, else what is wrong with them."""
        if self.dtype != wanted.dtype:
            return f"has the wrong dtype: it holds {self.dtype}, and {wanted.dtype} is asked for"
        if self.tasks.keys() != wanted.tasks.keys():
            mine, theirs = (", ".join(sorted(names)) for names in (self.tasks, wanted.tasks))
            return f"is foreign: it is of the tasks {mine}, and the recipe has {theirs}"
        if self.model != wanted.model or self.context_frames != wanted.context_frames:
            return "is foreign: it is of a model with other settings of the encoder, or of other context frames"
        for name, (data, numbers) in wanted.tasks.items():
            if self.tasks[name][0] != data:
                return f"is stale: it is of other data of task '{name}'"
            if self.tasks[name][1] != numbers:
                return f"is stale: the statistics of task '{name}' have changed, by which fields are normalized"
        if wanted.encoder and self.encoder != wanted.encoder:
            return "is stale: it is of an encoder with other weights than those that the stage starts from"
        return ""


@dataclass(frozen=True)
class TaskLatents:
    """Where the latents of one task lie.

    shape (*N, Z) of one. before (trajectories + 1,): latents of all trajectories before each, in the end of all.
    per_file: trajectories of a file.
    """

    name: str
    shape: tuple[int, ...]
    before: Int64
    per_file: int

    @classmethod
    def of(
        cls, reader: Reader, context_frames: int, shape: Sequence[int], dtype: str, per_file: int | None = None
    ) -> TaskLatents:
        """The layout for a reader's train split. per_file: as a cache says that is there already."""
        counts = np.array([latents_in(reader, t, context_frames) for t in range(reader.splits[SPLIT])], np.int64)
        before = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        largest = int(counts.max(initial=1)) * int(np.prod(shape)) * np.dtype(STORED[dtype]).itemsize
        return cls(reader.task.name, tuple(shape), before, per_file or max(1, FILE_BYTES // max(1, largest)))

    @property
    def num_trajectories(self) -> int:
        return len(self.before) - 1

    @property
    def num_latents(self) -> int:
        return int(self.before[-1])

    @property
    def num_files(self) -> int:
        return -(-self.num_trajectories // self.per_file)

    def trajectories_of(self, file: int) -> range:
        """The trajectories whose latents a file holds."""
        return range(file * self.per_file, min((file + 1) * self.per_file, self.num_trajectories))

    def rows_of(self, file: int) -> int:
        """Latents of a file."""
        inside = self.trajectories_of(file)
        return int(self.before[inside.stop] - self.before[inside.start])

    def file_name(self, file: int) -> str:
        """Relative to the cache."""
        return f"{self.name}/{file:07d}.bin"

    @property
    def parameters_name(self) -> str:
        """The file of the parameters (trajectories, P), relative to the cache."""
        return f"{self.name}/parameters.bin"


def latents_in(reader: Reader, trajectory: int, context_frames: int) -> int:
    """Latents of one trajectory of the train split."""
    return 2 if reader.task.steady else max(0, reader.frames_in(SPLIT, trajectory) - context_frames + 1)


@dataclass(frozen=True)
class LatentCache:
    """An open cache, from which a loader reads: tasks in the order of a recipe.

    Picklable: each process maps files itself. manifest: hash of its manifest, which names all bytes. reads_fields:
    whether windows come with their fields.
    """

    root: str
    dtype: str
    context_frames: int
    tasks: tuple[TaskLatents, ...]
    manifest: str
    reads_fields: bool = True

    def read(
        self, task: int, reader: Reader, split: str, trajectories: Sequence[int], starts: Sequence[int], num_frames: int
    ) -> dict[str, Array]:
        """The arrays of windows (`read_arrays`) with their latents (B, L, *N, Z) among them."""
        if self.reads_fields:
            arrays = read_arrays(reader, split, trajectories, starts, num_frames)
        else:
            arrays = self._without_fields(task, reader, trajectories)
        count = 2 if reader.task.steady else num_frames - self.context_frames + 1
        arrays[f"{EXTRA}{LATENTS}"] = self.latents(task, trajectories, starts, count)
        return arrays

    def latents(self, task: int, trajectories: Sequence[int], starts: Sequence[int], count: int) -> Float32:
        """(B, L, *N, Z): `count` latents of each trajectory from a start on, as float32."""
        layout = self.tasks[task]
        stored = np.empty((len(trajectories), count, *layout.shape), STORED[self.dtype])
        for row, (trajectory, start) in enumerate(zip(trajectories, starts, strict=True)):
            file = trajectory // layout.per_file
            mapped = self._file(layout.file_name(file)).view(STORED[self.dtype]).reshape(-1, *layout.shape)
            first = int(layout.before[trajectory] - layout.before[file * layout.per_file]) + start
            stored[row] = mapped[first : first + count]
        return as_float32(stored, self.dtype)

    def _without_fields(self, task: int, reader: Reader, trajectories: Sequence[int]) -> dict[str, Array]:
        """Parameters, time steps and coordinates only."""
        layout = self.tasks[task]
        arrays: dict[str, Array] = {"dt": np.array([reader.dt_in(SPLIT, t) for t in trajectories], np.float32)}
        if reader.task.parameters:
            table = self._file(layout.parameters_name).view("<f4").reshape(layout.num_trajectories, -1)
            arrays["parameters"] = table[list(trajectories)]
        for axis, coordinate in enumerate(reader.coordinates):
            arrays[f"coordinates.{axis}"] = np.asarray(coordinate, np.float64)
        return arrays

    def _file(self, name: str) -> npt.NDArray[np.uint8]:
        path = f"{self.root}/{name}"
        # Another cache of that name has other files.
        return _open_files.get((f"{self.manifest}:{path}", ()), functools.partial(map_file, path))


_open_files: ProcessCache[npt.NDArray[np.uint8]] = ProcessCache(_MAX_OPEN_FILES)


def open_cache(
    path: str | Path, readers: Sequence[Reader], wanted: CacheKey, *, with_fields: bool = True
) -> LatentCache:
    """The latents of these readers, after a check of names, sizes and what they are of; reads no latent.

    Raises DataError that says what is wrong: half-written, truncated, foreign, of a wrong dtype or stale.
    """
    root = Path(path)
    document, manifest = read_document(root)
    try:
        key = CacheKey.model_validate(document["key"])
        layouts = {
            str(name): (tuple(map(int, entry["shape"])), int(entry["per_file"]))
            for name, entry in document["tasks"].items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"latent cache {root} is foreign: its {CACHE_NAME} is not one of ours", hint=_AGAIN) from error
    problem = key.difference(wanted)
    if problem:
        raise DataError(f"latent cache {root} {problem}", hint=f"{_AGAIN}, or name another cache")
    tasks = []
    for reader in readers:
        shape, per_file = layouts[reader.task.name]
        tasks.append(TaskLatents.of(reader, wanted.context_frames, shape, key.dtype, per_file))
    return LatentCache(str(root), key.dtype, wanted.context_frames, tuple(tasks), manifest, with_fields)


def read_document(root: Path, *, deep: bool = False) -> tuple[dict[str, Any], str]:
    """cache.json and the hash of the manifest, after a check of names and sizes; with `deep` of every byte.

    Raises DataError that says what is wrong.
    """
    what = f"latent cache {root}"
    if not root.is_dir():
        if partial_path(root).is_dir():
            raise DataError(
                f"{what} is half-written: its writer has not finished",
                hint="wait for it, or run its `ups data cache` again: it continues",
            )
        raise DataError(f"{what} does not exist", hint=_WRITE)
    try:
        if not (root / CACHE_NAME).is_file():
            raise DataError(f"{what} is foreign: {root} holds no {CACHE_NAME}", hint=f"name another, or {_WRITE}")
        if not is_committed(root):
            raise DataError(
                f"{what} is half-written: it has no {COMMITTED_NAME} that fits (was it being copied?)",
                hint=f"copy it again, or remove it and {_WRITE}",
            )
        manifest = verify(root, deep=deep)
    except IntegrityError as error:
        raise DataError(f"{what} is truncated or damaged: {error.message}", hint=_AGAIN) from error
    try:
        document: dict[str, Any] = load_object(root / CACHE_NAME)
    except (OSError, ValueError, UpsError) as error:
        raise DataError(f"{what} is damaged: {CACHE_NAME} cannot be read: {error}", hint=_AGAIN) from error
    if document.get("format") != FORMAT or document.get("version") != VERSION:
        raise DataError(f"{what} is foreign: {CACHE_NAME} is not of version {VERSION} of {FORMAT}", hint=_AGAIN)
    return document, manifest.sha256


def partial_path(root: Path) -> Path:
    """Where a cache is while it is being written."""
    return root.with_name(f".{root.name}.partial")


def as_float32(stored: npt.NDArray[Any], dtype: str) -> Float32:
    """Stored numbers as float32."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float32, copy=False)


def as_stored(values: Float32, dtype: str) -> npt.NDArray[Any]:
    """float32 -> the stored numbers, rounded to the nearest, ties to even."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):  # found by who checks that all numbers are finite
            return values.astype(STORED[dtype])
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(STORED[dtype])


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


Job = tuple[int, int]  # number of a task, number of a file
_IN_MEMORY = ("tmpfs", "ramfs")


class CacheWriter:
    """One cache that is being written. kept: it is there already, and nothing is left to do."""

    def __init__(self, root: Path, key: CacheKey, tasks: Sequence[TaskLatents], *, overwrite: bool = False) -> None:
        self.root, self.key, self.tasks = root, key, tuple(tasks)
        self.partial = partial_path(root)
        self.content = self.partial / "content"
        self._hashes: dict[str, tuple[str, int]] = {}
        self.kept = self._look_at_what_is_there(overwrite)

    def _look_at_what_is_there(self, overwrite: bool) -> bool:
        if not self.root.exists():
            return False
        try:
            document, _ = read_document(self.root)
            if document.get("key_hash") == self.key.hash:
                return True
            what = "is another cache than the one asked for"
        except DataError as error:
            what = f"is in the way: {error.message}"
        # Only a whole cache is replaced: anything else may be valuable.
        if not ((self.root / CACHE_NAME).is_file() and is_committed(self.root)):
            raise ConfigError(f"{self.root} {what}", hint="choose another --out, or remove it yourself")
        if not overwrite:
            raise ConfigError(f"{self.root} {what}", hint="choose another --out, or replace it with --overwrite")
        return False

    @property
    def num_bytes(self) -> int:
        """Of all latents."""
        size = np.dtype(STORED[self.key.dtype]).itemsize
        return sum(task.num_latents * int(np.prod(task.shape)) * size for task in self.tasks)

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Hold the partial directory."""
        return hold_partial(self.partial, f"writing {self.root}")

    def clean_up(self) -> None:
        """Remove what a writer left that was killed after its commit, or that had nothing to write yet."""
        if self.partial.exists():
            with contextlib.suppress(ConfigError), self.held():  # another writer needs it
                shutil.rmtree(self.partial, ignore_errors=True)

    def check_space(self) -> None:
        """Raises DiskFullError if what is left to write does not fit: before the work, not in the middle of it."""
        there = sum(self._size(job) for job in self._jobs() if self._is_there(job))
        needed = self.num_bytes - there
        folder = self.root.parent
        free = shutil.disk_usage(folder).free
        kind = "disk"
        if _file_system(folder) in _IN_MEMORY:
            kind, free = "RAM disk", min(free, _available_memory())
        if needed > free:
            if not there:
                shutil.rmtree(self.partial, ignore_errors=True)
            raise DiskFullError(
                f"{folder} ({kind}) has {free / 1e9:.2f} GB free, and {needed / 1e9:.2f} GB are needed",
                hint="choose another --out, or a --dtype of half the size",
            )

    def open_jobs(self) -> list[Job]:
        """The files that are not there yet."""
        marker = self.partial / "key.json"
        wanted = {"hash": self.key.hash, **self.key.to_json()}
        if read_object(marker) != wanted:
            shutil.rmtree(self.content, ignore_errors=True)
            write_file_atomically(marker, json.dumps(wanted, indent=1).encode())
        with machine_errors(f"cannot write to {self.content}"):
            for task in self.tasks:
                (self.content / task.name).mkdir(parents=True, exist_ok=True)
                clean_temporaries(self.content / task.name)
        return [job for job in self._jobs() if not self._is_there(job)]

    def done(self, job: Job, sha256: str, size: int) -> None:
        """A file was written by `store_file`."""
        task, file = job
        self._hashes[self.tasks[task].file_name(file)] = (sha256, size)

    def commit(self, readers: Sequence[Reader], facts: Mapping[str, Any]) -> Manifest:
        """Publish the cache: from now on it is the one of that name. facts: kept in cache.json."""
        for task, reader in zip(self.tasks, readers, strict=True):
            if reader.task.parameters:
                write_file_atomically(self.content / task.parameters_name, _parameters(reader).tobytes())
        document = {
            "format": FORMAT,
            "version": VERSION,
            "key_hash": self.key.hash,
            "key": self.key.to_json(),
            "tasks": {
                t.name: {"shape": list(t.shape), "per_file": t.per_file, "latents": t.num_latents} for t in self.tasks
            },
            **facts,
        }
        write_file_atomically(self.content / CACHE_NAME, (json.dumps(document, indent=1) + "\n").encode())
        manifest = commit_directory(self.content, self.root, known_hashes=self._hashes)
        shutil.rmtree(self.partial, ignore_errors=True)
        return manifest

    def _jobs(self) -> list[Job]:
        return [(number, file) for number, task in enumerate(self.tasks) for file in range(task.num_files)]

    def _size(self, job: Job) -> int:
        task = self.tasks[job[0]]
        return task.rows_of(job[1]) * int(np.prod(task.shape)) * np.dtype(STORED[self.key.dtype]).itemsize

    def _is_there(self, job: Job) -> bool:
        path = self.content / self.tasks[job[0]].file_name(job[1])
        try:
            return path.stat().st_size == self._size(job)
        except OSError:
            return False


def store_file(content: Path, task: TaskLatents, file: int, values: Float32, dtype: str) -> tuple[str, int]:
    """Write one file of latents (rows, *N, Z); returns its hash and size. Raises DataError for what has no number."""
    stored = as_stored(values, dtype)
    if not np.isfinite(values).all() or (dtype == "float16" and not np.isfinite(stored).all()):
        inside = task.trajectories_of(file)
        raise DataError(
            f"a latent of task '{task.name}', trajectories {inside.start} to {inside.stop - 1}, is not finite"
            + (" as float16" if np.isfinite(values).all() else ""),
            hint="take --dtype bfloat16 or float32"
            if np.isfinite(values).all()
            else "look at the data with `ups data validate`",
        )
    content_bytes = stored.tobytes()
    write_file_atomically(content / task.file_name(file), content_bytes)
    return hashlib.sha256(content_bytes).hexdigest(), len(content_bytes)


def _parameters(reader: Reader) -> Float32:
    """(trajectories, P) of the train split."""
    frames = 0 if reader.task.steady else 1
    rows = [reader.read(SPLIT, trajectory, 0, frames).parameters for trajectory in range(reader.splits[SPLIT])]
    return np.stack(rows).astype("<f4")


def _file_system(folder: Path) -> str:
    """The type of the file system of a directory, '' where it is unknown."""
    best, kind = -1, ""
    with contextlib.suppress(OSError):
        where = folder.resolve()
        for line in Path("/proc/mounts").read_text().splitlines():
            fields = line.split()
            mount = Path(fields[1].replace("\\040", " "))
            if len(fields) > 2 and where.is_relative_to(mount) and len(mount.parts) >= best:
                best, kind = len(mount.parts), fields[2]
    return kind


def _available_memory() -> int:
    return (kernel_number(Path("/proc/meminfo"), "MemAvailable:") or 2**53) * 1024
