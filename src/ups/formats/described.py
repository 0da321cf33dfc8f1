"""Reader of files that come with a description: NumPy, HDF5, NetCDF, Zarr, as trajectories of one task.

`understand` compares a description with a file: which array is which field, coordinates, times, parameters. A statement
that the file cannot fulfil is a DataError, what the description leaves open comes from the file, and what of the file
is not used is listed in the assumptions. A `Container` gives the values. Only the frames of a window are read, so files
may be larger than memory.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ups.config.description import (
    CHANNEL,
    COMPONENT,
    TIME,
    TRAJECTORY,
    DescribedAxis,
    DescribedField,
    DescribedParameter,
    TaskDescription,
)
from ups.errors import DataError
from ups.formats.base import (
    FLOAT32_HINT,
    FULL,
    SPACE,
    SPLITS,
    Array,
    FileField,
    FilesReader,
    Source,
    SplitRows,
    Subsampling,
    TrajectoryFile,
    check_alike,
    check_distinct,
    split_rows,
)
from ups.formats.container import Container, Variable
from ups.formats.mesh_grid import MeshContainer, completed
from ups.formats.open_container import open_containers
from ups.record.text import printable
from ups.spec.batch import Float64
from ups.spec.task import AxisSpec, BoundaryValue, FieldSpec, ParameterSpec, TaskSpec

TIME_NAMES = ("time", "t", "times", "t-coordinate")
STEP_NAMES = frozenset(
    {"dt", "delta_t", "deltat", "time_step", "timestep", "dt_save", "save_dt", "saveat", "sampling_time", "frame_dt"}
)
END_NAMES = frozenset({"t_end", "tend", "t_final", "tfinal", "final_time", "end_time", "t_max", "tmax"})
# Attributes that describe how numbers are written, or are read as something else than a parameter.
NOT_PARAMETERS = frozenset(
    {"_FillValue", "missing_value", "scale_factor", "add_offset", "valid_min", "valid_max", "valid_range"}
    | {"actual_range", "_ChunkSizes", "least_significant_digit", "flag_values", "flag_masks"}
)
FLOAT32 = float(np.finfo(np.float32).eps)
_HINT = "correct the task.yaml, or let `ups init DIR --data FILE` write one"


@dataclass(frozen=True, slots=True)
class DescribedLayout:
    """One file, understood. parameters (N, P): of each trajectory. flipped: axes whose coordinates fall."""

    task: TaskSpec
    sources: tuple[FileField, ...]
    coordinates: tuple[Float64, ...]
    flipped: tuple[bool, ...]
    num_trajectories: int
    num_frames: int
    start_time: float
    parameters: Float64
    assumptions: tuple[str, ...]


def understand(container: Container, description: TaskDescription, name: str) -> DescribedLayout:
    """The layout of a file by its description. Raises DataError that names file, array and what does not fit."""
    return _Understanding(container, description).layout(description.name or name)


def same_points(a: Float64, b: Float64) -> bool:
    """Whether two axes have the same points, but for the rounding of float32."""
    return len(a) == len(b) and bool(np.allclose(a, b, rtol=4 * FLOAT32, atol=1e-6 * float(np.ptp(b))))


def equal_steps(times: Float64, dt: float) -> bool:
    """Whether frames (..., T) are dt apart, to a thousandth and to the rounding of float32 where times are such."""
    steps = np.diff(times, axis=-1)
    rounding = 0.0
    if np.array_equal(times, times.astype(np.float32)):
        rounding = min(4 * FLOAT32 * float(np.abs(times).max()), 0.5 * abs(dt))
    return bool(np.allclose(steps, dt, rtol=1e-3, atol=rounding))


def length_names(axis: str) -> set[str]:
    """Names of a number that is the length of this axis."""
    general = {"l", "length", "domain_length", "extent", "domain_size", "box_size", "width", "domain"}
    own = {f"l{axis}", f"{axis}_length", f"length_{axis}", f"extent_{axis}"}
    return own | general if axis == "x" or len(axis) > 1 else own


def spacing_names(axis: str) -> set[str]:
    """Names of a number that is the distance of two points of this axis."""
    return {f"d{axis}"} | ({"delta_x", "spacing", "grid_spacing"} if axis == "x" else set())


def is_stated(name: str, value: float, layout: DescribedLayout) -> bool:
    """Whether a number of a file repeats what the layout has: its time step, its last time, a length or a spacing."""
    word, frames, task = name.split("/")[-1].lower(), layout.num_frames, layout.task
    known = [task.dt] if word in STEP_NAMES else []
    known += [layout.start_time + task.dt * steps for steps in (frames - 1, frames)] if word in END_NAMES else []
    for axis, points in zip(task.axes, layout.coordinates, strict=True):
        known += [axis.extent, float(np.ptp(points))] if word in length_names(axis.name) else []
        known += [axis.extent / len(points)] if word in spacing_names(axis.name) else []
    return any(math.isclose(value, number, rel_tol=1e-5) for number in known)


def owned_numbers(container: Container) -> list[tuple[str, str, float]]:
    """(array or '' for the file, attribute, value) of the numbers that may be parameters."""
    owned = [("", name, value) for name, value in container.attributes.items()]
    owned += [(n, name, value) for n, array in container.variables.items() for name, value in array.attributes.items()]
    return [
        (owner, name, value)
        for owner, name, value in owned
        if isinstance(value, float) and name.split("[")[0] not in NOT_PARAMETERS
    ]


class _Understanding:
    def __init__(self, container: Container, description: TaskDescription) -> None:
        self.container, self.description = container, description
        self.used: set[str] = set()
        self.used_attributes: set[tuple[str, str]] = set()
        self.assumptions = [container.assumption] if container.assumption else []
        self.sizes: dict[str, tuple[int, str]] = {}

    def layout(self, name: str) -> DescribedLayout:
        said = self.description
        sources = [self._source(field) for field in said.fields]
        fields = [FieldSpec(f.name, f.role, f.unit, f.tensor_rank) for f in said.fields]
        if said.mask and said.mask not in [field.name for field in fields]:
            first = next(source for source in sources if source.role != "static")
            sources.append(replace(first, role="static", missing=True))
            fields.append(FieldSpec(said.mask, "static"))
        num_frames = self._size(TIME, 0) if not said.steady else 0
        count = self._size(TRAJECTORY, 1)
        grid = [self._coordinate(axis) for axis in said.axes]
        dt, start = (0.0, 0.0) if said.steady else self._times(num_frames, count)
        columns = [self._parameter(parameter, count) for parameter in said.parameters]
        for parameter, column in zip(said.parameters, columns, strict=True):
            if np.abs(column).max() > np.finfo(np.float32).max:
                largest = column[np.abs(column).argmax()]
                raise self._refuse(
                    f"parameter '{parameter.name}' has the value {largest:g}, which float32 cannot hold", FLOAT32_HINT
                )
            if parameter.scale == "log" and column.astype(np.float32).min() <= 0:
                raise self._refuse(
                    f"parameter '{parameter.name}' has the value {column.min():g}, and its scale is log",
                    hint="only numbers above 0 have a logarithm, in float32 above 1e-45: set its scale to linear",
                )
        task = TaskSpec(
            name=name,
            fields=tuple(fields),
            axes=tuple(axis for axis, _, _ in grid),
            parameters=tuple(
                ParameterSpec(p.name, p.unit, float(c.min()), float(c.max()), p.scale)
                for p, c in zip(said.parameters, columns, strict=True)
            ),
            dt=dt,
            time_unit=said.time_unit,
            steady=said.steady,
            conserved=tuple(said.conserved),
            positive=tuple(said.positive),
            divergence_free=tuple(said.divergence_free),
            boundary_values=tuple(BoundaryValue(b.channel, b.axis, b.end, b.value) for b in said.boundary_values),
            symmetries=tuple(said.symmetries),
            equation=said.equation,
            mask=said.mask,
        )
        layout = DescribedLayout(
            task=task,
            sources=tuple(sources),
            coordinates=tuple(values for _, values, _ in grid),
            flipped=tuple(falls for _, _, falls in grid),
            num_trajectories=count,
            num_frames=num_frames,
            start_time=start,
            parameters=np.stack(columns, axis=1) if columns else np.zeros((count, 0)),
            assumptions=(),
        )
        self._name_what_is_not_used(layout)
        return replace(layout, assumptions=tuple(self.assumptions))

    def _refuse(self, what: str, hint: str = _HINT) -> DataError:
        return DataError(f"{self.container.label}: {what}", hint=hint)

    def _variable(self, name: str, what: str) -> Variable:
        variable = self.container.variables.get(name)
        if variable is None:
            reason = next((text for text in self.container.left_out if f"'{name}'" in text), "")
            known = ", ".join(sorted(self.container.variables))[:300] or "none"
            why = f"is not read: {reason}" if reason else "is not there"
            raise self._refuse(f"{what} is to be read from '{name}', which {why}", hint=f"arrays in it: {known}")
        self.used.add(name)
        return variable

    def _source(self, field: DescribedField) -> FileField:
        variables = self.container.variables
        name = field.dataset or field.name
        if field.dataset is None and name not in variables and len(variables) == 1:
            name = next(iter(variables))
        variable = self._variable(name, f"field '{field.name}'")
        said = self.description.dims_of(field)
        dims = tuple(said) if said is not None else self._named_dims(field, variable)
        if len(dims) != len(variable.shape):
            raise self._refuse(
                f"array '{name}' has {len(variable.shape)} dimensions {variable.shape}, and dims of field "
                f"'{field.name}' names {len(dims)}: {', '.join(dims)}"
            )
        for dim, size in zip(dims, variable.shape, strict=True):
            if dim not in (CHANNEL, COMPONENT):
                known, where = self.sizes.setdefault(dim, (size, name))
                if known != size:
                    raise self._refuse(
                        f"'{dim}' has {known} entries in array '{where}' and {size} in '{name}'",
                        hint="fields of one task share their grid, frames and trajectories: leave one of the fields "
                        f"out of the task.yaml; if it holds times, write `times: {name}`, and if it holds the points "
                        f"of an axis, `dataset: {name}` at that axis",
                    )
            elif dim == COMPONENT and size != len(self.description.axes):
                raise self._refuse(
                    f"the component dimension of '{name}' has {size} entries, and there are "
                    f"{len(self.description.axes)} axes",
                    hint="give such numbers as fields of their own: dims with 'channel', and a channel for each field",
                )
        channel = field.channel or 0
        if CHANNEL in dims and channel >= variable.shape[dims.index(CHANNEL)]:
            raise self._refuse(f"field '{field.name}' is channel {channel} of '{name}', which has fewer")
        axes = self.description.axes
        letters = {TRAJECTORY: "N", TIME: "T", CHANNEL: "K", COMPONENT: "C"}
        letters |= {axis.name: letter for axis, letter in zip(axes, SPACE, strict=False)}
        repeated = "".join(letters[axis.name] for axis in axes if axis.repeated_end)
        text = "".join(letters[dim] for dim in dims)
        return FileField(field.role, variable, text, channel=channel, repeated=repeated)

    def _named_dims(self, field: DescribedField, variable: Variable) -> tuple[str, ...]:
        """The dimensions by the names that the file gives them, where these are the axes' own."""
        axes = {axis.name: axis.name for axis in self.description.axes}
        axes |= {axis.dataset: axis.name for axis in self.description.axes if axis.dataset}
        known = axes | {TRAJECTORY: TRAJECTORY, TIME: TIME, CHANNEL: CHANNEL, COMPONENT: COMPONENT}
        known |= {self.description.times: TIME} if self.description.times else {}
        unknown = [dim for dim in variable.dims if dim not in known]
        if unknown:
            shown = ", ".join(dim or "?" for dim in variable.dims)
            raise self._refuse(
                f"what the dimensions ({shown}) of array '{variable.name}' are is not said",
                hint="add dims to the task.yaml, one entry for each: trajectory, time, or an axis",
            )
        dims = tuple(known[dim] for dim in variable.dims)
        try:
            self.description.check_dims(f"array '{variable.name}' ({', '.join(dims)})", list(dims), field)
        except ValueError as error:
            raise self._refuse(str(error)) from None
        return dims

    def _size(self, dim: str, default: int) -> int:
        return self.sizes.get(dim, (default, ""))[0]

    def _coordinate(self, axis: DescribedAxis) -> tuple[AxisSpec, Float64, bool]:
        """The axis, its points, and whether the file has them from the last to the first."""
        size = self._size(axis.name, 0)
        if size < 2 + axis.repeated_end:
            raise self._refuse(f"axis '{axis.name}' has {size} points; at least 2 are needed")
        own = self.container.variables.get(axis.name)
        name = axis.dataset or (axis.name if own is not None and len(own.shape) == 1 else None)
        if name is None:
            extent = axis.extent if axis.extent is not None else 1.0
            if axis.extent is None:
                self.assumptions.append(f"axis '{axis.name}' has no coordinates: its length is taken as 1")
            points = size - axis.repeated_end
            return self._axis(axis, extent), np.asarray(np.arange(points) * (extent / points), np.float64), False
        variable = self._variable(name, f"axis '{axis.name}'")
        values = self.container.whole(name)
        if variable.shape != (size,) and values.size % size == 0 and values.size:
            # A grid of coordinates, or one row for each trajectory: usable if all rows are the same.
            values = self._one_row(values, variable, axis.name, size)
        values = values.reshape(-1)
        if values.shape != (size,) or not np.isfinite(values).all():
            raise self._refuse(f"'{name}' holds no {size} coordinates for axis '{axis.name}': {variable.shape}")
        falls = bool((np.diff(values) < 0).all())
        values = np.ascontiguousarray(values[::-1] if falls else values)
        steps = np.diff(values)
        if (steps <= 0).any():
            raise self._refuse(f"the coordinates '{name}' of axis '{axis.name}' neither rise nor fall")
        if axis.repeated_end:  # the reader leaves out the last point of the file
            values, size = values[1:] if falls else values[:-1], size - 1
        by_points = float((values[-1] - values[0]) * size / (size - 1))
        extent = axis.extent if axis.extent is not None else by_points
        if axis.extent is not None and not 0.999 * float(np.ptp(values)) <= extent <= 1.001 * (by_points + steps.max()):
            self.assumptions.append(
                f"extent of axis '{axis.name}' is {extent:g} by the description, and {by_points:g} by '{name}'"
            )
        if not np.allclose(steps, steps.mean(), rtol=1e-3, atol=1e-6 * float(np.ptp(values))):
            self.assumptions.append(f"the points of axis '{axis.name}' are not at equal distances")
        return self._axis(axis, extent), values, falls

    def _one_row(self, values: Array, variable: Variable, axis: str, size: int) -> Array:
        for number, length in enumerate(variable.shape):
            if length == size:
                rows = np.moveaxis(values, number, -1).reshape(-1, size)
                if np.allclose(rows, rows[0], rtol=1e-6, atol=1e-6 * float(np.ptp(rows[0]))):
                    return np.asarray(rows[0])
        raise self._refuse(f"the coordinates '{variable.name}' of axis '{axis}' differ between rows or trajectories")

    def _axis(self, axis: DescribedAxis, extent: float) -> AxisSpec:
        boundary: Any = axis.boundary if axis.ends is None else tuple(axis.ends)
        return AxisSpec(axis.name, boundary, extent, axis.unit)

    def _times(self, num_frames: int, count: int) -> tuple[float, float]:
        """Time step and time of the first frame."""
        said = self.description
        name = said.times or next((n for n in TIME_NAMES if self._holds_times(n, num_frames)), None)
        if name is None:
            if said.dt is None:
                raise self._refuse("it has no times, and dt is not said", hint="add dt to the task.yaml")
            return said.dt, 0.0
        self._variable(name, "time")
        values = self.container.whole(name)
        single = values.size in (num_frames, num_frames + 1)  # also a column: (frames, 1)
        rows = values.reshape(1, -1) if single or not values.ndim else values.reshape(-1, values.shape[-1])
        if rows.shape[1] == num_frames + 1:
            self.assumptions.append(f"'{name}' has one entry more than there are frames: the last is not used")
            rows = rows[:, :num_frames]
        if rows.shape[1] != num_frames or len(rows) not in (1, count) or not np.isfinite(rows).all():
            raise self._refuse(f"'{name}' of shape {values.shape} does not hold the times of {num_frames} frames")
        if num_frames < 2:
            return (said.dt if said.dt is not None else 1.0), float(rows[0, 0])
        steps = np.diff(rows, axis=1)
        dt = float(steps.mean())
        if said.dt is not None:
            if not equal_steps(rows, said.dt):
                spread = f"{dt:g}" if equal_steps(rows, dt) else f"{steps.min():g} to {steps.max():g}"
                self.assumptions.append(f"dt is {said.dt:g} by the description, and {spread} by '{name}'")
            return said.dt, float(rows[0, 0])
        if dt <= 0 or not equal_steps(rows, dt):
            each = all(equal_steps(row, float(np.diff(row).mean())) for row in rows)
            what = "trajectories" if each and len(rows) > 1 else "frames"
            raise self._refuse(
                f"the time step of '{name}' differs between {what}: {steps.min():g} to {steps.max():g}",
                hint="windows need frames at equal distances: interpolate them, or leave trajectories out",
            )
        return dt, float(rows[0, 0])

    def _holds_times(self, name: str, num_frames: int) -> bool:
        variable = self.container.variables.get(name)
        if variable is None or len(variable.shape) not in (1, 2):
            return False
        return not {variable.shape[-1], variable.size}.isdisjoint((num_frames, num_frames + 1))

    def _parameter(self, parameter: DescribedParameter, count: int) -> Float64:
        """(N,) values of one parameter."""
        what = f"parameter '{parameter.name}'"
        if parameter.value is not None:
            return np.full(count, parameter.value)
        if parameter.attribute is not None:
            return np.full(count, self._attribute(parameter.dataset or "", parameter.attribute, what))
        name = parameter.dataset or parameter.name
        if parameter.dataset is None and name not in self.container.variables:
            if name in self.container.attributes:
                return np.full(count, self._attribute("", name, what))
            raise self._refuse(
                f"{what} is neither an array nor an attribute of the file",
                hint="say where it is: dataset, attribute, or value",
            )
        variable = self._variable(name, what)
        values = self.container.whole(name)
        if parameter.channel is not None:
            if values.ndim != 2 or parameter.channel >= values.shape[1]:
                column = f"column {parameter.channel} of '{name}'"
                raise self._refuse(f"{what} is {column}, which has shape {variable.shape}")
            values = values[:, parameter.channel]
        if values.size == 1:
            values = np.full(count, float(values.reshape(-1)[0]))
        values = values.reshape(-1) if values.size == count else values
        if values.shape != (count,):
            raise self._refuse(f"{what}: '{name}' has shape {variable.shape}; expected one number, or {count}")
        if not np.isfinite(values).all():
            raise self._refuse(f"{what}: '{name}' holds values that are not finite")
        return np.asarray(values, np.float64)

    def _attribute(self, owner: str, name: str, what: str) -> float:
        attributes = self._variable(owner, what).attributes if owner else self.container.attributes
        value = attributes.get(name)
        if not isinstance(value, float) or not math.isfinite(value):
            numbers = ", ".join(sorted(k for k, v in attributes.items() if isinstance(v, float)))
            raise self._refuse(
                f"{what}: there is no number in attribute '{name}'", hint=f"numbers: {numbers or 'none'}"
            )
        self.used_attributes.add((owner, name))
        return value

    def _name_what_is_not_used(self, layout: DescribedLayout) -> None:
        container = self.container
        arrays = [
            f"'{n}' {v.shape}"
            for n, v in sorted(container.variables.items())
            if n not in self.used and not (v.size == 1 and is_stated(n, container.number(n), layout))
        ]
        if arrays:
            self.assumptions.append(f"arrays that are not used: {_listed(arrays)}")
        numbers = [
            f"'{k}' = {v:g}" + (f" of '{n}'" if n else "")
            for n, k, v in owned_numbers(container)
            if (n, k) not in self.used_attributes and not is_stated(k, v, layout)
        ]
        if numbers:
            self.assumptions.append(f"attributes that are not used: {_listed(numbers)}")
        if container.left_out:
            self.assumptions.append(f"not read: {_listed(container.left_out)}")


def _listed(texts: Iterable[str]) -> str:
    shown = [printable(text[:200]) for text in texts]
    return ", ".join(shown[:24]) + (f" and {len(shown) - 24} more" if len(shown) > 24 else "")


@dataclass(frozen=True, slots=True)
class _File(TrajectoryFile):
    container: Container

    def values(self, source: FileField, row: int, frames: slice) -> Array:
        return self.container.decoded(source.array.name, source.region(row, frames))


class DescribedReader(FilesReader):
    """Windows from one or several files of one task.

    Trajectories are split as everywhere: the first go to train, then valid, the last to test. Of several files with
    many trajectories each is split, so that every split sees every file; files of one trajectory are split as a whole.
    Trajectories that are cut into pieces are held out whole, unless there are too few of them.
    """

    _files: tuple[_File, ...]

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
        if isinstance(containers[0], MeshContainer):
            description = completed(description, containers[0].box)
            if subsampling.space_stride > 1:
                raise DataError("space_stride is for grids", hint="choose `nodes` at the axes of the task.yaml")
        check_distinct((Path(c.path), c.part) for c in containers if os.path.exists(c.path))
        layouts = [understand(container, description, name) for container in containers]
        for container in containers:
            container.close()  # opened for coordinates and parameters; nothing stays open before a fork
        first = layouts[0]
        alike = [all(map(same_points, layout.coordinates, first.coordinates)) for layout in layouts]
        check_alike([(c.label, {"grids": same}) for c, same in zip(containers, alike, strict=True)])
        self._files = tuple(
            _File(layout.sources, layout.parameters.astype(np.float32), layout.flipped, container)
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
        counts = [layout.num_trajectories for layout in layouts]
        rows = [count * pieces for count, pieces in zip(counts, self._pieces, strict=True)]
        folders = [Path(container.path).parent.name for container in containers]
        if "train" in folders and all(folder in SPLITS for folder in folders):
            of_rows = np.repeat(folders, rows)
            split, whole = {s: np.flatnonzero(of_rows == s).tolist() for s in SPLITS}, True
        else:
            split, whole = _split(counts, self._pieces, valid_fraction, test_fraction)
        self._rows, self._counts = SplitRows(rows, split), counts
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
            self._rows.totals,
            first.start_time,
            assumptions,
            frames=None if len(set(lengths)) == 1 else self._rows.by_split(np.repeat(lengths, rows)),
            steps=None if same_step else self._rows.by_split(np.repeat(steps, rows)),
        )
        super().__init__(source, subsampling)

    def assume(self, texts: Sequence[str]) -> None:
        """Add what the description itself assumes, for people to read."""
        self.source = replace(self.source, assumptions=(*self.source.assumptions, *texts))

    def where(self, split: str, trajectory: int) -> str:
        number, row, frame = self._locate(split, trajectory)
        piece = f" from frame {frame}" if self._piece else ""
        return f"{self._files[number].container.label} trajectory {row}{piece} ({split} trajectory {trajectory})"

    def close(self) -> None:
        for file in self._files:
            file.container.close()

    @functools.cached_property  # asked for at each read, and a set may have thousands of files
    def most_points(self) -> int:
        return max(f.container.header.num_points if isinstance(f.container, MeshContainer) else 0 for f in self._files)

    def mesh_path(self, split: str, trajectory: int) -> str:
        return self._files[self._locate(split, trajectory)[0]].container.path

    def _at_points(self, split: str, trajectory: int, frames: slice) -> tuple[Array, Array]:
        number, _, first = self._locate(split, trajectory)
        file = self._files[number]
        assert isinstance(file.container, MeshContainer)
        frames = slice(first + frames.start, first + frames.stop, frames.step)
        role = self.task.predicted
        fields = [file.container.at_points(f.array.name, f.channel, frames) for f in file.fields if f.role == role]
        return file.container.points(), np.concatenate(fields, axis=1)

    def simulation_of(self, split: str, trajectory: int) -> int:
        number, row, _ = self._locate(split, trajectory)
        return sum(self._counts[:number]) + row

    def _source_identity(self) -> str:
        # The description says which of the arrays are read: two of one file are two sources.
        digest = hashlib.sha256(self._description.encode())
        for file in self._files:
            digest.update(file.container.identity().encode())
        return digest.hexdigest()

    def _locate(self, split: str, trajectory: int) -> tuple[int, int, int]:
        number, inside = self._rows.locate(split, trajectory)
        row, piece = divmod(inside, self._pieces[number])
        return number, row, piece * self._piece


def open_described(
    paths: Sequence[Path],
    description: TaskDescription,
    subsampling: Subsampling = FULL,
    *,
    valid_fraction: float = 0.1,
    test_fraction: float = 0.1,
) -> DescribedReader:
    """The reader of files by their description. Raises DataError."""
    return DescribedReader(
        open_containers(paths, description),
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


def _split(
    counts: list[int], pieces: list[int], valid_fraction: float, test_fraction: float
) -> tuple[dict[str, list[int]], bool]:
    """Which pieces of trajectories, counted over all files, each split has; and whether trajectories stay whole.

    Pieces of one simulation resemble each other, so that simulations are held out whole where there are enough.
    """
    # Files of one trajectory each are split as one file.
    whole = split_rows([sum(counts)] if max(counts) == 1 else counts, valid_fraction, test_fraction)
    if max(pieces) == 1:
        return whole, True
    lacking = [s for s, part in (("valid", valid_fraction), ("test", test_fraction)) if part > 0 and not whole[s]]
    if lacking:
        rows = [count * number for count, number in zip(counts, pieces, strict=True)]
        return split_rows([sum(rows)] if max(rows) == 1 else rows, valid_fraction, test_fraction), False
    ends = np.cumsum(np.repeat(pieces, counts))
    begins = np.concatenate([[0], ends[:-1]])
    return {split: [n for row in rows for n in range(begins[row], ends[row])] for split, rows in whole.items()}, True
