"""Noise on the given frames: what a rollout's own errors look like to the next step.

A model that only sees clean frames leaves alone, or amplifies, what its errors put into waves that the data does not
contain. Part of the samples stay clean; the others get white noise whose size is log-uniform over two decades, because
errors of a good model are small and those of a poor one are not. Sizes are relative to how much the frame itself varies
over space, so that frames in which little is left are not drowned.

Draws are keyed by (seed, task, step, window number) and counted in whole numbers, so that every device and every cut of
a batch has the same ones. B samples, T frames, C channels, S space.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ups.models.keyed_normal import keyed_normal
from ups.models.normalization import Normalization
from ups.spec.batch import Batch
from ups.spec.keyed import key_of, keyed_uniform

_DECADES = 2.0


def noisy(
    batch: Batch, frames: Tensor, normalization: Normalization, seed: int, *, largest: float, clean: float
) -> Tensor:
    """frames (B, T, C, *S) of a batch with noise up to `largest` deviations; a share `clean` of samples has none."""
    if largest == 0 or clean == 1:
        return frames
    task = batch.task
    key = key_of(seed, "noise", task.name, batch.stage_step)
    numbers = batch.numbers.numpy()
    draws = keyed_uniform(key, numbers, 2)  # (B, 2): size, and whether there is any
    hit = np.flatnonzero(draws[:, 1] >= clean)
    if len(hit) == 0:
        return frames
    size = torch.from_numpy(largest * 10.0 ** (-_DECADES * draws[hit, 0]))
    index = torch.from_numpy(hit).to(frames.device, non_blocking=True)
    chosen = frames.index_select(0, index)
    space = tuple(range(3, frames.ndim))
    deviation = chosen.std(space, correction=0, keepdim=True)
    deviation = torch.minimum(deviation, normalization.state_scale(task, frames))
    values = keyed_normal(
        key_of(seed, "noise values", task.name, batch.stage_step), numbers[hit], chosen[0].numel(), frames
    )
    scale = deviation * size.to(frames.device, frames.dtype, non_blocking=True).reshape(-1, *([1] * (frames.ndim - 1)))
    return frames.index_add(0, index, values.reshape(chosen.shape) * scale)
