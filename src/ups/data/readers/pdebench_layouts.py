"""What each PDEBench file means: which dataset holds which field along which axes, and the physics that is not in it.

PDEBench files say nothing about boundaries, conserved fields or the equation; that knowledge is the table here. The
layout is recognised by the datasets and attributes that are there, and by the file name only where two problems look
alike. Axes letters: N trajectory, T time, C channel, X Y Z space.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ups.data.readers.hdf5_arrays import read_region
from ups.data.readers.hdf5_guard import FileKey
from ups.data.readers.hdf5_survey import ArraySurvey, FileSurvey
from ups.errors import DataError
from ups.spec.batch import Float64
from ups.spec.task import AxisSpec, Boundary, FieldSpec, Role, TaskSpec

MAX_POINTS = 1 << 20
_SPACE = "XYZ"


@dataclass(frozen=True, slots=True)
class FieldSource:
    """A dataset and the meaning of its axes; '{}' in the name stands for the group of a trajectory."""

    role: Role
    dataset: str
    axes: str


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One file, understood: its task without parameters, where the fields are, and the values of its parameters."""

    task: TaskSpec
    sources: tuple[FieldSource, ...]
    coordinates: tuple[Float64, ...]
    num_frames: int
    num_trajectories: int
    parameters: dict[str, float]
    log_parameters: tuple[str, ...] = ()
    start_time: float = 0.0


@dataclass(frozen=True, slots=True)
class _Physics:
    """What is known about a problem beyond its file."""

    name: str
    fields: tuple[FieldSpec, ...]
    boundary: Boundary
    equation: str
    parameters: tuple[str, ...]
    log_parameters: tuple[str, ...] = ()
    conserved: tuple[str, ...] = ()
    translation: bool = False
    steady: bool = False


_U = (FieldSpec("u"),)
_ADVECTION = _Physics(
    "advection1d", _U, "periodic", "u_t + beta u_x = 0", ("beta",), conserved=("u",), translation=True
)
_BURGERS = _Physics(
    "burgers1d",
    _U,
    "periodic",
    "u_t + (u^2/2)_x = (Nu/pi) u_xx",
    ("Nu",),
    ("Nu",),
    conserved=("u",),
    translation=True,
)
_REACDIFF = _Physics(
    "reacdiff1d", _U, "periodic", "u_t = Nu u_xx + rho u (1 - u)", ("Nu", "rho"), ("Nu", "rho"), translation=True
)
_DIFFSORP = _Physics(
    "diffsorp1d",
    _U,
    "dirichlet",
    "u_t = D / R(u) u_xx; u(0) = 1, u(1) = D u_x",
    ("D", "por", "rho_s", "k_f", "n_f"),
)
_DIFFREACT = _Physics(
    "diffreact2d",
    (FieldSpec("u"), FieldSpec("v")),
    "neumann",
    "u_t = Du lap u + u - u^3 - k - v; v_t = Dv lap v + u - v",
    ("Du", "Dv", "k"),
)
_RDB = _Physics("swe2d", (FieldSpec("height"),), "open", "shallow water, radial dam break, height only", ("gravity",))
_DARCY = _Physics(
    "darcy2d",
    (FieldSpec("a", role="static"), FieldSpec("u", role="target")),
    "dirichlet",
    "-div(a grad u) = beta",
    ("beta",),
    ("beta",),
    steady=True,
)
_INCOMPRESSIBLE = _Physics(
    "ns_incompressible2d",
    (FieldSpec("velocity", tensor_rank=1), FieldSpec("particles"), FieldSpec("force", role="static", tensor_rank=1)),
    "wall",
    "incompressible Navier-Stokes with a force and passive particles",
    ("NU",),
)


def understand(key: FileKey, survey: FileSurvey) -> FileLayout:
    """The layout of a surveyed file. Raises DataError if it is none of PDEBench's."""
    names = set(survey.datasets)
    if survey.groups:
        build: Callable[[_File], FileLayout] = _grouped
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
            f"{key[0]} is not a PDEBench file: its datasets are {', '.join(sorted(names))[:200] or 'none'}",
            hint="stores end in .zarr; PDEBench layouts are listed in docs/data.md",
        )
    return build(_File(key, survey))


@dataclass
class _File:
    """A surveyed file with its attributes and the text of its embedded configuration."""

    key: FileKey
    survey: FileSurvey
    name: str = ""
    settings: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = Path(self.key[0]).name
        self.settings = _numbers_of(self.survey.attributes.get("config"))

    def array(self, name: str, num_dims: int) -> ArraySurvey:
        found = self.survey.datasets.get(name) or self.survey.members.get(name)
        if found is None or len(found.shape) != num_dims:
            raise DataError(f"{self.key[0]}: dataset '{name}' with {num_dims} dimensions is missing")
        return found

    def values(self, name: str, region: tuple[slice, ...] | None = None) -> Float64:
        """A small dataset as float64; of the first group where the name has a '{}'."""
        array = self.survey.datasets.get(name) or self.survey.members.get(name)
        if array is None or math.prod(array.shape) > MAX_POINTS:
            raise DataError(f"{self.key[0]}: dataset '{name}' is missing or absurdly long")
        if "{}" in name:
            array = member_of(self.survey, name, 0)
        full = tuple(slice(0, n, 1) for n in array.shape)
        return np.array(read_region(self.key, array, region or full), np.float64).reshape(-1)

    def parameter(self, name: str) -> float | None:
        """From the attributes, else the embedded configuration, else the file name."""
        attributes = {k.lower(): v for k, v in self.survey.attributes.items() if isinstance(v, float)}
        for source in (attributes, self.settings):
            if name.lower() in source:
                return source[name.lower()]
        found = re.search(rf"(?:^|[_-]|Sols_){re.escape(name)}(\d+(?:\.\d*)?(?:e[-+]?\d+)?)", self.name, re.IGNORECASE)
        return float(found.group(1)) if found else None


def member_of(survey: FileSurvey, name: str, group: int) -> ArraySurvey:
    """The dataset of one trajectory group."""
    form = survey.members[name]
    offset = survey.offsets[name][group] if form.offset is not None else None
    label = name.replace("{}", survey.groups[group])
    return ArraySurvey(label, form.shape, form.dtype, offset, form.chunks, form.filters)


def _single(file: _File) -> FileLayout:
    tensor = file.array("tensor", 3)
    attributes = {k.lower() for k in file.survey.attributes}
    name = file.name.lower()
    if {"nu", "rho"} <= attributes or "reacdiff" in name:
        physics = _REACDIFF
    elif "nu" in attributes or "burgers" in name:
        physics = _BURGERS
    elif "beta" in attributes or "advection" in name:
        physics = _ADVECTION
    else:
        raise DataError(
            f"{file.key[0]} has a 'tensor', but neither its attributes nor its name tell which equation it solves",
            hint="PDEBench's own files have an attribute beta (advection), Nu (Burgers), or Nu and rho",
        )
    times = file.values("t-coordinate")
    return _layout(file, physics, (FieldSource("state", "tensor", "NTX"),), tensor.shape, times)


def _darcy(file: _File) -> FileLayout:
    shape = file.array("tensor", 4).shape
    if shape[1] != 1 or file.array("nu", 3).shape != (shape[0], *shape[2:]):
        raise DataError(f"{file.key[0]}: 'nu' and 'tensor' of a Darcy file do not fit together")
    sources = (FieldSource("static", "nu", "NXY"), FieldSource("target", "tensor", "NCXY"))
    return _layout(file, _DARCY, sources, (shape[0], 0, *shape[2:]), None)


def _compressible(file: _File) -> FileLayout:
    dims = len(file.array("density", len(file.survey.datasets["density"].shape)).shape) - 2
    if not 1 <= dims <= 3:
        raise DataError(f"{file.key[0]}: 'density' has no 1 to 3 space axes")
    names = ["density", "pressure", *("Vx", "Vy", "Vz")[:dims]]
    shape = file.array("density", dims + 2).shape
    if any(file.array(name, dims + 2).shape != shape for name in names):
        raise DataError(f"{file.key[0]}: its fields differ in shape")
    periodic = "trans" not in file.name.lower()
    physics = _Physics(
        f"cfd{dims}d",
        (FieldSpec("density"), FieldSpec("pressure"), FieldSpec("velocity", tensor_rank=1)),
        "periodic" if periodic else "open",
        "compressible Navier-Stokes",
        ("eta", "zeta", "M") if dims > 1 else ("eta", "zeta"),
        ("eta", "zeta"),
        conserved=("density",) if periodic else (),
        translation=periodic,
    )
    axes = "NT" + _SPACE[:dims]
    sources = tuple(FieldSource("state", name, axes) for name in names)
    return _layout(file, physics, sources, shape, file.values("t-coordinate"))


def _incompressible(file: _File) -> FileLayout:
    velocity = file.array("velocity", 5).shape
    if (
        velocity[4] != 2
        or file.array("particles", 5).shape != (*velocity[:4], 1)
        or file.array("force", 4).shape != (velocity[0], *velocity[2:])
    ):
        raise DataError(f"{file.key[0]}: 'velocity', 'particles' and 'force' do not fit together")
    times = file.array("t", 2)
    if times.shape != velocity[:2]:
        raise DataError(f"{file.key[0]}: 't' has shape {times.shape}, not that of the frames {velocity[:2]}")
    first = file.values("t", (slice(0, 1, 1), slice(0, times.shape[1], 1)))
    sources = (
        FieldSource("state", "velocity", "NTXYC"),
        FieldSource("state", "particles", "NTXYC"),
        FieldSource("static", "force", "NXYC"),
    )
    return _layout(file, _INCOMPRESSIBLE, sources, velocity[:4], first)


def _grouped(file: _File) -> FileLayout:
    data = file.survey.members.get("{}/data")
    if data is None or len(data.shape) not in (3, 4):
        raise DataError(f"{file.key[0]}: its groups hold no 'data' of 3 or 4 dimensions")
    forms = {(3, 1): _DIFFSORP, (4, 2): _DIFFREACT, (4, 1): _RDB}
    physics = forms.get((len(data.shape), data.shape[-1]))
    if physics is None:
        raise DataError(f"{file.key[0]}: no PDEBench problem has data of shape {data.shape}")
    axes = "T" + _SPACE[: len(data.shape) - 2] + "C"
    shape = (len(file.survey.groups), *data.shape[:-1])
    return _layout(file, physics, (FieldSource("state", "{}/data", axes),), shape, file.values("{}/grid/t"))


def _layout(
    file: _File, physics: _Physics, sources: tuple[FieldSource, ...], shape: tuple[int, ...], times: Float64 | None
) -> FileLayout:
    """Assembles the task. shape: (trajectories, frames, *space)."""
    count, num_frames, space = shape[0], shape[1], shape[2:]
    coordinates = tuple(_coordinate(file, letter.lower(), n) for letter, n in zip(_SPACE, space, strict=False))
    axes = tuple(
        AxisSpec(letter.lower(), physics.boundary, float((c[-1] - c[0]) * len(c) / (len(c) - 1)))
        for letter, c in zip(_SPACE, coordinates, strict=False)
    )
    found: dict[str, float] = {}
    for name in physics.parameters:
        value = file.parameter(name)
        if value is not None and math.isfinite(value):
            found[name] = value
    task = TaskSpec(
        name=physics.name,
        fields=physics.fields,
        axes=axes,
        dt=0.0 if times is None else _time_step(file, times, num_frames),
        steady=physics.steady,
        conserved=physics.conserved,
        symmetries=("translation",) if physics.translation else (),
        equation=physics.equation,
    )
    start = 0.0 if times is None else float(times[0])
    return FileLayout(task, sources, coordinates, num_frames, count, found, physics.log_parameters, start)


def _coordinate(file: _File, name: str, size: int) -> Float64:
    dataset = f"{{}}/grid/{name}" if file.survey.groups else f"{name}-coordinate"
    if dataset not in file.survey.datasets and dataset not in file.survey.members:
        if "velocity" in file.survey.datasets:
            return (np.arange(size) + 0.5) / size  # the incompressible files have no coordinates: cells of [0, 1]
        raise DataError(f"{file.key[0]}: dataset '{dataset}' is missing")
    values = file.values(dataset)
    if len(values) != size or size < 2 or not np.isfinite(values).all() or (np.diff(values) <= 0).any():
        raise DataError(f"{file.key[0]}: '{dataset}' must hold {size} increasing numbers, it has {len(values)} entries")
    return values


def _time_step(file: _File, times: Float64, num_frames: int) -> float:
    # The 1D files have the end of the last step as an extra entry.
    if len(times) not in (num_frames, num_frames + 1) or num_frames < 2:
        raise DataError(f"{file.key[0]}: {len(times)} times for {num_frames} frames")
    times = times[:num_frames]
    steps = np.diff(times)
    if not np.isfinite(times).all() or (steps <= 0).any():
        raise DataError(f"{file.key[0]}: its times are not increasing")
    mean = float((times[-1] - times[0]) / (num_frames - 1))
    # float32 times have steps that differ by their rounding
    if (np.abs(steps - mean) > 1e-2 * mean + 4e-7 * float(np.abs(times).max())).any():
        raise DataError(f"{file.key[0]}: its time step is not constant", hint="windows need frames at equal distances")
    return mean


def _numbers_of(text: Any) -> dict[str, float]:
    """All numbers of an embedded YAML configuration by their (lower-case) key, whatever the nesting."""
    if not isinstance(text, str):
        return {}
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    # An anchor could be expanded without end; configurations of simulations have none.
    if "&" in text or "*" in text:
        return {}
    try:
        data = yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader, in C where there is one
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    found: dict[str, float] = {}
    waiting = [data]
    while waiting and len(found) < 256:
        item = waiting.pop()
        if not isinstance(item, dict):
            continue
        for name, value in item.items():
            if isinstance(value, dict):
                waiting.append(value)
            elif isinstance(value, str) and re.fullmatch(r"\d+(\.\d*)?e[-+]?\d+", value):
                found.setdefault(str(name).lower(), float(value))  # YAML 1.1 reads 1e-3 as a text
            elif isinstance(value, int | float) and not isinstance(value, bool):
                found.setdefault(str(name).lower(), float(value))
    return found
