"""A surveyed file of The Well, understood: its fields, grid, times, parameters and boundaries.

Every attribute may be missing, and the file is believed over its attributes. The flags of a dataset (`sample_varying`,
`time_varying`, `dim_varying`) say which axes it has. Where they are missing the shape decides; where both speak they
must agree. The format has a group for each boundary condition, with a mask over the axes that it belongs to. A face of
the domain is a wall if all of it is, open or periodic if any of it is, and open where nothing is said. A mask that also
holds points inside the domain is a static field: an obstacle. What is assumed, and what of the file is not used, is
written down in words. Letters: N trajectory, T time, X Y Z space, C component.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ups.errors import DataError
from ups.formats.base import SPACE, Array, FileField, Int64
from ups.formats.described import equal_steps
from ups.formats.hdf5 import BOUNDARIES, FIELD_GROUPS, ArraySurvey, FileKey, FileSurvey, read_region
from ups.record.text import printable
from ups.spec.batch import Float64
from ups.spec.task import Boundary, FieldSpec, Role

MAX_COMPONENTS = 16
MAX_MASK_POINTS = 1 << 26
_WORDS: tuple[tuple[str, Boundary], ...] = (
    ("PERIODIC", "periodic"),
    ("DIRICHLET", "dirichlet"),
    ("NEUMANN", "neumann"),
    ("WALL", "wall"),
    ("OPEN", "open"),
)
MAX_POINTS = 1 << 20
# Root attributes that are no parameters of the equation.
_BOOKKEEPING = {"dataset_name", "grid_type", "n_spatial_dims", "n_trajectories", "simulation_parameters"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a file: trajectories, frames, and points along each axis."""

    trajectories: int
    frames: int
    space: tuple[int, ...]


def flag(attributes: Mapping[str, Sequence[float | str]], name: str) -> bool | None:
    """A truth value among attributes; None where it is missing or something else."""
    values = attributes.get(name)
    if not values or isinstance(values[0], str):
        return None
    return bool(values[0])


def plain(text: str, fallback: str) -> str:
    """A name that a task may have."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", text.strip())[:60]
    return name if re.match(r"[A-Za-z_]", name) else f"{fallback}_{name}" if name else fallback


def _possible(rank: int, dims: int, varying: list[bool], sample: bool | None, time: bool | None) -> list[str]:
    """Arrangements of axes from the likeliest on: an axis along which nothing varies is absent, or has length 1."""
    leads = [
        ("N" if has_sample else "") + ("T" if has_time else "")
        for has_time in ((True, False) if time is None else (time,))
        for has_sample in ((True, False) if sample is None else (sample,))
    ]
    there = "".join(letter for letter, varies in zip(SPACE, varying, strict=False) if varies)
    spaces = list(dict.fromkeys((there, SPACE[:dims])))
    tails = ([""], ["C"], ["CC", "C"])[rank]  # a tensor has rows and columns, or lies flat
    return [lead + space + tail for space in spaces for lead in leads for tail in tails]


def _fits(letters: str, shape: tuple[int, ...], sizes: Sizes) -> bool:
    possible: dict[str, tuple[int, ...]] = {"N": (sizes.trajectories,), "T": (sizes.frames,)}
    possible |= {letter: (1, n) for letter, n in zip(SPACE, sizes.space, strict=False)}
    return all(n in possible.get(letter, (n,)) for letter, n in zip(letters, shape, strict=True))


@dataclass(frozen=True, slots=True)
class WellLayout:
    """One file. coordinates: rising; flipped: axes along which the file has them falling.

    frames (N,) and steps (N,): frames of each trajectory and the time between two. parameters: name -> (N,).
    """

    key: FileKey
    name: str
    axes: tuple[str, ...]
    ends: tuple[tuple[Boundary, Boundary], ...]
    coordinates: tuple[Float64, ...]
    flipped: tuple[bool, ...]
    fields: tuple[FileField, ...]
    frames: Int64
    steps: Float64
    start_time: float
    parameters: dict[str, Float64]
    assumptions: tuple[str, ...]

    @property
    def num_trajectories(self) -> int:
        return len(self.frames)


def understand(survey: FileSurvey) -> WellLayout:
    """The layout of a surveyed file. Raises DataError for one that cannot be understood."""
    return _Understanding(survey).layout()


class _Understanding:
    def __init__(self, survey: FileSurvey) -> None:
        self.path = survey.key[0]
        # What is not listed is added; the survey itself is kept for the next reader of this file.
        self.survey = replace(survey, left_out=list(survey.left_out))
        self.root = survey.attributes.get("", {})
        self.assumptions: list[str] = []

    def layout(self) -> WellLayout:
        self.axes = axes = self._axes()
        grid = [self._coordinate(axis) for axis in axes]
        space = tuple(array.shape[-1] for array in grid)
        times = self._array("dimensions/time")
        if times is None:
            raise DataError(
                f"{self.path}: it has no 'dimensions/time'", hint="a file of The Well has the time of frames"
            )
        self.sizes = Sizes(self._num_trajectories(times), times.shape[-1], space)
        frames, steps, start = self._times(times)
        fields = self._fields()
        if not any(field.role == "state" for field in fields):
            raise DataError(f"{self.path}: none of its fields varies in time")
        ends, masks = self._boundaries()
        parameters = self._parameters()
        kind = " ".join(map(str, self.root.get("grid_type", [])))
        if kind and kind != "cartesian":
            self.assumptions.append(f"the grid is '{kind}': lengths and integrals are those of its coordinates")
        self.assumptions.append(
            "units, equation and what is conserved are not in the file: all is dimensionless, nothing is conserved"
        )
        if self.survey.left_out:
            names = ", ".join(self.survey.left_out)
            self.assumptions.append(f"not used: {names[:400]}")
        coordinates = [self._points(axis, array) for axis, array in zip(axes, grid, strict=True)]
        stored = [str(name) for name in self.root.get("dataset_name", [])]
        return WellLayout(
            key=self.survey.key,
            name=plain(stored[0] if stored else "", "the_well"),
            axes=tuple(plain(axis, "axis") for axis in axes),
            ends=tuple((first, last) for first, last in ends),
            coordinates=tuple(values if values[0] < values[-1] else values[::-1].copy() for values in coordinates),
            flipped=tuple(bool(values[0] > values[-1]) for values in coordinates),
            fields=(*fields, *masks),
            frames=frames,
            steps=steps,
            start_time=start,
            parameters=parameters,
            assumptions=tuple(printable(text) for text in self.assumptions),
        )

    def _fields(self) -> list[FileField]:
        """All fields in the order of the format: scalars, vectors, tensors, each as `field_names` lists them."""
        survey, fields = self.survey, list[FileField]()
        for rank, group in enumerate(FIELD_GROUPS):
            listed = survey.attributes.get(group, {}).get("field_names")
            present = [name.split("/")[1] for name in survey.arrays if name.startswith(f"{group}/")]
            names = [str(name) for name in listed] if listed is not None else sorted(present)
            for name in names:
                if name not in present:
                    raise DataError(f"{self.path}: '{group}' lists a field '{name[:80]}' that it does not have")
                fields.append(self._field(f"{group}/{name}", rank))
            survey.left_out.extend(f"'{group}/{n}', which is not listed" for n in sorted(set(present) - set(names)))
        return fields

    def _field(self, key: str, rank: int) -> FileField:
        array, attributes = self.survey.arrays[key], self.survey.attributes.get(key, {})
        axes = self._axes_of(array, attributes, rank)
        channels = math.prod(n for letter, n in zip(axes, array.shape, strict=True) if letter == "C")
        if channels > MAX_COMPONENTS:
            raise DataError(f"{self.path}: '{key}' has {channels} components, more than {MAX_COMPONENTS}")
        role: Role = "state" if "T" in axes else "static"
        name = plain(key.split("/")[1], "field")
        if channels == len(self.axes) ** rank:
            specs: tuple[FieldSpec, ...] = (FieldSpec(name, role, tensor_rank=rank),)
        else:  # as of a flow in the plane with three components
            specs = tuple(FieldSpec(f"{name}_{i}", role) for i in range(channels))
        return FileField(role, array, axes, specs)

    def _axes_of(self, array: ArraySurvey, attributes: Mapping[str, Sequence[float | str]], rank: int) -> str:
        """The letters of the axes of a dataset; an axis of space of length 1 has a small letter, and is broadcast."""
        sizes = self.sizes
        varying = [bool(v) for v in attributes.get("dim_varying", ()) if not isinstance(v, str)]
        if len(varying) != len(sizes.space):
            varying = [True] * len(sizes.space)
        sample, time = flag(attributes, "sample_varying"), flag(attributes, "time_varying")
        for letters in _possible(rank, len(sizes.space), varying, sample, time):
            if len(letters) == len(array.shape) and _fits(letters, array.shape, sizes):
                return "".join(
                    letter.lower() if letter in SPACE and n == 1 != sizes.space[SPACE.index(letter)] else letter
                    for letter, n in zip(letters, array.shape, strict=True)
                )
        raise DataError(
            f"{self.path}: dataset '{array.name}' of shape {array.shape} does not fit {sizes.trajectories} "
            f"trajectories of {sizes.frames} frames on {' x '.join(map(str, sizes.space))} points, and what its "
            "attributes say of its axes"
        )

    def _boundaries(self) -> tuple[list[list[Boundary]], list[FileField]]:
        """What happens at both ends of each axis, and the masks of obstacles."""
        groups = [name for name in self.survey.attributes if name.startswith(f"{BOUNDARIES}/") and name.count("/") == 1]
        if not groups:
            self.assumptions.append("the boundary is unknown: no axis is taken as periodic")
            return [["unknown", "unknown"] for _ in self.axes], []
        ends: list[list[Boundary]] = [["open", "open"] for _ in self.axes]
        masks: list[FileField] = []
        said: set[int] = set()
        for group in sorted(groups):
            said |= self._take_condition(group, ends, masks)
        left = [axis for number, axis in enumerate(self.axes) if number not in said]
        if left:
            self.assumptions.append(f"nothing is said about the ends of {', '.join(left)}: taken as open")
        # An axis wraps around or has two ends.
        return [["periodic", "periodic"] if "periodic" in both else both for both in ends], masks

    def _take_condition(self, group: str, ends: list[list[Boundary]], masks: list[FileField]) -> set[int]:
        """Add one condition to the ends and masks; returns the numbers of the axes that it concerns."""
        survey, sizes = self.survey, self.sizes
        attributes, name = survey.attributes[group], group.split("/")[1]
        words = (" ".join(map(str, attributes.get("bc_type", []))) or name).upper()
        kind: Boundary = next((found for word, found in _WORDS if word in words), "unknown")
        dims = [str(dim) for dim in attributes.get("associated_dims", [])]
        numbers = [self.axes.index(dim) for dim in dims if dim in self.axes]
        mask = survey.arrays.get(f"{group}/mask")
        if not numbers or len(numbers) != len(dims) or numbers != sorted(set(numbers)) or mask is None:
            self.assumptions.append(f"boundary condition '{name}' is not used: it has no mask over axes of the grid")
            return set()
        if f"{group}/values" in survey.arrays:
            self.assumptions.append(f"the values of boundary condition '{name}' are not used")
        space = tuple(sizes.space[n] for n in numbers)
        lead = "N" if len(mask.shape) == len(space) + 1 and flag(attributes, "sample_varying") else ""
        expected = (sizes.trajectories, *space) if lead else space
        if flag(attributes, "time_varying") or mask.shape != expected or math.prod(expected) > MAX_MASK_POINTS:
            self.assumptions.append(f"boundary condition '{name}' is not used: its mask has shape {mask.shape}")
            return set()
        values = self._small(mask).reshape(-1, *space) != 0  # (N or 1, *axes of the mask)
        if kind == "periodic" and not values.any():
            # Files are about that forget to set the mask of a periodic axis, and nothing else can be meant.
            self.assumptions.append(f"the mask of '{name}' is empty: its axis is taken as periodic")
            values = np.ones_like(values)
        every = kind in ("wall", "dirichlet", "neumann")
        for dim, number in enumerate(numbers):
            for end, index in ((0, 0), (1, -1)):
                face = values.take(index, axis=1 + dim)
                if face.all() if every else face.any():
                    ends[number][end] = kind
        inside = values[(slice(None), *(slice(1, -1) for _ in space))]
        if every and inside.any():
            label = plain(f"{name}_mask", "mask")
            letters = lead + "".join(SPACE[n] for n in numbers)
            masks.append(FileField("static", mask, letters, (FieldSpec(label, "static"),), mask=True))
        return set(numbers)

    def _axes(self) -> list[str]:
        listed = self.survey.attributes.get("dimensions", {}).get("spatial_dims")
        if listed is not None:
            axes = [str(name) for name in listed]
        else:
            present = [name.split("/")[1] for name in self.survey.arrays if name.startswith("dimensions/")]
            axes = sorted(name for name in present if name != "time")
            self.assumptions.append(f"the order of axes is not said: {', '.join(axes)} is taken")
        if not 1 <= len(axes) <= 3 or len(set(axes)) != len(axes):
            raise DataError(f"{self.path}: it has {len(axes)} axes of space, not 1 to 3 of different names")
        return axes

    def _coordinate(self, axis: str) -> ArraySurvey:
        array = self._array(f"dimensions/{axis}")
        if array is None:
            raise DataError(f"{self.path}: it has no 'dimensions/{axis[:80]}', which it lists as an axis")
        return array

    def _array(self, name: str) -> ArraySurvey | None:
        array = self.survey.arrays.get(name)
        if array is not None and not 1 <= len(array.shape) <= 2:
            raise DataError(f"{self.path}: '{name}' has shape {array.shape}")
        if array is not None and array.shape[-1] > MAX_POINTS:
            raise DataError(f"{self.path}: '{name}' has {array.shape[-1]} entries, more than {MAX_POINTS}")
        return array

    def _small(self, array: ArraySurvey) -> Array:
        if int(np.prod(array.shape)) > MAX_MASK_POINTS:
            raise DataError(f"{self.path}: '{array.name}' {array.shape} has more than {MAX_MASK_POINTS} values")
        return read_region(self.survey.key, array, tuple(slice(0, n, 1) for n in array.shape))

    def _num_trajectories(self, times: ArraySurvey) -> int:
        """By the time, else by the attribute, if a field has as many, else by a field that varies with both."""
        if len(times.shape) == 2:
            return times.shape[0]
        said = self.root.get("n_trajectories")
        counted = int(said[0]) if said and not isinstance(said[0], str) and 1 <= said[0] < 1 << 31 else 0
        leads = [
            array.shape[0]
            for rank, group in enumerate(FIELD_GROUPS)
            for name, array in self.survey.arrays.items()
            if name.startswith(f"{group}/")
            and len(array.shape) >= 2 + rank
            and flag(self.survey.attributes.get(name, {}), "sample_varying") is not False
            and array.shape[1:2] == times.shape[-1:]
        ]
        if not leads:
            return counted or 1
        if counted and counted not in leads:
            self.assumptions.append(f"n_trajectories says {counted}; the fields have {leads[0]}, which is taken")
        return counted if counted in leads else leads[0]

    def _points(self, axis: str, array: ArraySurvey) -> Float64:
        size = array.shape[-1]
        values = np.asarray(self._small(array), np.float64).reshape(-1, size)
        if (values != values[0]).any():
            self.assumptions.append(
                f"the points along {axis} differ between trajectories: those of the first are taken"
            )
        steps = np.diff(values[0])
        if size < 2 or not np.isfinite(values).all() or not ((steps > 0).all() or (steps < 0).all()):
            raise DataError(f"{self.path}: 'dimensions/{axis}' must hold at least 2 rising or falling numbers")
        return np.asarray(values[0])

    def _times(self, array: ArraySurvey) -> tuple[Int64, Float64, float]:
        """Frames and time step of each trajectory, and when the first begins."""
        times = np.asarray(self._small(array), np.float64).reshape(-1, self.sizes.frames)
        # A trajectory that ends earlier than others of its file has no time for the rest.
        finite = np.isfinite(times)
        frames = np.where(finite.all(axis=1), self.sizes.frames, np.argmin(finite, axis=1))
        if frames.min() < 2:
            raise DataError(f"{self.path}: a trajectory has less than two frames with a time")
        steps = np.empty(len(times))
        uneven = False
        for row, count in enumerate(frames):
            present = times[row, :count]
            if (np.diff(present) <= 0).any():
                raise DataError(f"{self.path}: the times of trajectory {row} are not rising")
            steps[row] = (present[-1] - present[0]) / (count - 1)
            uneven = uneven or not equal_steps(present, float(steps[row]))
        if uneven:
            self.assumptions.append("frames are not equally far apart in time: the mean time step is taken")
        if (times[:, 0] != times[0, 0]).any():
            self.assumptions.append("trajectories begin at different times: the first one's is taken for all")
        if len(times) == 1:
            frames, steps = np.repeat(frames, self.sizes.trajectories), np.repeat(steps, self.sizes.trajectories)
        return frames.astype(np.int64), steps, float(times[0, 0])

    def _parameters(self) -> dict[str, Float64]:
        """Constant scalars, then parameters that are attributes of the file, one value for each trajectory."""
        parameters: dict[str, Float64] = {}
        listed = self.survey.attributes.get("scalars", {}).get("field_names")
        present = [name.split("/")[1] for name in self.survey.arrays if name.startswith("scalars/")]
        for name in [str(n) for n in listed if str(n) in present] if listed is not None else sorted(present):
            array, attributes = self.survey.arrays[f"scalars/{name}"], self.survey.attributes[f"scalars/{name}"]
            per_sample = array.shape == (self.sizes.trajectories,) and flag(attributes, "sample_varying") is not False
            if flag(attributes, "time_varying") or not (per_sample or array.shape in ((), (1,))):
                self.survey.left_out.append(f"scalar '{name}' of shape {array.shape}, which is not one number for each")
                continue
            values = np.asarray(self._small(array), np.float64).reshape(-1)
            if np.isfinite(values).all():
                parameters[name] = np.broadcast_to(values, self.sizes.trajectories).copy()
        stated = self.root.get("simulation_parameters")
        names = [str(n) for n in stated] if stated is not None else [n for n in self.root if n not in _BOOKKEEPING]
        for name in names:
            values_of = self.root.get(name, [])
            if name not in parameters and len(values_of) == 1 and not isinstance(values_of[0], str):
                parameters[name] = np.full(self.sizes.trajectories, float(values_of[0]))
        return dict(list(parameters.items())[:64])
