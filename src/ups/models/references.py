"""Predictors that learn nothing: what every score is held against. Physical units in and out, like `Stepper`."""

from __future__ import annotations

from torch import Tensor

from ups.spec.batch import Batch


def persistence(batch: Batch) -> Tensor:
    """Nothing changes: the next frame (B, C, *S) is the last one given."""
    return batch.state[:, -1]


def linear_extrapolation(batch: Batch) -> Tensor:
    """The last change goes on: 2 u(t) - u(t - dt). Needs two given frames; with one it is persistence."""
    state = batch.state
    return state[:, -1] if state.shape[1] < 2 else 2 * state[:, -1] - state[:, -2]


class TrainingMean:
    """The mean frame of the train split, point by point: the least that a steady task's model must beat.

    mean_fields: task name -> (C, *S), on the grid of the data (see `ups.evaluation.rollout.mean_field`).
    """

    def __init__(self, mean_fields: dict[str, Tensor]) -> None:
        self.mean_fields = mean_fields

    def __call__(self, batch: Batch) -> Tensor:
        mean = self.mean_fields[batch.task.name].to(device=batch.dt.device, dtype=batch.dt.dtype)
        return mean[None].expand(batch.num_samples, *mean.shape)
