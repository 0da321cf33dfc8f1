"""The loop of a rollout: predictions fed back as the next given frames. Evaluation and simulator both run this one.

Whether gradients are kept is the caller's choice. Training unrolls on its own (`ups.training.stages`), because it adds
noise and cuts gradients between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ups.spec.batch import Batch

# From the given frames (B, T, C, *S) in `batch.state` to the next one (B, C, *S), or to the target of a steady task, in
# physical units. A stepper is one, and so is each reference.
Predictor = Callable[[Batch], Tensor]


def rollout(predictor: Predictor, batch: Batch, num_steps: int) -> Iterator[Tensor]:
    """Yields (B, C, *S) for each of `num_steps` steps after the frames in `batch.state`; once for a steady task.

    `batch.stage_step` counts the steps, for a predictor that draws.
    """
    if batch.task.steady:
        yield predictor(batch)
        return
    for _ in range(num_steps):
        frame = predictor(batch)
        yield frame
        # with one context frame there is nothing to join, and so nothing to copy
        new = frame[:, None]
        state = new if batch.state.shape[1] == 1 else torch.cat([batch.state[:, 1:], new], dim=1)
        batch = replace(batch, state=state, stage_step=batch.stage_step + 1)
