"""A surveyed file of The Well, understood: its fields, grid, times, parameters and boundaries.

Every attribute may be missing, and the file is believed over its attributes. What is taken for granted, and what of the
file is not used, is written down in words.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ups.errors import DataError
from ups.formats.base import Array, Int64
from ups.formats.described_layout import equal_steps
from ups.formats.hdf5_arrays import read_region
from ups.formats.hdf5_guard import FileKey
from ups.formats.hdf5_survey import ArraySurvey
from ups.formats.the_well_boundaries import MAX_MASK_POINTS, boundaries_of
from ups.formats.the_well_fields import Sizes, WellField, fields_of, flag, plain
from ups.formats.the_well_survey import FIELD_GROUPS, WellSurvey
from ups.record.untrusted_files import printable
from ups.spec.batch import Float64
from ups.spec.task import Boundary

MAX_POINTS = 1 << 20
# Root attributes that are no parameters of the equation.
_BOOKKEEPING = {"dataset_name", "grid_type", "n_spatial_dims", "n_trajectories", "simulation_parameters"}


@dataclass(frozen=True, slots=True)
class WellLayout:
    """One file. coordinates: rising; flipped: axes along which the file has them falling.

    frames (N,) and steps (N,): frames of each trajectory and the time between two. parameters: name -> (N,).
    """

    name: str
    axes: tuple[str, ...]
    ends: tuple[tuple[Boundary, Boundary], ...]
    coordinates: tuple[Float64, ...]
    flipped: tuple[bool, ...]
    fields: tuple[WellField, ...]
    frames: Int64
    steps: Float64
    start_time: float
    parameters: dict[str, Float64]
    assumptions: tuple[str, ...]

    @property
    def num_trajectories(self) -> int:
        return len(self.frames)


def understand(key: FileKey, survey: WellSurvey) -> WellLayout:
    """The layout of a surveyed file. Raises DataError for one that cannot be understood."""
    return _Understanding(key, survey).layout()


class _Understanding:
    def __init__(self, key: FileKey, survey: WellSurvey) -> None:
        self.key, self.path = key, key[0]
        # `fields_of` adds what is not listed; the survey itself is kept for the next reader of this file.
        self.survey = WellSurvey(survey.size, survey.arrays, survey.attributes, list(survey.left_out))
        self.root = survey.attributes.get("", {})
        self.assumptions: list[str] = []

    def layout(self) -> WellLayout:
        axes = self._axes()
        grid = [self._coordinate(axis) for axis in axes]
        space = tuple(array.shape[-1] for array in grid)
        times = self._array("dimensions/time", 2)
        if times is None:
            raise DataError(
                f"{self.path}: it has no 'dimensions/time'", hint="a file of The Well has the time of frames"
            )
        sizes = Sizes(self._num_trajectories(times, len(axes)), times.shape[-1], space)
        frames, steps, start = self._times(times, sizes)
        fields = fields_of(self.path, self.survey, sizes)
        if not any(field.role == "state" for field in fields):
            raise DataError(f"{self.path}: none of its fields varies in time")
        boundaries = boundaries_of(self.path, self.survey, axes, sizes, self._small)
        self.assumptions += boundaries.assumptions
        parameters = self._parameters(sizes)
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
            name=plain(stored[0] if stored else "", "the_well"),
            axes=tuple(plain(axis, "axis") for axis in axes),
            ends=tuple((first, last) for first, last in boundaries.ends),
            coordinates=tuple(values if values[0] < values[-1] else values[::-1].copy() for values in coordinates),
            flipped=tuple(bool(values[0] > values[-1]) for values in coordinates),
            fields=(*fields, *boundaries.masks),
            frames=frames,
            steps=steps,
            start_time=start,
            parameters=parameters,
            assumptions=tuple(printable(text) for text in self.assumptions),
        )

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
        array = self._array(f"dimensions/{axis}", 2)
        if array is None:
            raise DataError(f"{self.path}: it has no 'dimensions/{axis[:80]}', which it lists as an axis")
        return array

    def _array(self, name: str, max_dims: int) -> ArraySurvey | None:
        array = self.survey.arrays.get(name)
        if array is not None and not 1 <= len(array.shape) <= max_dims:
            raise DataError(f"{self.path}: '{name}' has shape {array.shape}")
        if array is not None and array.shape[-1] > MAX_POINTS:
            raise DataError(f"{self.path}: '{name}' is absurdly long")
        return array

    def _small(self, array: ArraySurvey) -> Array:
        if int(np.prod(array.shape)) > MAX_MASK_POINTS:
            raise DataError(f"{self.path}: '{array.name}' is absurdly large")
        return read_region(self.key, array, tuple(slice(0, n, 1) for n in array.shape))

    def _num_trajectories(self, times: ArraySurvey, dims: int) -> int:
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

    def _times(self, array: ArraySurvey, sizes: Sizes) -> tuple[Int64, Float64, float]:
        """Frames and time step of each trajectory, and when the first begins."""
        times = np.asarray(self._small(array), np.float64).reshape(-1, sizes.frames)
        # A trajectory that ends earlier than others of its file has no time for the rest.
        finite = np.isfinite(times)
        frames = np.where(finite.all(axis=1), sizes.frames, np.argmin(finite, axis=1))
        if frames.min() < 2:
            raise DataError(f"{self.path}: a trajectory has less than two frames with a time")
        steps = np.empty(len(times))
        uneven = False
        for row, count in enumerate(frames):
            given = times[row, :count]
            if (np.diff(given) <= 0).any():
                raise DataError(f"{self.path}: the times of trajectory {row} are not rising")
            steps[row] = (given[-1] - given[0]) / (count - 1)
            uneven = uneven or not equal_steps(given, float(steps[row]))
        if uneven:
            self.assumptions.append("frames are not equally far apart in time: the mean time step is taken")
        if (times[:, 0] != times[0, 0]).any():
            self.assumptions.append("trajectories begin at different times: the first one's is taken for all")
        if len(times) == 1:
            frames, steps = np.repeat(frames, sizes.trajectories), np.repeat(steps, sizes.trajectories)
        return frames.astype(np.int64), steps, float(times[0, 0])

    def _parameters(self, sizes: Sizes) -> dict[str, Float64]:
        """Constant scalars, then parameters that are attributes of the file, one value for each trajectory."""
        found: dict[str, Float64] = {}
        listed = self.survey.attributes.get("scalars", {}).get("field_names")
        present = [name.split("/")[1] for name in self.survey.arrays if name.startswith("scalars/")]
        for name in [str(n) for n in listed if str(n) in present] if listed is not None else sorted(present):
            array, attributes = self.survey.arrays[f"scalars/{name}"], self.survey.attributes[f"scalars/{name}"]
            per_sample = array.shape == (sizes.trajectories,) and flag(attributes, "sample_varying") is not False
            if flag(attributes, "time_varying") or not (per_sample or array.shape in ((), (1,))):
                self.survey.left_out.append(f"scalar '{name}' of shape {array.shape}, which is not one number for each")
                continue
            values = np.asarray(self._small(array), np.float64).reshape(-1)
            if np.isfinite(values).all():
                found[name] = np.broadcast_to(values, sizes.trajectories).copy()
        stated = self.root.get("simulation_parameters")
        names = [str(n) for n in stated] if stated is not None else [n for n in self.root if n not in _BOOKKEEPING]
        for name in names:
            values_of = self.root.get(name, [])
            if name not in found and len(values_of) == 1 and not isinstance(values_of[0], str):
                found[name] = np.full(sizes.trajectories, float(values_of[0]))
        return dict(list(found.items())[:64])
