"""What a stage returns, and the errors of samples that its losses are made of.

B samples, C channels, S space. Each function returns one number per sample: weighting and adding up are the stage's, so
that a sum over micro-batches and ranks is exact whatever the cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.utils import _pytree

LossKind = Literal["relative_l2", "nrmse", "mse"]


@dataclass(frozen=True)
class Losses:
    """total: scalar, the weighted sum over the samples of a micro-batch; over a global batch the weights add up to 1.

    metrics: `namespace/name` -> detached (2,) tensor, a sum and the number (or weight) to divide it by.
    """

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


def nrmse(error: Tensor, fields: Tensor, floor: Tensor) -> Tensor:
    """(B, C, *S) error and (B, T, C, *S) fields in one unit -> (B,): root mean square error of each channel relative to
    that of the field itself, mean over channels: what scores are made of.

    floor (C,): smallest size of a field that counts, in the same unit.
    """
    dims = tuple(range(2, error.ndim))
    size = fields.square().mean((1, *(d + 1 for d in dims)))  # (B, C)
    return torch.sqrt(error.square().mean(dims) / (size + floor * floor) + 1e-16).mean(1)


def mean_square(error: Tensor) -> Tensor:
    """(B, ...) -> (B,): plain mean square."""
    return _mean_square(error)


def _mean_square(x: Tensor) -> Tensor:
    return x.flatten(1).square().mean(1)
