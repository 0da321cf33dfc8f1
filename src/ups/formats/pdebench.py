"""Reader of PDEBench files: one or many HDF5 files of one problem, as trajectories of one task.

Files are surveyed by `hdf5_guard`, understood by `pdebench_layouts`, read by `hdf5_arrays`. Memory grows with the
number of files (and with the number of groups of those that keep one group per trajectory), never with windows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ups.buckets.address import is_address
from ups.buckets.path import plain_name
from ups.errors import DataError
from ups.formats.base import FULL, Array, GridReader, Source, Subsampling
from ups.formats.hdf5_arrays import Region, bring_region, drop_hdf5, read_region
from ups.formats.hdf5_guard import HDF5_MAGIC, FileKey, file_key, survey_files
from ups.formats.hdf5_identity import files_identity
from ups.formats.hdf5_survey import ArraySurvey, FileSurvey
from ups.formats.pdebench_layouts import FieldSource, FileLayout, member_of, understand
from ups.formats.split_rows import SplitRows, split_counts
from ups.formats.the_well import THE_WELL
from ups.record.untrusted_files import open_regular
from ups.spec.task import ParameterSpec, Role


@dataclass(frozen=True, slots=True)
class _File:
    key: FileKey
    survey: FileSurvey
    layout: FileLayout
    parameters: Array  # (P,)


class PdebenchReader(GridReader):
    """Windows from PDEBench files of one problem; parameters may differ from file to file.

    Trajectories are split file by file: the first go to train, then valid, the last to test, so that every split sees
    every file; the counts follow the fractions over all files together. problem: which one the files hold, where they
    do not say so themselves (`pdebench_problems.PROBLEMS`).
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        subsampling: Subsampling = FULL,
        *,
        valid_fraction: float = 0.1,
        test_fraction: float = 0.1,
        problem: str | None = None,
    ) -> None:
        listed = [paths] if isinstance(paths, str | Path) else list(paths)
        if not listed:
            raise DataError("no PDEBench file is named")
        for path in listed:
            drop_hdf5(plain_name(path))
        layouts: list[tuple[FileKey, FileSurvey, FileLayout]] = []
        for path, survey in zip(listed, survey_files(listed), strict=True):
            if isinstance(survey, DataError):
                raise survey
            key = file_key(path)
            layouts.append((key, survey, understand(key, survey, problem)))
        for key, _, _ in layouts:
            drop_hdf5(key[0])  # opened for the coordinates; nothing stays open before a fork
        _check_same_problem(layouts)
        first = layouts[0][2]
        names = tuple(first.parameters)
        self._files = tuple(
            _File(key, survey, layout, np.array([layout.parameters[n] for n in names], np.float32))
            for key, survey, layout in layouts
        )
        counts = [f.layout.num_trajectories for f in self._files]
        self._rows = SplitRows(*split_counts(counts, valid_fraction, test_fraction))
        task = replace(first.task, parameters=tuple(_parameter(n, [x[2] for x in layouts]) for n in names))
        assumptions = tuple(dict.fromkeys(text for _, _, layout in layouts for text in layout.assumptions))
        source = Source(task, first.coordinates, first.num_frames, self._rows.totals, first.start_time, assumptions)
        super().__init__(source, subsampling)

    def where(self, split: str, trajectory: int) -> str:
        file, row = self._locate(split, trajectory)
        inside = f"group {file.survey.groups[row]}" if file.survey.groups else f"trajectory {row}"
        return f"{file.key[0]} {inside} ({split} trajectory {trajectory})"

    def close(self) -> None:
        for file in self._files:
            drop_hdf5(file.key[0])

    def _frames(self, split: str, trajectory: int, start: int, stop: int, step: int) -> Array:
        file, row = self._locate(split, trajectory)
        return _assemble(file, row, "state", slice(start, stop, step))

    def _given(self, split: str, trajectory: int, role: Role) -> Array:
        file, row = self._locate(split, trajectory)
        return np.asarray(_assemble(file, row, role, slice(0, 1, 1))[0])

    def _parameters(self, split: str, trajectory: int) -> Array:
        return self._locate(split, trajectory)[0].parameters

    @property
    def remote(self) -> bool:
        return is_address(self._files[0].key[0])

    def _bring(self, split: str, trajectory: int, start: int, stop: int, step: int) -> list[str]:
        file, row = self._locate(split, trajectory)
        blocks: list[str] = []
        for source in file.layout.sources:
            frames = slice(start, stop, step) if source.role == "state" else slice(0, 1, 1)
            blocks += bring_region(file.key, *_region_of(file, row, source, frames))
        return blocks

    def _source_identity(self) -> str:
        return files_identity("pdebench", [file.key for file in self._files])

    def _locate(self, split: str, trajectory: int) -> tuple[_File, int]:
        """File of a trajectory, and its row in there."""
        number, row = self._rows.locate(split, trajectory)
        return self._files[number], row


def _assemble(file: _File, row: int, role: Role, frames: slice) -> Array:
    """(T, C, *S) of one role: each source read, its axes brought into order, channels put together."""
    parts = [_read_source(file, row, source, frames) for source in file.layout.sources if source.role == role]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _region_of(file: _File, row: int, source: FieldSource, frames: slice) -> tuple[ArraySurvey, Region]:
    """The array of a source, and what of it a trajectory needs."""
    if "{}" in source.dataset:
        array = member_of(file.survey, source.dataset, row)
    else:
        array = file.survey.datasets[source.dataset]
    region = tuple(
        slice(row, row + 1, 1) if letter == "N" else frames if letter == "T" else slice(0, size, 1)
        for letter, size in zip(source.axes, array.shape, strict=True)
    )
    return array, region


def _read_source(file: _File, row: int, source: FieldSource, frames: slice) -> Array:
    values = read_region(file.key, *_region_of(file, row, source, frames))
    axes = source.axes
    if "N" in axes:
        values, axes = values[0], axes[1:]
    if "C" not in axes:
        values, axes = values[..., None], axes + "C"
    if "T" not in axes:
        values, axes = values[None], "T" + axes
    order = [axes.index(letter) for letter in "TCXYZ" if letter in axes]
    return np.asarray(values.transpose(order))  # (T, C, *S)


def _check_same_problem(layouts: list[tuple[FileKey, FileSurvey, FileLayout]]) -> None:
    first_key, _, first = layouts[0]
    for key, _, layout in layouts[1:]:
        same = layout.task.name == first.task.name and layout.num_frames == first.num_frames
        same = same and layout.task.fields == first.task.fields
        same = same and [len(c) for c in layout.coordinates] == [len(c) for c in first.coordinates]
        same = same and all(
            np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(layout.coordinates, first.coordinates, strict=True)
        )
        if not same or not math.isclose(layout.task.dt, first.task.dt, rel_tol=1e-4):
            raise DataError(
                f"{key[0]} and {first_key[0]} differ in problem, grid, frames or time step",
                hint="files of one task must only differ in parameters; make them two tasks",
            )
        if layout.task.axes[0].boundary != first.task.axes[0].boundary or set(layout.parameters) != set(
            first.parameters
        ):
            raise DataError(f"{key[0]} and {first_key[0]} differ in boundary or in which parameters they have")


def _parameter(name: str, layouts: list[FileLayout]) -> ParameterSpec:
    values = [layout.parameters[name] for layout in layouts]
    log = name in layouts[0].log_parameters and min(values) > 0
    return ParameterSpec(name, minimum=min(values), maximum=max(values), scale="log" if log else "linear")


class PdebenchFormat:
    """HDF5 files of PDEBench, and NetCDF files that follow it."""

    def recognizes(self, path: Path) -> bool:
        """Whether this is a regular file that begins as HDF5 does, and not one of The Well."""
        try:
            with open_regular(path, follow_link=True) as file:
                if file is None or file.read(len(HDF5_MAGIC)) != HDF5_MAGIC:
                    return False
        except (OSError, ValueError):
            return False
        return not THE_WELL.recognizes(path)

    def open(
        self,
        paths: Sequence[Path],
        subsampling: Subsampling,
        *,
        valid_fraction: float,
        test_fraction: float,
        problem: str | None,
    ) -> PdebenchReader:
        """The reader of one or several files of one problem."""
        return PdebenchReader(
            paths, subsampling, valid_fraction=valid_fraction, test_fraction=test_fraction, problem=problem
        )


PDEBENCH = PdebenchFormat()
