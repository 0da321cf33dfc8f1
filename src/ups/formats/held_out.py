"""Held-out trajectories from another data set of the same task, next to the train split that a model knows.

For scores in another regime: parameters outside the range of the training, another source, other starts. The task stays
that of the model: its declared ranges are units of the network's inputs, and those of the other set would change them
silently.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from ups.errors import ConfigError
from ups.formats.base import Array, Int64, Reader
from ups.spec.batch import Float64
from ups.spec.task import Role, TaskSpec

TRAIN = "train"
# What two descriptions of a task may differ in and still mean the same numbers.
_MAY_DIFFER = frozenset({"name", "parameters", "equation", "dt_range", "conserved", "symmetries", "residual"})


class HeldOutElsewhere(Reader):
    """A reader: split `train` of `own`, valid and test of `other`, both with the same subsampling.

    task, coordinates: those of the model, where `own` is not the data that it was trained with.
    """

    def __init__(
        self,
        own: Reader,
        other: Reader,
        task: TaskSpec | None = None,
        coordinates: tuple[Float64, ...] | None = None,
    ) -> None:
        super().__init__(other.source, other.subsampling)
        self.own, self.other = own, other
        self._task, self._coordinates = task or own.task, coordinates or own.coordinates
        self._splits |= {name: count for name, count in other.splits.items() if name not in self._splits}
        self._splits[TRAIN] = own.splits.get(TRAIN, 0)
        _check_same(self._task, self._coordinates, other)

    def _place(self, split: str, trajectory: int) -> tuple[Reader, str, int]:
        """Where a trajectory is: reader, split, number."""
        return self.own if split == TRAIN else self.other, split, trajectory

    def frames_of(self, split: str) -> Int64 | None:
        return (self.own if split == TRAIN else self.other).frames_of(split)

    def frames_in(self, split: str, trajectory: int) -> int:
        reader, there, row = self._place(split, trajectory)
        return reader.frames_in(there, row)

    def dt_in(self, split: str, trajectory: int) -> float:
        reader, there, row = self._place(split, trajectory)
        return reader.dt_in(there, row)

    def times_in(self, split: str, trajectory: int) -> Float64:
        reader, there, row = self._place(split, trajectory)
        return reader.times_in(there, row)

    def where(self, split: str, trajectory: int) -> str:
        reader, there, row = self._place(split, trajectory)
        return reader.where(there, row)

    def identity(self) -> str:
        return self.other.identity()

    def close(self) -> None:
        self.own.close()
        self.other.close()

    def _frames(self, split: str, trajectory: int, start: int, stop: int, step: int) -> Array:
        reader, there, row = self._place(split, trajectory)
        return reader._frames(there, row, start, stop, step)

    def _given(self, split: str, trajectory: int, role: Role) -> Array:
        reader, there, row = self._place(split, trajectory)
        return reader._given(there, row, role)

    def _parameters(self, split: str, trajectory: int) -> Array:
        reader, there, row = self._place(split, trajectory)
        return reader._parameters(there, row)

    @property
    def most_points(self) -> int:
        return max(self.own.most_points, self.other.most_points)

    def _at_points(self, split: str, trajectory: int, frames: slice) -> tuple[Array, Array]:
        reader, there, row = self._place(split, trajectory)
        return reader._at_points(there, row, frames)

    def mesh_path(self, split: str, trajectory: int) -> str:
        reader, there, row = self._place(split, trajectory)
        return reader.mesh_path(there, row)

    def _source_identity(self) -> str:
        return self.other._source_identity()


def _check_same(own: TaskSpec, coordinates: tuple[Float64, ...], other: Reader) -> None:
    """Raises ConfigError if the other data cannot be scored by a model of this task, on a grid of these points."""
    name, space = own.name, tuple(len(points) for points in coordinates)
    for field in fields(own):
        mine, its = getattr(own, field.name), getattr(other.task, field.name)
        if field.name not in _MAY_DIFFER and mine != its:
            raise ConfigError(
                f"task '{name}': {field.name} of the other data is {its}, and that of the model {mine}",
                hint="score on data of the same fields, axes and time step",
            )
    parameters = [[(p.name, p.scale, p.unit) for p in task.parameters] for task in (own, other.task)]
    if parameters[0] != parameters[1]:
        raise ConfigError(
            f"task '{name}': the other data have the parameters {parameters[1]}, and the model {parameters[0]}",
            hint="score on data with the same parameters; their values may lie elsewhere",
        )
    pairs = zip(coordinates, other.coordinates, strict=True)
    if space != other.space or any(np.abs(a - b).max() > 0.01 * np.diff(a).min(initial=np.inf) for a, b in pairs):
        raise ConfigError(
            f"task '{name}': the other data have a grid of {other.space}, and the model {space} or other points",
            hint="score on data on the same grid, with its points in the same places",
        )
