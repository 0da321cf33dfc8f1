"""A latent cache on its way to disk: files one by one, each whole or not there, and one instant of commit.

Files are collected in `.NAME.partial` next to the cache, which a killed writer finds again. What decides their bytes is
written there first: files of anything else are thrown away. The bytes do not depend on the number of processes, on the
order of files or on interruptions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ups.data.latent_cache import (
    CACHE_NAME,
    FORMAT,
    SPLIT,
    STORED,
    VERSION,
    CacheKey,
    TaskLatents,
    as_stored,
    partial_path,
    read_document,
)
from ups.errors import ConfigError, DataError, DiskFullError
from ups.formats.base import Reader
from ups.record.files import hold_partial, machine_error, read_object, write_file_atomically
from ups.record.manifest import Manifest, clean_temporaries, commit_directory, is_committed
from ups.spec.batch import Float32

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
        # Only a whole cache is replaced: anything else may be something that nobody wants to lose.
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
        place = self.root.parent
        free = shutil.disk_usage(place).free
        kind = "disk"
        if _file_system(place) in _IN_MEMORY:
            kind, free = "RAM disk", min(free, _available_memory())
        if needed > free:
            if not there:
                shutil.rmtree(self.partial, ignore_errors=True)
            raise DiskFullError(
                f"{place} ({kind}) has {free / 1e9:.2f} GB free, and {needed / 1e9:.2f} GB are needed",
                hint="choose another --out, or a --dtype of half the size",
            )

    def open_jobs(self) -> list[Job]:
        """The files that are not there yet."""
        marker = self.partial / "key.json"
        wanted = {"hash": self.key.hash, **self.key.to_json()}
        if read_object(marker) != wanted:
            shutil.rmtree(self.content, ignore_errors=True)
            write_file_atomically(marker, json.dumps(wanted, indent=1).encode())
        try:
            for task in self.tasks:
                (self.content / task.name).mkdir(parents=True, exist_ok=True)
                clean_temporaries(self.content / task.name)
        except OSError as error:
            raise machine_error(f"cannot write to {self.content}", error) from error
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


def _file_system(place: Path) -> str:
    """The type of the file system of a directory, '' where nobody says."""
    best, kind = -1, ""
    with contextlib.suppress(OSError):
        where = place.resolve()
        for line in Path("/proc/mounts").read_text().splitlines():
            fields = line.split()
            mount = Path(fields[1].replace("\\040", " "))
            if len(fields) > 2 and where.is_relative_to(mount) and len(mount.parts) >= best:
                best, kind = len(mount.parts), fields[2]
    return kind


def _available_memory() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 2**63
