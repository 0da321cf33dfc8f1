"""The losses that a recipe can name (`loss` of the operator stage), their parts, and what a stage returns.

A loss is a function of `Prediction` that returns one number per sample. Weighting and adding up are the stage's: a sum
over micro-batches and ranks is exact whatever the cut. To add one here: a function, and its name in
`ups.registry.LOSSES`; elsewhere: `LOSSES.register`, in a script or a package (docs/extend/script.md).

B samples, T frames, C channels, S space.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree

# Errors of members that are nearer to each other than this, in usual sizes of a field, count as equal.
_EQUAL = 1e-6


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


@dataclass(frozen=True)
class Prediction:
    """A prediction next to the truth, for a loss.

    error, reference (B, C, *S): predicted minus true change, and the true change, in standard deviations of increments;
    normalized target for a steady task. They may also be latents (B, *N, Z). floor: smallest reference that counts.
    in_field_units: gives error (B, C, *S), fields (B, T, C, *S) and smallest field (C,), all in typical sizes of each
    field; None for latents.
    """

    error: Tensor
    reference: Tensor
    floor: float
    in_field_units: Callable[[], tuple[Tensor, Tensor, Tensor]] | None = None


# (B,) from a prediction.
Loss = Callable[[Prediction], Tensor]


def relative_l2_loss(prediction: Prediction) -> Tensor:
    """(B,): error relative to the size of the change."""
    return relative_l2(prediction.error, prediction.reference, prediction.floor)


def nrmse_loss(prediction: Prediction) -> Tensor:
    """(B,): error of each field relative to the field itself, as scores are."""
    assert prediction.in_field_units is not None  # recipes with latents refuse it
    return normalized_rmse(*prediction.in_field_units())


def mse_loss(prediction: Prediction) -> Tensor:
    """(B,): plain mean square."""
    return mean_square(prediction.error)


# Whose errors are relative to the fields, so that the statistics say how large those of an untrained model are.
nrmse_loss.relative_to_fields = True  # type: ignore[attr-defined]


def relative_l2(error: Tensor, reference: Tensor, floor: float) -> Tensor:
    """(B, ...) error and what it is relative to -> (B,): ratio of their root mean squares.

    floor: smallest reference, in the same (scaled) units; keeps a sample in which nothing happens from dominating.
    """
    size = mean_square(reference)
    return torch.sqrt(mean_square(error) / (size + floor * floor) + 1e-12)


def normalized_rmse(error: Tensor, fields: Tensor, floor: Tensor) -> Tensor:
    """(B, C, *S) error and (B, T, C, *S) fields in one unit -> (B,): root mean square error of each channel relative to
    that of the field itself, mean over channels: what scores are made of.

    floor (C,): smallest size of a field that counts, in the same unit.
    """
    dims = tuple(range(2, error.ndim))
    size = fields.square().mean((1, *(d + 1 for d in dims)))  # (B, C)
    return torch.sqrt(error.square().mean(dims) / (size + floor * floor) + 1e-16).mean(1)


def almost_fair_crps(errors: Tensor, fields: Tensor, floor: Tensor, fairness: float = 0.95) -> Tensor:
    """(B, M, C, *S) errors of the members and (B, T, C, *S) fields in one unit -> (B,): continuous ranked probability
    score of each point, relative to the root mean square of the field, mean over points and channels.

    floor (C,): as for `nrmse`. fairness: 1 is the fair score, which two members can make arbitrarily small by moving
    apart in a way that cancels; 0 the plain one, which rewards too little spread (arXiv 2412.15832). As a sum over
    pairs no large numbers cancel.
    """
    num_members = errors.shape[1]
    kept = 1.0 - (1.0 - fairness) / num_members
    dims = tuple(range(2, errors.ndim - 1))  # of one member's error: (B, C, *S)
    size = torch.sqrt(fields.square().mean((1, *(d + 1 for d in dims))) + floor * floor)  # (B, C)
    each = errors.unbind(1)
    total = torch.zeros_like(each[0])
    for first in range(num_members):
        for second in range(first + 1, num_members):
            apart = each[first] - each[second]
            # Rounded at zero: members start equal but for rounding, whose sign must not decide where they go.
            distance = torch.sqrt(apart.square() + _EQUAL**2) - _EQUAL
            total = total + (each[first].abs() + each[second].abs() - kept * distance)
    score = total.mean(dims) / (num_members * (num_members - 1))  # (B, C)
    return (score / size).mean(1)


def mean_square(x: Tensor) -> Tensor:
    """(B, ...) -> (B,): plain mean square."""
    return x.flatten(1).square().mean(1)
