"""Drives any model over held-out trajectories from a given start frame, batched and streamed.

Frames up to and including the start frame are given; only later ones are predicted and scored. Every trajectory of the
split is scored once: rank r of W takes trajectories r, r + W, ... and `ups.evaluation.accumulate` joins the ranks.
Memory holds one batch of trajectories, whatever the number of trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from ups.errors import DataError
from ups.evaluation.accumulate import Accumulator
from ups.formats.base import Reader
from ups.spec.place import Place
from ups.spec.task import TaskSpec


class Predictor(Protocol):
    """Anything that maps the frames so far to the next one, in physical units (see ups.models.stepper)."""

    def __call__(
        self,
        state: Tensor,
        static: Tensor,
        parameters: Tensor,
        dt: Tensor,
        task: TaskSpec,
        coordinates: tuple[Tensor, ...],
    ) -> Tensor: ...


@dataclass(frozen=True)
class RolloutPlan:
    """What is predicted from what: part of every score, because a score without it means nothing.

    context_frames: frames given to the model; start_frame: the last given frame; num_steps: predicted frames.
    """

    context_frames: int
    start_frame: int
    num_steps: int

    @property
    def first_frame(self) -> int:
        return self.start_frame - self.context_frames + 1

    @classmethod
    def whole(cls, reader: Reader, context_frames: int, start_frame: int | None = None) -> RolloutPlan:
        """Everything after the start frame (default: the earliest that has enough frames before it)."""
        start = context_frames - 1 if start_frame is None else start_frame
        steps = 1 if reader.task.steady else reader.num_frames - 1 - start
        if not reader.task.steady and (start < context_frames - 1 or steps < 1):
            raise DataError(
                f"task '{reader.task.name}' has {reader.num_frames} frames: start frame {start} with "
                f"{context_frames} context frames leaves nothing to predict"
            )
        return cls(context_frames, start, steps)


def rollout(
    predictor: Predictor,
    state: Tensor,
    static: Tensor,
    parameters: Tensor,
    dt: Tensor,
    task: TaskSpec,
    coordinates: tuple[Tensor, ...],
    num_steps: int,
) -> Iterator[Tensor]:
    """Yields (B, C, *S) for each of `num_steps` steps, feeding predictions back. state: (B, T, C, *S) given frames."""
    if task.steady:
        yield predictor(state, static, parameters, dt, task, coordinates)
        return
    for _ in range(num_steps):
        frame = predictor(state, static, parameters, dt, task, coordinates)
        yield frame
        state = torch.cat([state[:, 1:], frame[:, None]], dim=1)


def one_steps(
    predictor: Predictor,
    state: Tensor,
    static: Tensor,
    parameters: Tensor,
    dt: Tensor,
    task: TaskSpec,
    coordinates: tuple[Tensor, ...],
    context_frames: int,
) -> Tensor:
    """(B, T - context, C, *S): every frame after the first ones, each predicted from the true frames before it.

    state (B, T, C, *S) are all frames. A steady task has one prediction, (B, 1, C, *S).
    """
    if task.steady:
        return predictor(state, static, parameters, dt, task, coordinates)[:, None]
    frames = [
        predictor(state[:, first : first + context_frames], static, parameters, dt, task, coordinates)
        for first in range(state.shape[1] - context_frames)
    ]
    return torch.stack(frames, dim=1)


@torch.no_grad()
def score_task(
    predictors: dict[str, Predictor],
    reader: Reader,
    place: Place,
    plan: RolloutPlan,
    *,
    split: str = "test",
    batch_size: int = 32,
    max_trajectories: int | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    kind: Literal["rollout", "one_step"] = "rollout",
    progress: Callable[[int], None] | None = None,
) -> dict[str, Accumulator]:
    """This rank's share of the scores of every predictor on one task; the data is read once for all of them.

    kind: `rollout` feeds predictions back from the start frame on; `one_step` predicts each of the same frames from
    the true ones before it.
    """
    device = device or torch.device("cpu")
    task = reader.task
    role = task.predicted
    count = reader.splits[split] if max_trajectories is None else min(max_trajectories, reader.splits[split])
    scores = {name: Accumulator(plan.num_steps, task.channel_names(role)) for name in predictors}
    mine = range(place.rank, count, place.world_size)
    for first in range(0, len(mine), batch_size):
        part = mine[first : first + batch_size]
        inputs, truth = read_inputs(reader, split, part, plan, device, dtype)
        given = None if task.steady else inputs[0]
        for name, predictor in predictors.items():
            if kind == "one_step":
                known = inputs[0] if task.steady else torch.cat([inputs[0], truth], dim=1)
                frames = one_steps(predictor, known, *inputs[1:], context_frames=plan.context_frames)
            else:
                frames = torch.stack(list(rollout(predictor, *inputs, num_steps=plan.num_steps)), dim=1)
            scores[name].add(list(part), frames, truth, given)
        if progress is not None:
            progress(len(part))
    return scores


def read_inputs(
    reader: Reader, split: str, part: Sequence[int], plan: RolloutPlan, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, TaskSpec, tuple[Tensor, ...]], Tensor]:
    """Inputs of `rollout` for some trajectories, and the truth (B, T, C, *S) of the predicted frames only."""
    steady = reader.task.steady
    num_frames = 0 if steady else plan.context_frames + plan.num_steps
    block = reader.read_block(split, part, [0 if steady else plan.first_frame] * len(part), num_frames)

    def to_device(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype)

    state = to_device(block.state)
    truth = to_device(block.target)[:, None] if steady else state[:, plan.context_frames :]
    inputs = (
        state[:, : plan.context_frames],
        to_device(block.static),
        to_device(block.parameters),
        torch.full((len(part),), block.dt, device=device, dtype=dtype),
        reader.task,
        tuple(to_device(c) for c in block.coordinates),
    )
    return inputs, truth
