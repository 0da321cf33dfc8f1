"""Drives any model over held-out trajectories from a given start frame, batched and streamed.

Frames up to and including the start frame are given; only later ones are predicted and scored. Every trajectory of the
split is scored once: rank r of W takes trajectories r, r + W, ... and `ups.evaluation.accumulate` joins the ranks.
Memory holds one batch of trajectories, whatever the number of trajectories. `references` are the predictors without
training that every score is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ups.errors import DataError
from ups.evaluation.accumulate import Accumulator
from ups.formats.base import Reader
from ups.models.stepper import Predictor, TrainingMean, linear_extrapolation, persistence, rollout
from ups.spec.batch import Batch, RankInfo
from ups.spec.descriptors import DivergenceLimits
from ups.spec.grid import point_weights
from ups.spec.points import POINTS, at_points, valid_at_points
from ups.spec.statistics import Statistics


@dataclass(frozen=True)
class RolloutPlan:
    """What is predicted from what: part of every score, because a score without it means nothing.

    context_frames: frames given to the model; start_frame: the last given frame; num_steps: predicted frames, of the
    longest trajectory where they differ in length.
    """

    context_frames: int
    start_frame: int
    num_steps: int

    @property
    def first_frame(self) -> int:
        return self.start_frame - self.context_frames + 1

    @classmethod
    def whole(
        cls, reader: Reader, context_frames: int, start_frame: int | None = None, split: str | None = None
    ) -> RolloutPlan:
        """Everything after the start frame (default: the earliest that has enough frames before it).

        split: whose longest trajectory counts; without it that of all splits.
        """
        start = context_frames - 1 if start_frame is None else start_frame
        frames = None if split is None else reader.frames_of(split)
        longest = reader.num_frames if frames is None or not len(frames) else int(frames.max())
        steps = 1 if reader.task.steady else longest - 1 - start
        if not reader.task.steady and (start < context_frames - 1 or steps < 1):
            raise DataError(
                f"task '{reader.task.name}' has {longest} frames: start frame {start} with "
                f"{context_frames} context frames leaves nothing to predict"
            )
        return cls(context_frames, start, steps)


def one_steps(predictor: Predictor, batch: Batch, context_frames: int) -> Tensor:
    """(B, T - context, C, *S): every frame after the first ones, each predicted from the true frames before it.

    batch.state (B, T, C, *S) are all frames. A steady task has one prediction, (B, 1, C, *S).
    """
    if batch.task.steady:
        return predictor(batch)[:, None]
    frames = [
        predictor(batch.with_state(batch.state[:, first : first + context_frames]))
        for first in range(batch.state.shape[1] - context_frames)
    ]
    return torch.stack(frames, dim=1)


@torch.no_grad()
def score_task(
    predictors: dict[str, Predictor],
    reader: Reader,
    rank_info: RankInfo,
    plan: RolloutPlan,
    *,
    split: str = "test",
    batch_size: int = 32,
    max_trajectories: int | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    kind: Literal["rollout", "one_step"] = "rollout",
    progress: Callable[[int], None] | None = None,
    statistics: Statistics | None = None,
) -> dict[str, Accumulator]:
    """This rank's share of the scores of every predictor on one task; the data is read once for all of them.

    kind: `rollout` feeds predictions back from the start frame on; `one_step` predicts each of the same frames from
    the true ones before it. statistics: of the task, which say when a prediction has diverged.
    """
    task = reader.task
    channels = task.channel_names(task.predicted)
    weights = weights_of(reader)
    if reader.most_points:  # each counts alike, and they have no spectrum
        weights = torch.ones(reader.most_points, *[1] * (len(reader.space) - 1), dtype=torch.float64)
    shorter = not task.steady and reader.frames_of(split) is not None
    limits = None if statistics is None else DivergenceLimits.of(task, statistics)
    scores = {name: Accumulator(plan.num_steps, channels, weights, shorter, limits) for name in predictors}
    for part, span in batches_of(reader, split, own_part(reader, split, rank_info, max_trajectories), plan, batch_size):
        batch, truth = read_inputs(reader, split, part, span, device or torch.device("cpu"), dtype)
        scored, context, valid = truth, None if task.steady else batch.state, batch.valid
        if (points := batch.extra.get(POINTS)) is not None:  # the truth is known there, and on the grid only nearly
            values, valid = read_point_values(reader, split, part, span).to(truth), valid_at_points(points)
            context, scored = (
                None if context is None else values[:, : span.context_frames],
                values[:, -truth.shape[1] :],
            )
        for name, predictor in predictors.items():
            if kind == "one_step":
                known = batch if task.steady else batch.with_state(torch.cat([batch.state, truth], dim=1))
                frames = one_steps(predictor, known, plan.context_frames)
            else:
                frames = torch.stack(list(rollout(predictor, batch, span.num_steps)), dim=1)
            frames = frames if points is None else at_points(frames, points)
            scores[name].add(list(part), frames, scored, context, valid)
        if progress is not None:
            progress(len(part))
    return scores


def weights_of(reader: Reader) -> Tensor | None:
    """(*S): how much each point counts, relative to the mean; None on a uniform grid."""
    weights = point_weights(reader.task.axes, reader.coordinates)
    return None if weights is None else torch.from_numpy(weights)


def own_part(reader: Reader, split: str, rank_info: RankInfo, max_trajectories: int | None) -> range:
    """The trajectories that this rank scores."""
    count = reader.splits[split] if max_trajectories is None else min(max_trajectories, reader.splits[split])
    return range(rank_info.rank, count, rank_info.world_size)


def batches_of(
    reader: Reader, split: str, trajectories: Sequence[int], plan: RolloutPlan, batch_size: int
) -> Iterator[tuple[Sequence[int], RolloutPlan]]:
    """Trajectories of equal length together, with the plan up to their end; those with nothing to predict are left out.

    Where all are equally long, they stay in their order.
    """
    frames = None if reader.task.steady else reader.frames_of(split)
    by_steps: dict[int, Sequence[int]] = {plan.num_steps: trajectories}
    if frames is not None:
        by_steps = {}
        for trajectory in trajectories:
            steps = min(plan.num_steps, int(frames[trajectory]) - 1 - plan.start_frame)
            by_steps[steps] = [*by_steps.get(steps, ()), trajectory]
    for steps, alike in by_steps.items():
        for first in range(0, len(alike) if steps > 0 else 0, batch_size):
            yield alike[first : first + batch_size], replace(plan, num_steps=steps)


def read_inputs(
    reader: Reader, split: str, part: Sequence[int], plan: RolloutPlan, device: torch.device, dtype: torch.dtype
) -> tuple[Batch, Tensor]:
    """What a predictor gets of some trajectories, and the truth (B, T, C, *S) of the predicted frames only.

    The batch holds the given frames and an empty target: no predictor can see what it is asked for.
    """
    steady = reader.task.steady
    num_frames = 0 if steady else plan.context_frames + plan.num_steps
    block = reader.read_block(split, part, [0 if steady else plan.first_frame] * len(part), num_frames)

    batch = Batch.of(
        reader.task,
        state=block.state[:, : plan.context_frames],
        static=block.static,
        parameters=block.parameters,
        dt=block.dt,
        coordinates=block.coordinates,
        numbers=part,
        extra={} if block.points is None else {POINTS: block.points},
    ).to(device, dtype)
    truth = block.target[:, None] if steady else block.state[:, plan.context_frames :]
    return batch, torch.from_numpy(truth).to(device=device, dtype=dtype)


def read_point_values(reader: Reader, split: str, part: Sequence[int], plan: RolloutPlan) -> Tensor:
    """All frames of a plan at the points that fields live on, (B, T, C, N, 1, ...); one of a steady task."""
    steady = reader.task.steady
    num_frames = 0 if steady else plan.context_frames + plan.num_steps
    block = reader.read_block(split, part, [0 if steady else plan.first_frame] * len(part), num_frames)
    return torch.from_numpy(block.point_values)


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
    predictors: dict[str, Predictor] = {"training mean": TrainingMean({reader.task.name: mean_field(reader)})}
    if not reader.task.steady:
        predictors["persistence"] = persistence
        if plan.context_frames >= 2:
            predictors["linear extrapolation"] = linear_extrapolation
    return predictors
