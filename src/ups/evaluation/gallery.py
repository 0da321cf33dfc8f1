"""Fields of a few chosen trajectories, for eyes: truth and prediction in physical units, small enough to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from ups.evaluation.rollout import RolloutPlan, batches_of, read_inputs
from ups.formats.base import Reader
from ups.models.rollout import Predictor, rollout
from ups.spec.batch import Float64
from ups.spec.descriptors import DivergenceLimits
from ups.spec.grid import is_uniform
from ups.spec.task import TaskSpec


@dataclass(frozen=True)
class Example:
    """One trajectory. prediction, and truth where it is known: (T, C, *S), the predicted steps only.

    parameters: name -> value, for the title. given: name -> values (*S) of what a steady task is solved for, with their
    units. split: where the trajectory is from, "" where that is not known. diverged_at: number of the first frame that
    has diverged, from 0; None if none has.
    """

    task: TaskSpec
    trajectory: int
    first_step_time: float
    step_time: float
    channels: tuple[str, ...]
    units: tuple[str, ...]
    coordinates: tuple[npt.NDArray[np.float64], ...]
    prediction: npt.NDArray[np.float64]
    truth: npt.NDArray[np.float64] | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)
    given: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    given_units: tuple[str, ...] = ()
    split: str = ""
    diverged_at: int | None = None

    @property
    def source(self) -> str:
        """Which trajectory it is, for a title; "" where it is none of a data set."""
        return f"{self.split} trajectory {self.trajectory}".strip() if self.trajectory >= 0 else ""

    def time_of(self, step: int) -> float:
        return self.first_step_time + step * self.step_time


@torch.no_grad()
def examples(
    predictor: Predictor,
    reader: Reader,
    plan: RolloutPlan,
    trajectories: Sequence[int],
    split: str = "test",
    limits: DivergenceLimits | None = None,
) -> list[Example]:
    """Truth and prediction of chosen trajectories, in the order asked for. limits: of what has not diverged."""
    task = reader.task
    units, given_units = (
        tuple(f.unit for f in task.fields_of(role) for _ in range(f.num_channels(task.num_spatial_dims)))
        for role in (task.predicted, "static")
    )
    names = task.channel_names("static") if task.steady else ()
    found: dict[int, Example] = {}
    for part, its_plan in batches_of(reader, split, trajectories, plan, max(1, len(trajectories))):
        batch, truth = read_inputs(reader, split, part, its_plan, torch.device("cpu"), torch.float32)
        frames = torch.stack(list(rollout(predictor, batch, its_plan.num_steps)), dim=1)
        for i, trajectory in enumerate(part):
            dt = reader.dt_in(split, trajectory)
            bad = [] if limits is None else limits.exceeded(frames[i]).nonzero().flatten().tolist()
            found[trajectory] = Example(
                task=task,
                trajectory=trajectory,
                first_step_time=(plan.start_frame + 1) * dt,
                step_time=dt,
                channels=task.channel_names(task.predicted),
                units=units,
                coordinates=reader.coordinates,
                prediction=frames[i].double().numpy(),
                truth=truth[i].double().numpy(),
                parameters={p.name: float(v) for p, v in zip(task.parameters, batch.parameters[i], strict=True)},
                given={name: batch.static[i, n].double().numpy() for n, name in enumerate(names)},
                given_units=given_units,
                split=split,
                diverged_at=bad[0] if bad else None,
            )
    return [even(found[trajectory]) for trajectory in trajectories if trajectory in found]


def even(example: Example) -> Example:
    """The example on equally spaced points, as pictures show them: interpolated where the grid is not uniform."""
    prediction, truth, given = example.prediction, example.truth, dict(example.given)
    coordinates = list(example.coordinates)
    for number, points in enumerate(coordinates):
        if is_uniform(points):
            continue
        coordinates[number] = np.linspace(points[0], points[-1], len(points))
        dim = number - len(coordinates)
        prediction = _interpolated(prediction, dim, points, coordinates[number])
        truth = None if truth is None else _interpolated(truth, dim, points, coordinates[number])
        given = {name: _interpolated(values, dim, points, coordinates[number]) for name, values in given.items()}
    return replace(example, prediction=prediction, truth=truth, given=given, coordinates=tuple(coordinates))


def _interpolated(values: Float64, dim: int, points: Float64, wanted: Float64) -> Float64:
    """Linear between neighboring points along one axis."""
    last = np.clip(np.searchsorted(points, wanted, side="right"), 1, len(points) - 1)
    part = (wanted - points[last - 1]) / (points[last] - points[last - 1])
    shape = [1] * values.ndim
    shape[dim] = -1
    left, right = np.take(values, last - 1, axis=dim), np.take(values, last, axis=dim)
    return np.asarray(left + part.reshape(shape) * (right - left))
