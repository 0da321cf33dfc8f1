"""Metrics of ensembles as pure functions of (members, truth), in float64.

B samples, M members, C channels, S space. Members are (B, M, C, *S), truth is (B, C, *S), in one unit. Means over space
are over points; weights (*S) as in `ups.evaluation.metrics`. What is not finite stays so: a member that blew up makes
the scores of its sample infinite.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def mean_over_space(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """(B, C, *S) -> (B, C); `inf` where a value is not finite."""
    mean = (values if weights is None else values * weights.to(values)).flatten(2).mean(2)
    return torch.where(torch.isfinite(mean), mean, torch.inf)


def fair_crps(members: Tensor, truth: Tensor, weights: Tensor | None = None) -> Tensor:
    """(B, C): continuous ranked probability score, as if there were infinitely many members.

    The mean distance of members from the truth, less half the mean distance of two different members.
    """
    ensemble, count = members.double(), members.shape[1]
    distance = (ensemble - truth.double()[:, None]).abs().mean(1)
    # In ascending order, member i is above i others and below the rest: the sum over pairs without pairs.
    ordered = ensemble.sort(dim=1).values
    places = torch.arange(count, dtype=torch.float64, device=members.device)
    shape = (1, -1, *[1] * (members.ndim - 2))
    apart = (ordered * (2 * places - count + 1).reshape(shape)).sum(1)
    return mean_over_space(distance - apart / (count * (count - 1)), weights)


def gaussian_crps(center: Tensor, truth: Tensor, spread: Tensor, weights: Tensor | None = None) -> Tensor:
    """(B, C): score of Gaussian noise of size `spread` (B, C) around a single prediction (B, C, *S)."""
    sigma = spread.double().reshape(*spread.shape, *[1] * (truth.ndim - 2)).clamp_min(1e-300)
    z = (truth.double() - center.double()) / sigma
    bell = torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    below = torch.erf(z / math.sqrt(2.0))  # 2 Phi(z) - 1
    return mean_over_space(sigma * (z * below + 2 * bell - 1 / math.sqrt(math.pi)), weights)


def spread_square(members: Tensor, weights: Tensor | None = None) -> Tensor:
    """(B, C): mean over space of the unbiased variance of the members."""
    return mean_over_space(members.double().var(dim=1, unbiased=True), weights)


def mean_square_of_mean(members: Tensor, truth: Tensor, weights: Tensor | None = None) -> Tensor:
    """(B, C): mean over space of the squared error of the mean of the members."""
    return mean_over_space((members.double().mean(1) - truth.double()) ** 2, weights)


def spread_skill(spread_squares: Tensor, error_squares: Tensor, num_members: int) -> Tensor:
    """Ratio of spread and error from sums (or means) of their squares; 1 if members and truth are alike.

    The error of a mean of M members holds 1 / M of the spread, so M + 1 parts of M are expected of it.
    """
    factor = math.sqrt((num_members + 1) / num_members)
    return factor * (spread_squares / error_squares.clamp_min(1e-300)).sqrt()


def rank_counts(members: Tensor, truth: Tensor) -> Tensor:
    """(M + 1,): how many points have a truth above so many members; equal ones share a point among their ranks."""
    ensemble, wanted = members.double(), truth.double()[:, None]
    least = (ensemble < wanted).sum(1).flatten()
    most = (ensemble <= wanted).sum(1).flatten()
    share = 1.0 / (most - least + 1).double()
    # Each point adds its share from its least rank on and takes it away after its largest.
    steps = torch.zeros(members.shape[1] + 2, dtype=torch.float64, device=members.device)
    steps.index_add_(0, least, share).index_add_(0, most + 1, -share)
    return steps.cumsum(0)[:-1]
