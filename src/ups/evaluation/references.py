"""What a score is held against: the training mean, and the set of untrained predictors of a task."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ups.evaluation.rollout import RolloutPlan
from ups.formats.base import Reader
from ups.models.references import TrainingMean, linear_extrapolation, persistence
from ups.models.rollout import Predictor


def mean_field(reader: Reader, max_trajectories: int = 512) -> Tensor:
    """(C, *S): point-by-point mean of target or state over (at most so many) train trajectories, streamed."""
    count = min(reader.splits["train"], max_trajectories)
    total: np.ndarray[tuple[int, ...], np.dtype[np.float64]] | None = None
    for trajectory in range(count):
        window = reader.read("train", trajectory, 0, reader.frames_in("train", trajectory))
        frame = window.target if reader.task.steady else window.state.mean(axis=0, dtype=np.float64)
        total = frame.astype(np.float64) if total is None else total + frame
    assert total is not None, "a train split is never empty"
    return torch.from_numpy(total / count)


def references(reader: Reader, plan: RolloutPlan) -> dict[str, Predictor]:
    """The untrained predictors that make sense for a task: the mean for steady ones, persistence and co. for others."""
    found: dict[str, Predictor] = {"training mean": TrainingMean({reader.task.name: mean_field(reader)})}
    if not reader.task.steady:
        found["persistence"] = persistence
        if plan.context_frames >= 2:
            found["linear extrapolation"] = linear_extrapolation
    return found
