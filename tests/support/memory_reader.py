"""A reader whose trajectories are functions of their number: nothing on disk, any number of trajectories."""

from __future__ import annotations

import numpy as np

from ups.formats.base import Array, GridReader, Source
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, Role, TaskSpec

ADVECTION = TaskSpec(
    name="advection",
    fields=(FieldSpec("u"), FieldSpec("v")),
    axes=(AxisSpec("x"),),
    parameters=(ParameterSpec("speed", minimum=0.0, maximum=1.0),),
    dt=0.1,
    conserved=("u",),
)
POISSON = TaskSpec(
    name="poisson",
    fields=(FieldSpec("a", role="static"), FieldSpec("u", role="target")),
    axes=(AxisSpec("x", "dirichlet"), AxisSpec("y", "dirichlet")),
    steady=True,
)


class MemoryReader(GridReader):
    """Waves that move by one grid point a frame; the second channel is ten times the first, shifted by one."""

    def __init__(self, num_trajectories: int = 5, num_frames: int = 6, points: int = 16, steady: bool = False) -> None:
        self.points = points
        axis = np.arange(points) / points
        task = POISSON if steady else ADVECTION
        splits = {"train": num_trajectories, "valid": 0, "test": num_trajectories}
        super().__init__(Source(task, (axis,) * len(task.axes), 0 if steady else num_frames, splits))
        self.frames_read = 0

    def where(self, split: str, trajectory: int) -> str:
        return f"{split} trajectory {trajectory}"

    def close(self) -> None:
        pass

    def _frames(self, split: str, trajectory: int, start: int, stop: int, step: int) -> Array:
        self.frames_read += stop - start
        x = np.arange(self.points)
        waves = [np.sin(2 * np.pi * (x - t + 0.3 * trajectory) / self.points) + 0.1 for t in range(start, stop, step)]
        return np.array([[w, 10 * w + 1] for w in waves], np.float32)

    def _given(self, split: str, trajectory: int, role: Role) -> Array:
        shape = (1, self.points, self.points)
        return np.full(shape, trajectory + (1.0 if role == "target" else 0.5), np.float32)

    def _parameters(self, split: str, trajectory: int) -> Array:
        return np.array([0.5], np.float32)

    def _source_identity(self) -> str:
        return "memory"
