"""Fields of a few chosen trajectories, for eyes: truth and prediction in physical units, small enough to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ups.evaluation.rollout import RolloutPlan, read_inputs
from ups.formats.base import Reader
from ups.models.rollout import Predictor, rollout
from ups.spec.task import TaskSpec


@dataclass(frozen=True)
class Example:
    """One trajectory. prediction, and truth where it is known: (T, C, *S), the predicted steps only.

    parameters: name -> value, for the title. given: name -> values (*S) of what a steady task is solved for, with their
    units.
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

    def time_of(self, step: int) -> float:
        return self.first_step_time + step * self.step_time


@torch.no_grad()
def examples(
    predictor: Predictor, reader: Reader, plan: RolloutPlan, trajectories: Sequence[int], split: str = "test"
) -> list[Example]:
    """Truth and prediction of chosen trajectories, in the order asked for."""
    task = reader.task
    batch, truth = read_inputs(reader, split, trajectories, plan, torch.device("cpu"), torch.float32)
    frames = torch.stack(list(rollout(predictor, batch, plan.num_steps)), dim=1)
    units, given_units = (
        tuple(f.unit for f in task.fields_of(role) for _ in range(f.num_channels(task.num_spatial_dims)))
        for role in (task.predicted, "static")
    )
    names = task.channel_names("static") if task.steady else ()
    return [
        Example(
            task=task,
            trajectory=trajectory,
            first_step_time=(plan.start_frame + 1) * task.dt,
            step_time=task.dt,
            channels=task.channel_names(task.predicted),
            units=units,
            coordinates=reader.coordinates,
            prediction=frames[i].double().numpy(),
            truth=truth[i].double().numpy(),
            parameters={p.name: float(v) for p, v in zip(task.parameters, batch.parameters[i], strict=True)},
            given={name: batch.static[i, number].double().numpy() for number, name in enumerate(names)},
            given_units=given_units,
        )
        for i, trajectory in enumerate(trajectories)
    ]
