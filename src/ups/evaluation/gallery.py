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

    parameters: name -> value, for the title.
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
    fields = task.fields_of(task.predicted)
    units = tuple(f.unit for f in fields for _ in range(f.num_channels(task.num_spatial_dims)))
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
        )
        for i, trajectory in enumerate(trajectories)
    ]
