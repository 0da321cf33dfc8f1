"""Reader of The Well: the HDF5 files of one data set, as trajectories of one task.

Files are surveyed by `hdf5_survey`, understood by `the_well_layout`, read by `hdf5`. Memory grows with the number
of files and trajectories, never with windows. Files that lie in folders called train, valid and test are those splits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ups.buckets.path import data_path
from ups.errors import DataError
from ups.formats.base import FULL, SPLITS, Source, SplitRows, Subsampling, check_alike, check_distinct, split_rows
from ups.formats.described import same_points
from ups.formats.hdf5 import HDF5_MAGIC, WELL_GROUPS, Hdf5File, Hdf5Reader, drop_hdf5, survey_all
from ups.formats.the_well_layout import WellLayout, plain, understand
from ups.record.files import open_regular
from ups.spec.batch import Float32
from ups.spec.task import AxisSpec, Boundary, FieldSpec, ParameterSpec, Scale, TaskSpec

# A parameter whose values spread further than this is told to a model on a logarithmic scale.
LOG_RATIO = 20.0
MAX_FILES = 10_000
# Names of groups stand near the beginning or the end of a file, wherever its writer left room.
LOOKED_AT_BYTES = 1 << 20


class WellReader(Hdf5Reader):
    """Windows from a data set of The Well: its directory (with data/train, data/valid, data/test), or files of it.

    Of files outside of such folders the first trajectories go to train, then valid, the last to test, file by file.
    """

    format_name = "the_well"

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        subsampling: Subsampling = FULL,
        *,
        valid_fraction: float = 0.1,
        test_fraction: float = 0.1,
        problem: str | None = None,
    ) -> None:
        if problem is not None:
            raise DataError("data of The Well have no `problem`", hint="leave `problem` out")
        listed = _files_of([data_path(paths)] if isinstance(paths, str | Path) else [data_path(p) for p in paths])
        layouts = [understand(survey) for survey in survey_all(listed, "the_well")]
        for layout in layouts:
            drop_hdf5(layout.key[0])  # opened for coordinates and masks; nothing stays open before a fork
        grids = [(layout.axes, *map(len, layout.coordinates)) for layout in layouts]
        pairs = zip(layouts, grids, strict=True)
        check_alike([(layout.key[0], {"grids": grid, "fields": _specs(layout)}) for layout, grid in pairs])
        first = layouts[0]
        names = [n for n in first.parameters if all(n in layout.parameters for layout in layouts)]
        self._files = tuple(
            Hdf5File(layout.fields, _columns(layout, names), layout.flipped, layout.key) for layout in layouts
        )
        rows, how = _split(listed, layouts, valid_fraction, test_fraction)
        self._rows = SplitRows([layout.num_trajectories for layout in layouts], rows)
        every = np.concatenate([layout.steps for layout in layouts])
        lengths = np.concatenate([layout.frames for layout in layouts])
        same_step = np.allclose(every, np.median(every), rtol=1e-3, atol=0)
        source = Source(
            task_of(layouts, names, float(np.median(every))),
            first.coordinates,
            int(lengths.max()),
            self._rows.totals,
            first.start_time,
            (*assumptions_of(layouts, names), how),
            frames=None if (lengths == lengths[0]).all() else self._rows.by_split(lengths),
            steps=None if same_step else self._rows.by_split(every),
        )
        super().__init__(source, subsampling)


def _columns(layout: WellLayout, names: list[str]) -> Float32:
    """(N, P) parameters of each trajectory."""
    columns = [layout.parameters[name] for name in names]
    return np.array(columns, np.float32).reshape(len(names), layout.num_trajectories).T


def _files_of(paths: list[Path]) -> list[Path]:
    """The files of a data set, by split and name."""
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        folder = path / "data" if (path / "data").is_dir() else path
        for part in [folder / split for split in SPLITS] if any((folder / s).is_dir() for s in SPLITS) else [folder]:
            files += sorted(p for p in part.glob("*") if p.suffix in (".h5", ".hdf5")) if part.is_dir() else []
    if not files:
        raise DataError(
            f"{paths[0]} holds no HDF5 file",
            hint="a data set of The Well is a directory with data/train/*.hdf5, data/valid and data/test",
        )
    if len(files) > MAX_FILES:
        raise DataError(f"{len(files)} files are more than {MAX_FILES}")
    check_distinct((path, "") for path in files)
    return files


def _split(
    paths: list[Path], layouts: list[WellLayout], valid_fraction: float, test_fraction: float
) -> tuple[dict[str, list[int]], str]:
    """Which trajectories each split has, and how that was decided."""
    counts = [layout.num_trajectories for layout in layouts]
    folders = [path.absolute().parent.name for path in paths]
    if all(folder in SPLITS for folder in folders) and "train" in folders:
        of_rows = np.repeat(folders, counts)
        rows = {split: np.flatnonzero(of_rows == split).tolist() for split in SPLITS}
        return rows, "splits are the folders train, valid and test"
    how = "there are no folders train, valid and test: each file is split by trajectory"
    return split_rows(counts, valid_fraction, test_fraction), how


def _specs(layout: WellLayout) -> list[FieldSpec]:
    return [spec for field in layout.fields for spec in field.specs]


def task_of(layouts: list[WellLayout], names: list[str], dt: float) -> TaskSpec:
    """The task of files with the same fields and grid. names: of parameters that every file has."""
    first = layouts[0]
    fields = tuple(_specs(first))
    axes = []
    for number, axis in enumerate(first.axes):
        points = first.coordinates[number]
        ends = {layout.ends[number] for layout in layouts}
        boundary: tuple[Boundary, Boundary] = ends.pop() if len(ends) == 1 else ("unknown", "unknown")
        axes.append(AxisSpec(axis, boundary, float((points[-1] - points[0]) * len(points) / (len(points) - 1))))
    # Fields, axes and parameters stand next to each other in results, so a name is given once.
    used = {"time", *(field.name for field in fields), *first.axes}
    parameters = []
    for name in names:
        values = np.concatenate([layout.parameters[name] for layout in layouts])
        low, high = float(values.min()), float(values.max())
        free = plain(name, "parameter")
        while free in used:
            free = f"{free[:50]}_parameter"
        used.add(free)
        scale: Scale = "log" if low > 0 and high / low >= LOG_RATIO else "linear"
        parameters.append(ParameterSpec(free, minimum=low, maximum=high, scale=scale))
    return TaskSpec(first.name, fields, tuple(axes), tuple(parameters), dt)


def assumptions_of(layouts: list[WellLayout], names: list[str]) -> tuple[str, ...]:
    """What is taken for granted about the files, each sentence once."""
    first = layouts[0]
    texts = list(dict.fromkeys(text for layout in layouts for text in layout.assumptions))
    for number, axis in enumerate(first.axes):
        points = first.coordinates[number]
        if any(not same_points(layout.coordinates[number], points) for layout in layouts):
            texts.append(f"the points along {axis} differ between files: those of the first file are taken")
        if len({layout.ends[number] for layout in layouts}) > 1:
            texts.append(f"files differ in what happens at the ends of {axis}: taken as unknown")
    lost = sorted({n for layout in layouts for n in layout.parameters} - set(names))
    if lost:
        texts.append(f"not used, because not every file has it: {', '.join(lost)[:200]}")
    return tuple(texts)


class WellFormat:
    """The Well: a directory of a data set, or HDF5 files of it."""

    def recognizes(self, path: Path) -> bool:
        """Whether this is a directory of that form, or an HDF5 file whose bytes name the groups of the format."""
        if path.is_dir():
            folder = path / "data" if (path / "data").is_dir() else path
            files = [p for split in SPLITS for p in sorted((folder / split).glob("*.h*5"))[:1]]
            return bool(files) and all(self.recognizes(file) for file in files)
        try:
            with open_regular(path, follow_link=True) as file:
                if file is None:
                    return False
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                start = file.read(min(size, LOOKED_AT_BYTES))
                file.seek(max(len(start), size - LOOKED_AT_BYTES))
                seen = start + file.read(LOOKED_AT_BYTES)
        except (OSError, ValueError):
            return False
        return start.startswith(HDF5_MAGIC) and sum(name.encode() in seen for name in WELL_GROUPS) >= 3

    open = staticmethod(WellReader)


THE_WELL = WellFormat()
