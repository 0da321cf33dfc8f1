"""What a stage returns, and the errors of samples that its losses are made of.

B samples, C channels, S space. Each function returns one number per sample: the mean over samples is the stage's, so
that a sum over micro-batches and ranks is exact whatever the cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils import _pytree


@dataclass(frozen=True)
class Losses:
    """total: scalar, the mean over the samples of the batch; metrics: `namespace/name` -> detached scalar."""

    total: Tensor
    metrics: dict[str, Tensor]


# `fully_shard` finds the tensors of a module's output, on which it hooks the backward pass, through pytrees only: an
# unregistered class would hide them.
_pytree.register_pytree_node(
    Losses,
    lambda losses: ([losses.total, losses.metrics], None),
    lambda children, _: Losses(*children),
    serialized_type_name="ups.training.losses.Losses",
)


def relative_l2(error: Tensor, reference: Tensor, floor: float) -> Tensor:
    """(B, ...) error and what it is relative to -> (B,): ratio of their root mean squares.

    floor: smallest reference, in the same (scaled) units; keeps a sample in which nothing happens from dominating.
    """
    size = _mean_square(reference)
    return torch.sqrt(_mean_square(error) / (size + floor * floor) + 1e-12)


def mean_square(error: Tensor, reference: Tensor, floor: float) -> Tensor:
    """(B, ...) -> (B,): plain mean square, whatever the size of the reference."""
    del reference, floor
    return _mean_square(error)


def sample_errors(kind: Literal["relative_l2", "mse"], error: Tensor, reference: Tensor, floor: float) -> Tensor:
    """(B,) errors of the kind that a recipe names."""
    return (relative_l2 if kind == "relative_l2" else mean_square)(error, reference, floor)


def _mean_square(x: Tensor) -> Tensor:
    return x.flatten(1).square().mean(1)
