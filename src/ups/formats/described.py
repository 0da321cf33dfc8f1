"""Reader of files that come with a description: NumPy, HDF5, NetCDF, Zarr, as trajectories of one task.

`described_layout` says where things are, a `Container` gives their values. Only the frames of a window are read, so
files may be larger than memory.
"""

from __future__ import annotations

import bisect
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups.config.description import CHANNEL, COMPONENT, TIME, TRAJECTORY, TaskDescription
from ups.errors import DataError
from ups.formats.base import FULL, SPLITS, Array, GridReader, Source, Subsampling
from ups.formats.container import Container
from ups.formats.described_layout import DescribedLayout, FieldSource, same_points, understand
from ups.formats.open_container import open_containers
from ups.formats.split_rows import split_counts
from ups.spec.task import Role


@dataclass(frozen=True, slots=True)
class _File:
    container: Container
    layout: DescribedLayout
    parameters: Array  # (N, P) float32


class DescribedReader(GridReader):
    """Windows from one or several files of one task.

    Trajectories are split as everywhere: the first go to train, then valid, the last to test. Of several files with
    many trajectories each is split, so that every split sees every file; files of one trajectory are split as a whole.
    Trajectories that are cut into pieces are held out whole, unless there are too few of them.
    """

    def __init__(
        self,
        containers: Sequence[Container],
        description: TaskDescription,
        subsampling: Subsampling = FULL,
        *,
        name: str = "data",
        valid_fraction: float = 0.1,
        test_fraction: float = 0.1,
    ) -> None:
        _check_distinct(containers)
        layouts = [understand(container, description, name) for container in containers]
        for container in containers:
            container.close()  # opened for coordinates and parameters; nothing stays open before a fork
        _check_same(containers, layouts)
        first = layouts[0]
        self._files = tuple(
            _File(container, layout, layout.parameters.astype(np.float32))
            for container, layout in zip(containers, layouts, strict=True)
        )
        self._piece = description.cut_frames or 0
        for container, layout in zip(containers, layouts, strict=True):
            if self._piece > layout.num_frames:
                raise DataError(
                    f"{container.label}: trajectories have {layout.num_frames} frames, and cut_frames is {self._piece}"
                )
        # Pieces that a trajectory of each file is cut into.
        self._pieces = [layout.num_frames // self._piece if self._piece else 1 for layout in layouts]
        rows = [layout.num_trajectories * pieces for layout, pieces in zip(layouts, self._pieces, strict=True)]
        self._ends = np.cumsum(rows).tolist()
        counts = [layout.num_trajectories for layout in layouts]
        self._rows, whole = _split(counts, self._pieces, valid_fraction, test_fraction)
        # Without defaults: a field that a later version adds changes nothing.
        self._description = description.model_dump_json(exclude_defaults=True)
        parameters = tuple(
            replace(
                p,
                minimum=min(x.task.parameters[i].minimum for x in layouts),
                maximum=max(x.task.parameters[i].maximum for x in layouts),
            )
            for i, p in enumerate(first.task.parameters)
        )
        assumptions = tuple(dict.fromkeys(text for layout in layouts for text in layout.assumptions))
        rest = max(layout.num_frames % self._piece for layout in layouts) if self._piece else 0
        if rest:
            assumptions += (f"cut_frames {self._piece} leaves out up to {rest} frames at the end of each trajectory",)
        if not whole:
            few = f"too few simulations ({sum(counts)}) to hold some out whole"
            assumptions += (f"{few}: train, valid and test have pieces of the same",)
        lengths = [self._piece or layout.num_frames for layout in layouts]
        steps = [layout.task.dt for layout in layouts]
        same_step = first.task.steady or np.allclose(steps, steps[0], rtol=1e-3, atol=0)
        source = Source(
            replace(first.task, parameters=parameters),
            first.coordinates,
            max(lengths),
            {split: len(found) for split, found in self._rows.items()},
            first.start_time,
            assumptions,
            frames=None if len(set(lengths)) == 1 else self._by_split(np.asarray(lengths, np.int64)),
            steps=None if same_step else self._by_split(np.asarray(steps, np.float64)),
        )
        super().__init__(source, subsampling)

    def assume(self, texts: Sequence[str]) -> None:
        """Add what the description itself assumes, for people to read."""
        self.source = replace(self.source, assumptions=(*self.source.assumptions, *texts))

    def where(self, split: str, trajectory: int) -> str:
        file, row, frame = self._locate(split, trajectory)
        piece = f" from frame {frame}" if self._piece else ""
        return f"{file.container.label} trajectory {row}{piece} ({split} trajectory {trajectory})"

    def close(self) -> None:
        for file in self._files:
            file.container.close()

    def _frames(self, split: str, trajectory: int, start: int, stop: int, step: int) -> Array:
        file, row, first = self._locate(split, trajectory)
        return _assemble(file, row, "state", slice(first + start, first + stop, step))

    def _given(self, split: str, trajectory: int, role: Role) -> Array:
        file, row, _ = self._locate(split, trajectory)
        return np.asarray(_assemble(file, row, role, slice(0, 1, 1))[0])

    def _parameters(self, split: str, trajectory: int) -> Array:
        file, row, _ = self._locate(split, trajectory)
        return np.asarray(file.parameters[row])

    def _source_identity(self) -> str:
        # The description says which of the arrays are read: two of one file are two sources.
        digest = hashlib.sha256(self._description.encode())
        for file in self._files:
            digest.update(file.container.identity().encode())
        return digest.hexdigest()

    def _locate(self, split: str, trajectory: int) -> tuple[_File, int, int]:
        """File of a trajectory, its row in there, and the first frame of its piece."""
        number = self._rows[split][trajectory]
        file = bisect.bisect_right(self._ends, number)
        row, piece = divmod(number - (self._ends[file - 1] if file else 0), self._pieces[file])
        return self._files[file], row, piece * self._piece

    def _by_split(self, of_files: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
        """For each trajectory of each split what its file has."""
        return {
            split: of_files[np.searchsorted(self._ends, np.asarray(rows, np.int64), side="right")]
            for split, rows in self._rows.items()
        }


def open_described(
    paths: Sequence[Path],
    description: TaskDescription,
    subsampling: Subsampling = FULL,
    *,
    valid_fraction: float = 0.1,
    test_fraction: float = 0.1,
) -> DescribedReader:
    """The reader of files by their description. Raises DataError."""
    containers = open_containers(paths)
    return DescribedReader(
        containers,
        description,
        subsampling,
        name=task_name(paths[0]),
        valid_fraction=valid_fraction,
        test_fraction=test_fraction,
    )


def task_name(path: Path) -> str:
    """A name for the task of a file that has none."""
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in path.name.split(".")[0])[:60]
    return stem if stem[:1].isalpha() or stem[:1] == "_" else f"data_{stem}"


def _assemble(file: _File, row: int, role: Role, frames: slice) -> Array:
    """(T, C, *S) of one role: each field read, its dimensions brought into order, channels put together."""
    parts = [_read(file, row, source, frames) for source in file.layout.sources if source.role == role]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _read(file: _File, row: int, source: FieldSource, frames: slice) -> Array:
    variable = file.container.variables[source.dataset]
    chosen = {
        TRAJECTORY: slice(row, row + 1, 1),
        TIME: frames,
        CHANNEL: slice(source.channel, source.channel + 1, 1),
    }
    region = tuple(
        chosen.get(dim, slice(0, size - (dim in file.layout.repeated), 1))
        for dim, size in zip(source.dims, variable.shape, strict=True)
    )
    values = file.container.decoded(source.dataset, region)
    axes = [axis.name for axis in file.layout.task.axes]
    dims = list(source.dims)
    for dim in (TRAJECTORY, CHANNEL):
        if dim in dims:
            values = values.take(0, axis=dims.index(dim))
            dims.remove(dim)
    components = [number for number, dim in enumerate(dims) if dim == COMPONENT]
    time = [dims.index(TIME)] if TIME in dims else []
    values = values.transpose(*time, *components, *(dims.index(axis) for axis in axes))
    space = values.shape[len(time) + len(components) :]
    values = values.reshape(values.shape[0] if time else 1, -1, *space)  # (T, C, *S)
    turned = tuple(slice(None, None, -1) if axis in file.layout.flipped else slice(None) for axis in axes)
    return np.asarray(values[(slice(None), slice(None), *turned)])


def _check_same(containers: Sequence[Container], layouts: Sequence[DescribedLayout]) -> None:
    first = layouts[0]
    for container, layout in zip(containers[1:], layouts[1:], strict=True):
        same = [len(c) for c in layout.coordinates] == [len(c) for c in first.coordinates]
        same = same and all(same_points(a, b) for a, b in zip(layout.coordinates, first.coordinates, strict=True))
        if not same:
            raise DataError(
                f"{container.label} and {containers[0].label} have different grids",
                hint="files and groups of one task may differ in parameters, length and time step; make them two tasks",
            )


def _check_distinct(containers: Sequence[Container]) -> None:
    """A file that is listed twice would be trained on and held out."""
    seen: set[tuple[str, str]] = set()
    for path, part in ((container.path, container.part) for container in containers):
        if os.path.exists(path):
            real = (os.path.realpath(path), part)
            if real in seen:
                raise DataError(f"{path} is the same file as another of the list", hint="list each file once")
            seen.add(real)


def _split(
    counts: list[int], pieces: list[int], valid_fraction: float, test_fraction: float
) -> tuple[dict[str, range | list[int]], bool]:
    """Which pieces of trajectories, counted over all files, each split has; and whether trajectories stay whole.

    Pieces of one simulation resemble each other, so that simulations are held out whole where there are enough.
    """
    whole = _split_rows(counts, valid_fraction, test_fraction)
    if max(pieces) == 1:
        return whole, True
    lacking = [s for s, part in (("valid", valid_fraction), ("test", test_fraction)) if part > 0 and not whole[s]]
    if lacking:
        rows = [count * number for count, number in zip(counts, pieces, strict=True)]
        return _split_rows(rows, valid_fraction, test_fraction), False
    ends = np.cumsum(np.repeat(pieces, counts))
    begins = np.concatenate([[0], ends[:-1]])
    return {split: [n for row in rows for n in range(begins[row], ends[row])] for split, rows in whole.items()}, True


def _split_rows(counts: list[int], valid_fraction: float, test_fraction: float) -> dict[str, range | list[int]]:
    """Which rows, counted over all files, each split has."""
    if max(counts) == 1:
        counts = [sum(counts)]
    starts, numbers = split_counts(counts, valid_fraction, test_fraction)
    begins = [0, *np.cumsum(counts).tolist()]
    found: dict[str, range | list[int]] = {}
    for split in SPLITS:
        ranges = [
            range(begin + start, begin + start + number)
            for begin, start, number in zip(begins, starts[split], numbers[split], strict=False)
        ]
        found[split] = ranges[0] if len(ranges) == 1 else [row for rows in ranges for row in rows]
    return found
