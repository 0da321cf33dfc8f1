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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ups.errors import DataError
from ups.formats import hdf5
from ups.formats import pdebench_problems as problems
from ups.formats.base import FULL, SPACE, FileField, Source, SplitRows, Subsampling, check_alike, split_rows
from ups.formats.the_well import THE_WELL
from ups.spec.batch import Float64
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, Role, TaskSpec

MAX_POINTS = 1 << 20
MAX_CHANNELS = 32


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


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One file, understood: its task without parameters, where the fields are, and the values of its parameters.

    assumptions: what the task says that the file does not, and what of the file is not used; a sentence each.
    """

    survey: hdf5.FileSurvey
    task: TaskSpec
    form: _Form
    coordinates: tuple[Float64, ...]
    parameters: dict[str, float]
    log_parameters: tuple[str, ...]
    assumptions: tuple[str, ...]


def understand(survey: hdf5.FileSurvey, problem: str | None = None) -> FileLayout:
    """The layout of a surveyed file. problem: what its user says that it holds. Raises DataError for other files."""
    file = _File(survey)
    return _layout(file, _form_of(file), problem)


class _File:
    """A surveyed file. attributes: single numbers and texts of the file and, for files of groups, of the first group.

    unread: names of other attributes. settings, described: numbers of the embedded configuration, and of its part about
    the simulation; other parts are about plots and publication.
    """

    def __init__(self, survey: hdf5.FileSurvey) -> None:
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

    def form(
        self, name: str, fields: Sequence[tuple[Role, str, str]], times: str | None = None, assumption: str = ""
    ) -> _Form:
        """An arrangement. fields: role, dataset and axes, where a digit is an axis of that many components."""
        sizes: dict[str, int] = {}
        sources: list[FileField] = []
        names: list[FieldSpec] = []
        for role, dataset, axes in fields:
            array = self.survey.arrays.get(dataset)
            shape = array.shape if array is not None else ()
            fits = len(shape) == len(axes) and all(
                n == (int(letter) if letter.isdigit() else sizes.setdefault(letter, n))
                for letter, n in zip(axes, shape, strict=True)
            )
            if array is None or not fits or "X" not in axes:
                raise DataError(f"{self.path}: dataset '{dataset}' is missing, or does not fit the others: {shape}")
            sources.append(FileField(role, array, re.sub(r"\d", "C", axes)))
            count = math.prod(n for letter, n in zip(axes, shape, strict=True) if letter not in "NTXYZ")
            plain = dataset.removeprefix("{}/")
            names += [FieldSpec(plain if count == 1 else f"{plain}_{i}", role=role) for i in range(count)]
        space = [sizes[letter] for letter in SPACE if letter in sizes]
        shape = (sizes.get("N", len(self.survey.groups)), sizes.get("T", 0), *space)
        values = None if times is None else self.values(times, first_row=True)
        return _Form(name, tuple(sources), shape, values, tuple(names), (assumption,) if assumption else ())

    def values(self, name: str, *, first_row: bool = False) -> Float64:
        """A small dataset as float64, or of two dimensions the first row; of the first group for a name with '{}'."""
        array = self.survey.arrays.get(name)
        if array is None or math.prod(array.shape) > MAX_POINTS:
            raise DataError(f"{self.path}: dataset '{name}' is missing, or has more than {MAX_POINTS} entries")
        if "{}" in name:
            array = hdf5.array_of_group(array, self.survey.groups[0], self.survey.offsets, 0)
        lengths = (1, *array.shape[1:]) if first_row and len(array.shape) == 2 else array.shape
        region = tuple(slice(0, n, 1) for n in lengths)
        return np.array(hdf5.read_region(self.survey.key, array, region), np.float64).reshape(-1)

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


def _form_of(file: _File) -> _Form:
    """How the datasets of a file are arranged. Raises DataError for a file that is not of PDEBench."""
    arrays = file.survey.arrays
    if file.survey.groups:
        shape = arrays["{}/data"].shape if "{}/data" in arrays else ()
        if len(shape) not in (3, 4) or shape[-1] > MAX_CHANNELS:
            raise DataError(
                f"{file.path}: its groups must hold 'data' of 3 or 4 dimensions, the last of at most {MAX_CHANNELS} "
                f"channels, got {shape}"
            )
        dims = len(shape) - 2
        fields: list[tuple[Role, str, str]] = [("state", "{}/data", "T" + SPACE[:dims] + "C")]
        assumed = "coordinates and times of the first group are taken for all"
        return file.form(f"groups{dims}d{shape[-1]}", fields, "{}/grid/t", assumed)
    if {"tensor", "nu"} <= arrays.keys():
        steady = "there are no times: taken as steady, with 'nu' given and 'tensor' asked for"
        return file.form("darcy", [("static", "nu", "NXY"), ("target", "tensor", "N1XY")], None, steady)
    if "tensor" in arrays:
        return file.form("tensor", [("state", "tensor", "NTX")], "t-coordinate")
    if {"density", "pressure", "Vx"} <= arrays.keys():
        dims = len(arrays["density"].shape) - 2
        names = ["density", "pressure", *("Vx", "Vy", "Vz")[:dims]]
        return file.form(f"flow{dims}d", [("state", name, "NT" + SPACE[:dims]) for name in names], "t-coordinate")
    if "velocity" in arrays:
        fields = [("state", "velocity", "NTXY2"), ("state", "particles", "NTXY1"), ("static", "force", "NXY2")]
        return file.form("incompressible", fields, "t", "the times of the first trajectory are taken for all")
    raise DataError(
        f"{file.path} is not a PDEBench file: its datasets are {', '.join(sorted(arrays))[:200] or 'none'}",
        hint="`ups init DIR --data FILE` describes files of any other layout (docs/own-data.md)",
    )


def _layout(file: _File, form: _Form, stated: str | None) -> FileLayout:
    """Assembles the task."""
    num_frames, space = form.shape[1], form.shape[2:]
    coordinates = tuple(_coordinate(file, letter.lower(), n) for letter, n in zip(SPACE, space, strict=False))
    extents = [float((c[-1] - c[0]) * len(c) / (len(c) - 1)) for c in coordinates]
    numbers = file.numbers
    named = tuple(dict.fromkeys((*file.attributes, *file.unread)))
    evidence = problems.Evidence(file.name, file.output_path, form.name, named, file.described, extents)
    problem, reason = problems.recognize(evidence, stated)
    assumptions = [reason]
    if problem is None:
        problem = problems.unknown_problem(form.name, form.names, numbers, steady=form.times is None)
        fitting = [p.name for p in problems.PROBLEMS.values() if p.form == form.name]
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
    logs = problem.log_parameters
    return FileLayout(file.survey, task, form, coordinates, parameters, logs, tuple(assumptions))


def _assumed_domain(file: _File, problem: problems.Problem, task: TaskSpec) -> list[str]:
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
    used = {name.lower() for name in parameters} | problems.BOOKKEEPING
    texts = []
    names = [n for n in (*file.attributes, *file.unread) if n.lower() not in used]
    if names:
        texts.append(f"not used: {problems.show_names('attribute', list(dict.fromkeys(names)))}")
    varying = [n for n in survey.varying if n.lower() != "seed"]
    if varying:
        texts.append(f"not used, because they differ between groups: {problems.show_names('value', varying)}")
    settings = [n for n in file.described if n not in used]
    if settings:
        texts.append(f"not used: {problems.show_names('configured number', settings)}")
    read = {source.array.name for source in form.sources}
    coordinates = {"t", *(f"{c}-coordinate" for c in "txyz"), *(f"{{}}/grid/{c}" for c in "txyz")}
    others = [n.removeprefix("{}/") for n in survey.arrays if n not in read | coordinates]
    if others:
        texts.append(f"not used: {problems.show_names('dataset', others)}")
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


class PdebenchReader(hdf5.Hdf5Reader):
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
        layouts = [understand(survey, problem) for survey in hdf5.survey_all(listed, "pdebench")]
        for layout in layouts:
            hdf5.drop_hdf5(layout.survey.key[0])  # opened for the coordinates; nothing stays open before a fork
        first = layouts[0]
        check_alike([(layout.survey.key[0], _compared(layout, first)) for layout in layouts])
        names = tuple(first.parameters)
        counts = [layout.form.shape[0] for layout in layouts]
        flipped = (False,) * len(first.coordinates)
        self._files = tuple(
            hdf5.Hdf5File(
                layout.form.sources,
                np.tile(np.array([layout.parameters[name] for name in names], np.float32), (count, 1)),
                flipped,
                layout.survey.key,
                layout.survey.groups,
                layout.survey.offsets,
            )
            for layout, count in zip(layouts, counts, strict=True)
        )
        self._rows = SplitRows(counts, split_rows(counts, valid_fraction, test_fraction))
        task = replace(first.task, parameters=tuple(_parameter(name, layouts) for name in names))
        assumptions = tuple(dict.fromkeys(text for layout in layouts for text in layout.assumptions))
        start = 0.0 if first.form.times is None else float(first.form.times[0])
        source = Source(task, first.coordinates, first.form.shape[1], self._rows.totals, start, assumptions)
        super().__init__(source, subsampling)


def _compared(layout: FileLayout, first: FileLayout) -> dict[str, object]:
    """What must be equal in the files of one task."""
    pairs = zip(layout.coordinates, first.coordinates, strict=False)
    return {
        "problems": (layout.task.name, layout.task.fields, layout.task.axes[0].boundary, set(layout.parameters)),
        "grids or frames": layout.form.shape[1:],
        "points": all(a.shape == b.shape and np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs),
        "time steps": math.isclose(layout.task.dt, first.task.dt, rel_tol=1e-4),
    }


def _parameter(name: str, layouts: list[FileLayout]) -> ParameterSpec:
    values = [layout.parameters[name] for layout in layouts]
    log = name in layouts[0].log_parameters and min(values) > 0
    return ParameterSpec(name, minimum=min(values), maximum=max(values), scale="log" if log else "linear")


class PdebenchFormat:
    """HDF5 files of PDEBench, and NetCDF files that follow it."""

    def recognizes(self, path: Path) -> bool:
        """Whether this is a regular file that begins as HDF5 does, and not one of The Well."""
        return hdf5.first_bytes(path) == hdf5.HDF5_MAGIC and not THE_WELL.recognizes(path)

    open = staticmethod(PdebenchReader)


PDEBENCH = PdebenchFormat()
