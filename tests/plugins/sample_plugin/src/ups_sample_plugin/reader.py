"""The reader `rawgrid`: one file with a line of JSON and the numbers behind it.

RAWGRID1\n
{"task": ..., "coordinates": [[...]], "frames": 11, "splits": {"train": 32, ...}}\n
float32 state (N, T, C, X), then float32 parameters (N, P); train first, then valid, then test
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ups.errors import DataError
from ups.formats.base import SPLITS, GridReader, Source, Subsampling
from ups.spec.task import Role, TaskSpec

MAGIC = b"RAWGRID1\n"
MAX_HEADER_BYTES = 1 << 20


class RawGridReader(GridReader):
    """Windows from one file. Picklable: what it has mapped stays behind, and is mapped again in each process."""

    def __init__(self, path: Path, subsampling: Subsampling) -> None:
        self.path = path.absolute()
        with self.path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise DataError(f"{path} is not a raw grid file")
            line = file.readline(MAX_HEADER_BYTES)
            self.begin = file.tell()
        try:
            header = json.loads(line)
            task = TaskSpec.from_json(header["task"])
            coordinates = tuple(np.asarray(axis, np.float64) for axis in header["coordinates"])
            splits = {name: int(header["splits"][name]) for name in SPLITS}
            frames = int(header["frames"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} has a damaged header: {error}") from error
        self.first = {name: sum(splits[s] for s in SPLITS[:i]) for i, name in enumerate(SPLITS)}
        num, space = sum(splits.values()), tuple(len(axis) for axis in coordinates)
        self.shape = (num, frames, task.num_channels("state"), *space)
        self.parameter_shape = (num, len(task.parameters))
        needed = self.begin + 4 * (int(np.prod(self.shape)) + int(np.prod(self.parameter_shape)))
        if self.path.stat().st_size != needed:
            raise DataError(f"{path} is cut short or has bytes too many: {needed} bytes are expected")
        self.mapped: np.ndarray | None = None
        super().__init__(Source(task, coordinates, frames, splits), subsampling)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"mapped": None}

    def where(self, split: str, trajectory: int) -> str:
        return f"{self.path}, {split} trajectory {trajectory}"

    def close(self) -> None:
        self.mapped = None

    def _values(self) -> np.ndarray:
        if self.mapped is None:
            self.mapped = np.memmap(self.path, np.float32, "r", offset=self.begin)
        return self.mapped

    def _frames(self, split: str, trajectory: int, start: int, stop: int, step: int) -> np.ndarray:
        states = self._values()[: int(np.prod(self.shape))].reshape(self.shape)
        return states[self.first[split] + trajectory, start:stop:step]

    def _given(self, split: str, trajectory: int, role: Role) -> np.ndarray:
        raise DataError(f"{self.path} has no {role} fields")

    def _parameters(self, split: str, trajectory: int) -> np.ndarray:
        rows = self._values()[int(np.prod(self.shape)) :].reshape(self.parameter_shape)
        return rows[self.first[split] + trajectory]

    def _source_identity(self) -> str:
        status = self.path.stat()
        return f"rawgrid {self.path.name} {status.st_size} {status.st_mtime_ns}"


class RawGridFormat:
    """What the entry point names: how such a file is recognized and opened."""

    def recognizes(self, path: Path) -> bool:
        """By the first bytes; nothing else of the file is looked at."""
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC

    def open(
        self,
        paths: Sequence[Path],
        subsampling: Subsampling,
        *,
        valid_fraction: float,
        test_fraction: float,
        problem: str | None,
    ) -> RawGridReader:
        """The reader of one file, which has its splits and its task inside."""
        if len(paths) != 1 or problem is not None:
            raise DataError("a raw grid is one file, which says itself what it holds")
        return RawGridReader(paths[0], subsampling)


RAWGRID = RawGridFormat()


def write(path: Path, reader: GridReader) -> None:
    """A raw grid file with everything that another reader has (transient tasks without static fields)."""
    blocks = [
        reader.read_block(split, range(count), [0] * count, reader.num_frames)
        for split in SPLITS
        if (count := reader.splits[split])
    ]
    header = {
        "task": reader.task.to_json(),
        "coordinates": [axis.tolist() for axis in reader.coordinates],
        "frames": reader.num_frames,
        "splits": dict(reader.splits),
    }
    arrays = [np.concatenate([b.state for b in blocks]), np.concatenate([b.parameters for b in blocks])]
    path.write_bytes(MAGIC + json.dumps(header).encode() + b"\n" + b"".join(a.tobytes() for a in arrays))
