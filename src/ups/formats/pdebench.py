"""Reader of PDEBench files: one or many HDF5 files of one problem, as trajectories of one task.

First the layout of a file: which dataset holds which field along which axes, coordinates, parameters. What the numbers
mean (equation, boundary, conserved fields) is not in the files: `pdebench_problems` decides whether a file says which
problem it holds. Whatever is assumed about a file is written down in words. Then the reader. Memory grows with the
number of files (and with the number of groups of those that keep one group per trajectory), never with windows.
Axes letters: N trajectory, T time, C channel, X Y Z space.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ups.buckets.path import plain_name
from ups.errors import DataError
from ups.formats.base import FULL, Source, SplitRows, Subsampling, split_counts
from ups.formats.hdf5 import (
    HDF5_MAGIC,
    SPACE,
    ArraySurvey,
    FileField,
    FileSurvey,
    Hdf5Reader,
    TrajectoryFile,
    array_of_group,
    drop_hdf5,
    read_region,
    survey_files,
)
from ups.formats.pdebench_problems import (
    BOOKKEEPING,
    PROBLEMS,
    Evidence,
    Problem,
    recognize,
    show_names,
    unknown_problem,
)
from ups.formats.the_well import THE_WELL
from ups.record.files import open_regular
from ups.spec.batch import Float32, Float64
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, Role, TaskSpec

MAX_POINTS = 1 << 20
MAX_CHANNELS = 32


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One file, understood: its task without parameters, where the fields are, and the values of its parameters.

    assumptions: what the task says that the file does not, and what of the file is not used; a sentence each.
    """

    task: TaskSpec
    sources: tuple[FileField, ...]
    coordinates: tuple[Float64, ...]
    num_frames: int
    num_trajectories: int
    parameters: dict[str, float]
    log_parameters: tuple[str, ...] = ()
    start_time: float = 0.0
    assumptions: tuple[str, ...] = ()

    def rows(self, names: Sequence[str]) -> Float32:
        """(N, P) parameters of each trajectory: those of the file."""
        values = np.array([self.parameters[name] for name in names], np.float32)
        return np.broadcast_to(values, (self.num_trajectories, len(names)))


@dataclass(frozen=True, slots=True)
class _Form:
    """An arrangement of datasets. shape: (trajectories, frames, *space); times: None for a steady task.

    names: the fields, called as the datasets are, for a file whose problem is unknown.
    """

    name: str
    sources: tuple[FileField, ...]
    shape: tuple[int, ...]
    times: Float64 | None
    names: tuple[FieldSpec, ...]
    assumptions: tuple[str, ...] = ()


def understand(survey: FileSurvey, problem: str | None = None) -> FileLayout:
    """The layout of a surveyed file. problem: what its user says that it holds. Raises DataError for other files."""
    names = set(survey.arrays)
    if survey.groups:
        build: Callable[[_File], _Form] = _grouped
    elif {"tensor", "nu"} <= names:
        build = _darcy
    elif "tensor" in names:
        build = _single
    elif {"density", "pressure", "Vx"} <= names:
        build = _compressible
    elif "velocity" in names:
        build = _incompressible
    else:
        raise DataError(
            f"{survey.key[0]} is not a PDEBench file: its datasets are {', '.join(sorted(names))[:200] or 'none'}",
            hint="`ups init DIR --data FILE` describes files of any other layout (docs/own-data.md)",
        )
    file = _File(survey)
    return _layout(file, build(file), problem)


class _File:
    """A surveyed file. attributes: single numbers and texts of the file and, for files of groups, of the first group.

    unread: names of other attributes. settings, described: numbers of the embedded configuration, and of its part about
    the simulation; other parts are about plots and publication.
    """

    def __init__(self, survey: FileSurvey) -> None:
        self.survey, self.path = survey, survey.key[0]
        self.name = Path(self.path).name
        attributes = {**survey.attributes.get("{}", {}), **survey.attributes[""]}
        self.attributes = {name: values[0] for name, values in attributes.items() if len(values) == 1}
        self.unread = [*(name for name in attributes if name not in self.attributes), *survey.unread]
        config = _configuration(self.attributes.get("config"))
        self.settings = _numbers_of(config)
        simulation = config.get("sim", config)
        self.described = _numbers_of(simulation) if isinstance(simulation, dict) else {}
        path = config.get("output_path")
        self.output_path = path if isinstance(path, str) else ""

    @property
    def numbers(self) -> dict[str, float]:
        """Attributes that are one number and the same in every group."""
        varying = self.survey.varying
        return {k: v for k, v in self.attributes.items() if isinstance(v, float) and k not in varying}

    def array(self, name: str, num_dims: int) -> ArraySurvey:
        array = self.survey.arrays.get(name)
        if array is None or len(array.shape) != num_dims:
            raise DataError(f"{self.path}: dataset '{name}' with {num_dims} dimensions is missing")
        return array

    def field(self, role: Role, name: str, axes: str) -> FileField:
        return FileField(role, self.survey.arrays[name], axes)

    def values(self, name: str, region: tuple[slice, ...] | None = None) -> Float64:
        """A small dataset as float64; of the first group where the name has a '{}'."""
        array = self.survey.arrays.get(name)
        if array is None or math.prod(array.shape) > MAX_POINTS:
            raise DataError(f"{self.path}: dataset '{name}' is missing, or has more than {MAX_POINTS} entries")
        if "{}" in name:
            array = array_of_group(array, self.survey.groups[0], self.survey.offsets, 0)
        full = tuple(slice(0, n, 1) for n in array.shape)
        return np.array(read_region(self.survey.key, array, region or full), np.float64).reshape(-1)

    def parameter(self, name: str) -> tuple[float, str] | None:
        """Value and source: the attributes, else the embedded configuration, else the file name."""
        if name in self.numbers:
            return self.numbers[name], "attribute"
        varying = {key.lower() for key in self.survey.varying}
        attributes = {k.lower(): v for k, v in self.numbers.items()}
        for source, values in (("attribute", attributes), ("configuration", self.settings)):
            if name.lower() in values and name.lower() not in varying and math.isfinite(values[name.lower()]):
                return values[name.lower()], source
        if name.lower() in varying:
            return None
        match = re.search(rf"(?:^|[_-]|Sols_){re.escape(name)}(\d+(?:\.\d*)?(?:e[-+]?\d+)?)", self.name, re.IGNORECASE)
        return (float(match.group(1)), "file name") if match else None


def _single(file: _File) -> _Form:
    tensor = file.array("tensor", 3)
    times = file.values("t-coordinate")
    return _Form("tensor", (file.field("state", "tensor", "NTX"),), tensor.shape, times, (FieldSpec("tensor"),))


def _darcy(file: _File) -> _Form:
    shape = file.array("tensor", 4).shape
    if shape[1] != 1 or file.array("nu", 3).shape != (shape[0], *shape[2:]):
        raise DataError(f"{file.path}: 'nu' and 'tensor' of a Darcy file do not fit together")
    sources = (file.field("static", "nu", "NXY"), file.field("target", "tensor", "NCXY"))
    fields = (FieldSpec("nu", role="static"), FieldSpec("tensor", role="target"))
    steady = "there are no times: taken as steady, with 'nu' given and 'tensor' asked for"
    return _Form("darcy", sources, (shape[0], 0, *shape[2:]), None, fields, (steady,))


def _compressible(file: _File) -> _Form:
    dims = len(file.survey.arrays["density"].shape) - 2
    if not 1 <= dims <= 3:
        raise DataError(f"{file.path}: 'density' has no 1 to 3 space axes")
    names = ["density", "pressure", *("Vx", "Vy", "Vz")[:dims]]
    shape = file.array("density", dims + 2).shape
    if any(file.array(name, dims + 2).shape != shape for name in names):
        raise DataError(f"{file.path}: its fields differ in shape")
    sources = tuple(file.field("state", name, "NT" + SPACE[:dims]) for name in names)
    return _Form(f"flow{dims}d", sources, shape, file.values("t-coordinate"), tuple(FieldSpec(n) for n in names))


def _incompressible(file: _File) -> _Form:
    velocity = file.array("velocity", 5).shape
    if (
        velocity[4] != 2
        or file.array("particles", 5).shape != (*velocity[:4], 1)
        or file.array("force", 4).shape != (velocity[0], *velocity[2:])
    ):
        raise DataError(f"{file.path}: 'velocity', 'particles' and 'force' do not fit together")
    times = file.array("t", 2)
    if times.shape != velocity[:2]:
        raise DataError(f"{file.path}: 't' has shape {times.shape}, not that of the frames {velocity[:2]}")
    first = file.values("t", (slice(0, 1, 1), slice(0, times.shape[1], 1)))
    sources = (
        file.field("state", "velocity", "NTXYC"),
        file.field("state", "particles", "NTXYC"),
        file.field("static", "force", "NXYC"),
    )
    fields = (
        *_components("velocity", 2),
        FieldSpec("particles"),
        *_components("force", 2, "static"),
    )
    assumed = "the times of the first trajectory are taken for all"
    return _Form("incompressible", sources, velocity[:4], first, fields, (assumed,))


def _grouped(file: _File) -> _Form:
    data = file.survey.arrays.get("{}/data")
    if data is None or len(data.shape) not in (3, 4):
        raise DataError(f"{file.path}: its groups hold no 'data' of 3 or 4 dimensions")
    dims, channels = len(data.shape) - 2, data.shape[-1]
    if channels > MAX_CHANNELS:
        raise DataError(f"{file.path}: 'data' has {channels} channels in its last dimension, more than {MAX_CHANNELS}")
    shape = (len(file.survey.groups), *data.shape[:-1])
    sources = (file.field("state", "{}/data", "T" + SPACE[:dims] + "C"),)
    assumed = "coordinates and times of the first group are taken for all"
    times = file.values("{}/grid/t")
    return _Form(f"groups{dims}d{channels}", sources, shape, times, _components("data", channels), (assumed,))


def _components(name: str, count: int, role: Role = "state") -> tuple[FieldSpec, ...]:
    return tuple(FieldSpec(name if count == 1 else f"{name}_{i}", role=role) for i in range(count))


def _layout(file: _File, form: _Form, stated: str | None) -> FileLayout:
    """Assembles the task."""
    count, num_frames, space = form.shape[0], form.shape[1], form.shape[2:]
    coordinates = tuple(_coordinate(file, letter.lower(), n) for letter, n in zip(SPACE, space, strict=False))
    extents = [float((c[-1] - c[0]) * len(c) / (len(c) - 1)) for c in coordinates]
    numbers = file.numbers
    named = tuple(dict.fromkeys((*file.attributes, *file.unread)))
    evidence = Evidence(file.name, file.output_path, form.name, named, numbers, file.described, extents)
    problem, reason = recognize(evidence, stated)
    assumptions = [reason]
    if problem is None:
        problem = unknown_problem(form.name, form.names, numbers, steady=form.times is None)
        fitting = [p.name for p in PROBLEMS.values() if p.form == form.name]
        if fitting:
            way = f"`problem: {fitting[0]}` in a recipe, `--problem {fitting[0]}` on the command line"
            assumptions = [f"{reason}. If you know that it holds {' or '.join(fitting)}, state it: {way}"]
    parameters: dict[str, float] = {}
    for name in problem.parameters:
        value = file.parameter(name)
        if value is not None:
            parameters[name] = value[0]
            if value[1] == "file name":
                assumptions.append(f"parameter {name} is taken from the file name")
    axes = tuple(
        AxisSpec(letter.lower(), problem.boundary, extent) for letter, extent in zip(SPACE, extents, strict=False)
    )
    task = TaskSpec(
        name=problem.name,
        fields=problem.fields,
        axes=axes,
        dt=0.0 if form.times is None else _time_step(file, form.times, num_frames),
        steady=problem.steady,
        conserved=problem.conserved,
        symmetries=("translation",) if problem.translation else (),
        equation=problem.equation,
    )
    assumptions += [*form.assumptions, *_assumed_domain(file, problem, task), *_unused(file, form, parameters)]
    start = 0.0 if form.times is None else float(form.times[0])
    return FileLayout(
        task,
        form.sources,
        coordinates,
        num_frames,
        count,
        parameters,
        problem.log_parameters,
        start,
        tuple(assumptions),
    )


def _assumed_domain(file: _File, problem: Problem, task: TaskSpec) -> list[str]:
    texts = []
    if problem.boundary == "unknown":
        texts.append(
            "the boundary is unknown: no axis is taken as periodic, and a model is told nothing about the ends"
        )
    if "velocity" in file.survey.arrays and "x-coordinate" not in file.survey.arrays:
        texts.append("there are no coordinates: cells of [0, 1] are taken")
    lengths = ", ".join(f"{axis.name} {axis.extent:.4g}" for axis in task.axes)
    texts.append(f"the domain reaches half a cell beyond its first and last points: lengths {lengths}")
    texts.append("units are not in the file: everything is taken as dimensionless")
    return texts


def _unused(file: _File, form: _Form, parameters: Mapping[str, float]) -> list[str]:
    """What else the file has, in words."""
    survey = file.survey
    used = {name.lower() for name in parameters} | BOOKKEEPING
    texts = []
    names = [n for n in (*file.attributes, *file.unread) if n.lower() not in used]
    if names:
        texts.append(f"not used: {show_names('attribute', list(dict.fromkeys(names)))}")
    varying = [n for n in survey.varying if n.lower() != "seed"]
    if varying:
        texts.append(f"not used, because they differ between groups: {show_names('value', varying)}")
    settings = [n for n in file.described if n not in used]
    if settings:
        texts.append(f"not used: {show_names('configured number', settings)}")
    read = {source.array.name for source in form.sources}
    coordinates = {"t", *(f"{c}-coordinate" for c in "txyz"), *(f"{{}}/grid/{c}" for c in "txyz")}
    others = [n.removeprefix("{}/") for n in survey.arrays if n not in read | coordinates]
    if others:
        texts.append(f"not used: {show_names('dataset', others)}")
    return texts


def _coordinate(file: _File, name: str, size: int) -> Float64:
    dataset = f"{{}}/grid/{name}" if file.survey.groups else f"{name}-coordinate"
    if dataset not in file.survey.arrays:
        if "velocity" in file.survey.arrays:
            return (np.arange(size) + 0.5) / size  # the incompressible files have no coordinates: cells of [0, 1]
        raise DataError(f"{file.path}: dataset '{dataset}' is missing")
    values = file.values(dataset)
    if len(values) != size or size < 2 or not np.isfinite(values).all() or (np.diff(values) <= 0).any():
        raise DataError(f"{file.path}: '{dataset}' must hold {size} increasing numbers, it has {len(values)} entries")
    return values


def _time_step(file: _File, times: Float64, num_frames: int) -> float:
    # The 1D files have the end of the last step as an extra entry.
    if len(times) not in (num_frames, num_frames + 1) or num_frames < 2:
        raise DataError(f"{file.path}: {len(times)} times for {num_frames} frames")
    times = times[:num_frames]
    steps = np.diff(times)
    if not np.isfinite(times).all() or (steps <= 0).any():
        raise DataError(f"{file.path}: its times are not increasing")
    mean = float((times[-1] - times[0]) / (num_frames - 1))
    # float32 times have steps that differ by their rounding
    if (np.abs(steps - mean) > 1e-2 * mean + 4e-7 * float(np.abs(times).max())).any():
        raise DataError(f"{file.path}: its time step is not constant", hint="windows need frames at equal distances")
    return mean


def _configuration(text: Any) -> dict[Any, Any]:
    """An embedded YAML configuration; empty if there is none that is safe to read."""
    # An anchor could be expanded without end; configurations of simulations have none.
    if not isinstance(text, str) or "&" in text or "*" in text:
        return {}
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        data = yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader, in C where there is one
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _numbers_of(configuration: dict[Any, Any]) -> dict[str, float]:
    """All numbers of a configuration by their (lower-case) key, whatever the nesting."""
    numbers: dict[str, float] = {}
    waiting = [configuration]
    while waiting and len(numbers) < 256:
        item = waiting.pop()
        for name, value in item.items():
            if isinstance(value, dict):
                waiting.append(value)
            elif isinstance(value, str) and re.fullmatch(r"\d+(\.\d*)?[eE][-+]?\d+", value):
                numbers.setdefault(str(name).lower(), float(value))  # YAML 1.1 reads 1e-3 as a text
            elif isinstance(value, int | float) and not isinstance(value, bool):
                numbers.setdefault(str(name).lower(), float(value))
    return numbers


class PdebenchReader(Hdf5Reader):
    """Windows from PDEBench files of one problem; parameters may differ from file to file.

    Trajectories are split file by file: the first go to train, then valid, the last to test, so that every split sees
    every file; the counts follow the fractions over all files together. problem: which one the files hold, where they
    do not say so themselves (`pdebench_problems.PROBLEMS`).
    """

    format_name = "pdebench"

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
        layouts: list[tuple[FileSurvey, FileLayout]] = []
        for survey in survey_files(listed):
            if isinstance(survey, DataError):
                raise survey
            layouts.append((survey, understand(survey, problem)))
            drop_hdf5(survey.key[0])  # opened for the coordinates; nothing stays open before a fork
        _check_same_problem(layouts)
        first = layouts[0][1]
        names = tuple(first.parameters)
        counts = [layout.num_trajectories for _, layout in layouts]
        flipped = (False,) * len(first.coordinates)
        self._files = tuple(
            TrajectoryFile(survey.key, layout.sources, layout.rows(names), flipped, survey.groups, survey.offsets)
            for survey, layout in layouts
        )
        self._rows = SplitRows(*split_counts(counts, valid_fraction, test_fraction))
        task = replace(first.task, parameters=tuple(_parameter(n, [layout for _, layout in layouts]) for n in names))
        assumptions = tuple(dict.fromkeys(text for _, layout in layouts for text in layout.assumptions))
        source = Source(task, first.coordinates, first.num_frames, self._rows.totals, first.start_time, assumptions)
        super().__init__(source, subsampling)


def _check_same_problem(layouts: list[tuple[FileSurvey, FileLayout]]) -> None:
    first_path, first = layouts[0][0].key[0], layouts[0][1]
    for survey, layout in layouts[1:]:
        path = survey.key[0]
        same = layout.task.name == first.task.name and layout.num_frames == first.num_frames
        same = same and layout.task.fields == first.task.fields
        same = same and [len(c) for c in layout.coordinates] == [len(c) for c in first.coordinates]
        same = same and all(
            np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(layout.coordinates, first.coordinates, strict=True)
        )
        if not same or not math.isclose(layout.task.dt, first.task.dt, rel_tol=1e-4):
            raise DataError(
                f"{path} and {first_path} differ in problem, grid, frames or time step",
                hint="files of one task must only differ in parameters; make them two tasks",
            )
        if layout.task.axes[0].boundary != first.task.axes[0].boundary or set(layout.parameters) != set(
            first.parameters
        ):
            raise DataError(f"{path} and {first_path} differ in boundary or in which parameters they have")


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
