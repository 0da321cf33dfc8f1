"""Files of points, cells and fields: one file is one trajectory. Formats: `.npz`, VTKHDF and XDMF (`mesh_hdf5`).

The names of an `.npz`, which the others are read as, are `points` (N, D), `cells` (M, K) or `cells_KIND`, `boundary`
(N,), `times` (T,) and `parameter_NAME` (). Any other array is a field, by its shape: (T, N) or (T, N, K) with
times, (N,) or (N, K) without. Shape legend: N points, D axes, T frames, K components or nodes of a cell, M cells.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from ups.errors import DataError
from ups.formats.base import MAX_READ_BYTES, Array
from ups.formats.container import ZIP_MAGIC, Container, open_numpy
from ups.formats.hdf5 import first_bytes, starts_as_hdf5
from ups.formats.mesh_hdf5 import CELL_KINDS, read_vtkhdf, read_xdmf, write_vtkhdf
from ups.record.files import write_file_atomically
from ups.spec.batch import Float64

MAX_POINTS = 1 << 24
MAX_COMPONENTS = 9  # of a tensor in 3D
PARAMETER, CELLS = "parameter_", "cells"
_OWN = ("points", "boundary", "times")
MESH_SUFFIXES = (".npz", ".vtkhdf", ".xdmf", ".xmf")
# What the programs in the hint read.
_CONVERTED = {
    "pyvista": (".vtu", ".vtk", ".vtp", ".pvtu", ".pvd", ".case", ".foam", ".cgns", ".exo", ".e", ".ex2"),
    "meshlane": (".msh", ".med", ".inp", ".mesh", ".nas", ".bdf", ".su2", ".ugrid", ".obj", ".off", ".ply", ".stl"),
}


@dataclass(frozen=True, slots=True)
class MeshFile:
    """One trajectory on points.

    points: (N, D). cells: blocks of node numbers (M, K), one for each kind in `cell_kinds` (`CELL_KINDS`); None for a
    cloud of points. boundary: (N,) kind of each boundary point, 0 inside; None if the file does not say. fields: (T, N)
    or (T, N, K) of what changes in time, (N,) or (N, K) of what does not. times: (T,), None if nothing changes.
    """

    points: Float64
    fields: Mapping[str, Array]
    times: Float64 | None = None
    cells: list[npt.NDArray[np.int64]] | None = None
    cell_kinds: tuple[str, ...] = ()
    boundary: npt.NDArray[np.int64] | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MeshHeader:
    """What stands in a file, without its values. fields: name -> (whether it changes in time, number of components; 0
    for a scalar)."""

    num_points: int
    num_dims: int
    num_frames: int
    fields: Mapping[str, tuple[bool, int]]
    parameters: tuple[str, ...]
    has_boundary: bool


def read_mesh_file(path: str | Path) -> MeshFile:
    """Points, cells and fields of one file. Raises DataError, which says what is wrong with it."""
    path = Path(path)
    kind = _format(path)
    arrays = _read_npz(path) if kind == "npz" else _read_hdf5(path, kind)
    header = _header(path, {name: values.shape for name, values in arrays.items()})
    blocks = {name: values for name, values in arrays.items() if _is_cells(name)}
    mesh = MeshFile(
        points=arrays["points"].astype(np.float64),
        fields={name: arrays[name] for name in header.fields},
        times=arrays["times"].astype(np.float64) if "times" in arrays else None,
        cells=[_integers(path, name, block) for name, block in blocks.items()] or None,
        cell_kinds=tuple(_cell_kind(path, name, block, header.num_dims) for name, block in blocks.items()),
        boundary=_integers(path, "boundary", arrays["boundary"]) if header.has_boundary else None,
        parameters={name: float(arrays[f"{PARAMETER}{name}"].flat[0]) for name in header.parameters},
    )
    _check_values(path, mesh)
    return mesh


def read_header(path: str | Path) -> MeshHeader:
    """Shapes and names of one file: of an `.npz` no values are read. Raises DataError."""
    path = Path(path)
    if (kind := _format(path)) == "npz":
        return _header(path, {name: variable.shape for name, variable in _open(path).variables.items()})
    return _header(path, {name: values.shape for name, values in _read_hdf5(path, kind).items()})


def write_mesh_file(path: Path, mesh: MeshFile) -> None:
    """Write a trajectory as `.npz`, or as VTKHDF for ParaView; the file appears when it is whole."""
    buffer, cells = io.BytesIO(), dict(zip(mesh.cell_kinds, mesh.cells or (), strict=True))
    known = {} if mesh.boundary is None else {"boundary": mesh.boundary}
    if path.suffix == ".vtkhdf":
        with h5py.File(buffer, "w") as file:
            write_vtkhdf(file, mesh.points, cells, {**mesh.fields, **known}, mesh.times, mesh.parameters)
    else:
        arrays: dict[str, Any] = {"points": mesh.points, **mesh.fields, **known}
        arrays |= {f"{CELLS}_{kind}": block for kind, block in cells.items()}
        arrays |= {f"{PARAMETER}{name}": np.float64(value) for name, value in mesh.parameters.items()}
        arrays |= {} if mesh.times is None else {"times": mesh.times}
        np.savez(buffer, **arrays)
    write_file_atomically(path, buffer.getvalue())


def _format(path: Path) -> str:
    """npz, vtkhdf or xdmf, by the first bytes. Raises DataError for others, with what converts them."""
    start, suffix = first_bytes(path, 520), path.suffix.lower()
    for program, suffixes in _CONVERTED.items():
        if suffix in suffixes:
            saved = f"save('{path.stem}.vtkhdf')" if program == "pyvista" else f"write('{path.stem}.xdmf')"
            raise DataError(
                f"{path} is a {suffix} file, which is not read",
                hint=f"pip install {program} h5py; in Python: import {program}; {program}.read('{path.name}').{saved}",
            )
    if start.startswith(ZIP_MAGIC):
        return "npz"
    if starts_as_hdf5(start) and suffix not in (".h5", ".hdf5"):
        return "vtkhdf"
    if start.lstrip().startswith(b"<") and suffix in (".xdmf", ".xmf"):
        return "xdmf"
    raise DataError(
        f"{path} is not a mesh file that is read, or cannot be opened",
        hint=f"{', '.join(MESH_SUFFIXES)} are; meshlane and pyvista convert others: "
        "pyvista.read(FILE).save('NEW.vtkhdf')",
    )


def _read_hdf5(path: Path, kind: str) -> dict[str, Array]:
    try:
        return read_vtkhdf(path) if kind == "vtkhdf" else read_xdmf(path)
    except (ValueError, IndexError, OverflowError) as error:  # numbers that are no sizes or places
        raise DataError(f"{path} is damaged: {str(error)[:200]}") from error


def _open(path: Path) -> Container:
    container = open_numpy(path)
    if container.left_out:
        raise DataError(f"{path}: it has {container.left_out[0]}", hint="save arrays of numbers with np.savez")
    return container


def _read_npz(path: Path) -> dict[str, Array]:
    container = _open(path)
    total = sum(variable.size for variable in container.variables.values()) * 8
    if total > MAX_READ_BYTES:
        raise DataError(
            f"{path}: its arrays would take {total / 2**30:.1f} GiB, more than {MAX_READ_BYTES >> 30} GiB",
            hint="write fewer frames to a file, as trajectories of their own",
        )
    arrays = {
        name: np.array(container.read(name, tuple(slice(0, n, 1) for n in variable.shape)))
        for name, variable in container.variables.items()
    }
    container.close()
    return arrays


def _header(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> MeshHeader:
    if "points" not in shapes:
        raise DataError(
            f"{path} has no array 'points'; it has {', '.join(shapes)[:200] or 'no arrays'}",
            hint="'points' holds the coordinates: (number of points, 1 to 3 axes)",
        )
    points = shapes["points"]
    if len(points) != 2 or not 1 <= points[1] <= 3 or not 1 <= points[0] <= MAX_POINTS:
        raise DataError(
            f"{path}: 'points' has the shape {points}",
            hint=f"it must be (N, D) with 1 to {MAX_POINTS:,} points and 1 to 3 axes",
        )
    times = shapes.get("times")
    if times is not None and (len(times) != 1 or not times[0]):
        raise DataError(f"{path}: 'times' has the shape {times}", hint="it must be (T,): the time of each frame")
    frames = times[0] if times else 0
    if shapes.get("boundary", points[:1]) != points[:1]:
        raise DataError(
            f"{path}: 'boundary' has the shape {shapes['boundary']}, and there are {points[0]} points",
            hint="it holds a whole number for each point: 0 inside, else the kind of boundary",
        )
    parameters, fields = [], {}
    for name, shape in shapes.items():
        if name in _OWN or _is_cells(name):
            continue
        if name.startswith(PARAMETER):
            if math.prod(shape) != 1:
                raise DataError(f"{path}: '{name}' has the shape {shape}", hint="a parameter is one number")
            parameters.append(name.removeprefix(PARAMETER))
        else:
            fields[name] = _field_form(path, name, shape, points[0], frames)
    if not fields:
        raise DataError(f"{path} has no fields", hint="a field has a value for each point, with times for each frame")
    return MeshHeader(points[0], points[1], frames, fields, tuple(parameters), "boundary" in shapes)


def _field_form(path: str | Path, name: str, shape: tuple[int, ...], points: int, frames: int) -> tuple[bool, int]:
    """(whether a field changes in time, its components; 0 for a scalar)."""
    for lead, moving in (((frames, points), True), ((points,), False)):
        tail = shape[len(lead) :]
        if shape[: len(lead)] == lead and len(tail) < 2 and 1 <= math.prod(tail) <= MAX_COMPONENTS:
            return moving, tail[0] if tail else 0
    expected = f"({frames}, {points}) or ({points},)" if frames else f"({points},), or 'times' for its frames"
    raise DataError(
        f"{path}: field '{name}' has the shape {shape}; expected {expected}, and up to {MAX_COMPONENTS} components "
        "in a last dimension",
        hint="every field needs a value for each point",
    )


def _is_cells(name: str) -> bool:
    return name == CELLS or name.startswith(f"{CELLS}_")


def _cell_kind(path: Path, name: str, block: Array, dims: int) -> str:
    """The kind that the name says, else the linear one with so many nodes in so many dimensions."""
    nodes = block.shape[1] if block.ndim == 2 else -1
    named = name.removeprefix(f"{CELLS}_")
    fitting = [kind for kind, row in CELL_KINDS.items() if row[1] == nodes and row[2] <= dims]
    if named in CELL_KINDS:
        fitting = [named] if CELL_KINDS[named][1] == nodes else []
    if not fitting:
        raise DataError(
            f"{path}: '{name}' has the shape {block.shape}, which fits no kind of cells in {dims}D",
            hint=f"it must be (M, nodes of a cell); kinds are {', '.join(CELL_KINDS)}",
        )
    return max(fitting, key=lambda kind: CELL_KINDS[kind][2])


def _integers(path: Path, name: str, values: Array) -> npt.NDArray[np.int64]:
    whole = values.astype(np.int64) if np.isfinite(values).all() else None
    if whole is None or (whole != values).any() or abs(whole).max(initial=0) > 1 << 31:
        raise DataError(f"{path}: '{name}' must hold whole numbers")
    return whole


def _check_values(path: Path, mesh: MeshFile) -> None:
    """Raises DataError for what no format may say: points that are nowhere, cells of points that are not there."""
    arrays = {"points": mesh.points, **mesh.fields} | ({} if mesh.times is None else {"times": mesh.times})
    for name, values in arrays.items():
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            where = tuple(bad[0].tolist())
            raise DataError(f"{path}: '{name}' has {len(bad)} values that are not finite, the first at {where}")
    for name, value in mesh.parameters.items():
        if not math.isfinite(value):
            raise DataError(f"{path}: parameter '{name}' is {value}")
    if mesh.times is not None and (np.diff(mesh.times) <= 0).any():
        frame = int(np.argmax(np.diff(mesh.times) <= 0)) + 1
        raise DataError(f"{path}: time {frame} ({mesh.times[frame]:g}) is not after the one before it")
    for kind, block in zip(mesh.cell_kinds, mesh.cells or (), strict=True):
        outside = (block < 0) | (block >= len(mesh.points))
        if outside.any():
            raise DataError(
                f"{path}: a {kind} names point {int(block[outside][0])}, and there are {len(mesh.points)} points",
                hint="node numbers begin with 0",
            )
    if mesh.boundary is not None and (mesh.boundary < 0).any():
        raise DataError(f"{path}: 'boundary' has negative numbers", hint="0 is inside, else the kind of boundary")
