"""Every metric as a pure function of (prediction, truth), in float64. Context frames never reach these functions.

Shape legend: B samples, T predicted steps, C channels, S space, M members. Inputs are (B, T, C, *S) in physical units;
metrics of ensembles take members (B, M, C, *S) and truth (B, C, *S).
Each function says over what it averages; `(B, T, C)` results are averaged further by `ups.evaluation.accumulate`, which
counts every sample exactly once over all ranks. A prediction that is not finite gives `inf`, never a dropped sample.
Means over space are over points; on a grid that is not uniform, `weights` (*S) say how much each counts
(`ups.spec.grid.point_weights`). Spectra and bands are for uniform grids alone.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ups.errors import PluginError
from ups.registry import METRICS

# Below this size a norm counts as this size: the error of an all-zero field is huge but finite.
TINY = 1e-12
# The Well adds this to the variance in VRMSE.
WELL_EPSILON = 1e-7
# Shells of wave numbers [0, 4), [4, 12), [12, inf), as PDEBench names low, middle and high frequencies.
BAND_EDGES = (0, 4, 12)
BAND_NAMES = ("low", "mid", "high")
CORRELATION_LIMIT = 0.8
# A channel that varies by less than this part of its size is constant but for rounding.
CONSTANT = 1e-5


def _space(x: Tensor) -> tuple[int, ...]:
    return tuple(range(3, x.ndim))


def _guard(values: Tensor, prediction: Tensor) -> Tensor:
    """`inf` wherever the (B, T, C) slice of the prediction is not finite everywhere."""
    finite = torch.isfinite(prediction).all(dim=_space(prediction))
    return torch.where(finite & torch.isfinite(values), values, torch.full_like(values, torch.inf))


def _mean(values: Tensor, weights: Tensor | None) -> Tensor:
    """Mean over space; weights (*S), or (B, 1, 1, *S) of samples with holes, have a mean of 1."""
    return (values if weights is None else values * weights.to(values)).mean(dim=_space(values))


def without_holes(weights: Tensor | None, valid: Tensor | None) -> Tensor | None:
    """Weights (*S), and points that count (B, 1, *S) -> (B, 1, *S) with a mean of 1; the weights if all points do."""
    if valid is None:
        return weights
    counted = valid.double() * (1.0 if weights is None else weights)
    return counted / counted.flatten(1).mean(1).reshape(-1, *[1] * (valid.ndim - 1)).clamp_min(TINY)


def _mean_square_error(prediction: Tensor, truth: Tensor, weights: Tensor | None) -> Tensor:
    return _mean((prediction.double() - truth.double()) ** 2, weights)


def rmse(prediction: Tensor, truth: Tensor, weights: Tensor | None = None) -> Tensor:
    """(B, T, C): root of the mean over space of the squared error."""
    return _guard(_mean_square_error(prediction, truth, weights).sqrt(), prediction)


def nrmse(prediction: Tensor, truth: Tensor, weights: Tensor | None = None) -> Tensor:
    """(B, T, C): RMSE relative to the root mean square of the truth. Hides failure on fields with a large mean."""
    scale = _mean(truth.double() ** 2, weights).sqrt().clamp_min(TINY)
    return _guard(_mean_square_error(prediction, truth, weights).sqrt() / scale, prediction)


def vrmse(prediction: Tensor, truth: Tensor, weights: Tensor | None = None) -> Tensor:
    """(B, T, C): RMSE relative to the spatial standard deviation (The Well). Explodes on fields that have decayed."""
    y = truth.double()
    if weights is None:
        variance = y.flatten(3).var(dim=3, unbiased=True)
    else:
        points = truth[0, 0, 0].numel()
        center = _mean(y, weights).reshape(*y.shape[:3], *[1] * (y.ndim - 3))
        variance = _mean((y - center) ** 2, weights) * points / max(1, points - 1)
    return _guard((_mean_square_error(prediction, truth, weights) / (variance + WELL_EPSILON)).sqrt(), prediction)


def trajectory_rms(frames: Tensor, weights: Tensor | None = None) -> Tensor:
    """(B, C): root mean square of each channel over all frames (B, T, C, *S) of a trajectory, given ones included."""
    if weights is not None:
        return _mean(frames.double() ** 2, weights).mean(dim=1).sqrt()
    return (frames.double() ** 2).mean(dim=(1, *_space(frames))).sqrt()


def trmse(prediction: Tensor, truth: Tensor, scale: Tensor, weights: Tensor | None = None) -> Tensor:
    """(B, T, C): RMSE relative to `trajectory_rms` (B, C).

    Neither explodes on frames that have decayed nor flatters them: the scale is the same for all steps.
    """
    return _guard(_mean_square_error(prediction, truth, weights).sqrt() / scale.clamp_min(TINY)[:, None], prediction)


def boundary_rmse(prediction: Tensor, truth: Tensor) -> Tensor:
    """(B, T, C): RMSE over the points on the boundary (first and last point of each axis, corners once)."""
    mask = torch.zeros(truth.shape[3:], dtype=torch.bool, device=truth.device)
    for axis in range(mask.ndim):
        mask.select(axis, 0).fill_(True)
        mask.select(axis, mask.shape[axis] - 1).fill_(True)
    error = (prediction.double() - truth.double())[..., mask]  # (B, T, C, boundary points)
    return _guard((error**2).mean(dim=3).sqrt(), prediction)


vars(boundary_rmse).update(heading="bRMSE", detail=True)


def integral_error(prediction: Tensor, truth: Tensor, weights: Tensor | None = None) -> Tensor:
    """(B, T, C): mean over space of (prediction - truth); cRMSE is the root of its mean square over samples."""
    return _guard(_mean(prediction.double() - truth.double(), weights), prediction)


def max_error(prediction: Tensor, truth: Tensor) -> Tensor:
    """(B, T, C): largest absolute error over space; maxE is its maximum over samples, then the mean over T and C."""
    return _guard((prediction.double() - truth.double()).abs().amax(dim=_space(truth)), prediction)


def wave_number_shells(space: tuple[int, ...], device: torch.device | None = None) -> Tensor:
    """(*S): the integer part of |k| of each Fourier mode, k counted in waves per domain."""
    squared = torch.zeros(space, dtype=torch.float64, device=device)
    for axis, points in enumerate(space):
        k = torch.fft.fftfreq(points, d=1.0 / points, dtype=torch.float64, device=device)
        squared = squared + (k**2).reshape([-1 if a == axis else 1 for a in range(len(space))])
    # sqrt of a perfect square can land just below the integer
    return (squared.sqrt() + 1e-9).floor().long()


def shell_energy(field: Tensor) -> Tensor:
    """(B, T, C, shells): energy of each wave number shell; over all shells it sums to the mean square over space."""
    space = tuple(field.shape[3:])
    shells = wave_number_shells(space, field.device).flatten()
    num_points = shells.numel()
    modes = torch.fft.fftn(field.double(), dim=_space(field)).abs() ** 2 / float(num_points) ** 2
    energy = torch.zeros(*field.shape[:3], int(shells.max()) + 1, dtype=torch.float64, device=field.device)
    return energy.index_add_(3, shells, modes.flatten(3))


def band_rmse(prediction: Tensor, truth: Tensor) -> Tensor:
    """(B, T, C, 3): RMSE in the bands [0, 4), [4, 12), [12, inf); the squares of the three sum to RMSE squared."""
    energy = shell_energy(prediction.double() - truth.double())
    edges = [*BAND_EDGES, energy.shape[3]]
    bands = [energy[..., a : max(a, b)].sum(dim=3).sqrt() for a, b in itertools.pairwise(edges)]
    return torch.stack([_guard(band, prediction) for band in bands], dim=3)


def correlation(prediction: Tensor, truth: Tensor, weights: Tensor | None = None) -> Tensor:
    """(B, T): Pearson correlation over the points, mean over channels; 0 where it is undefined or not finite.

    Over channels together it would be that of their means: near 1 for a temperature of 290 K next to a height of 1 m,
    whatever is predicted. A channel that is constant in the truth has none, and is left out.
    """
    p, y = prediction.double().flatten(3), truth.double().flatten(3)  # (B, T, C, points)
    w = torch.ones_like(y[0, 0, 0]) if weights is None else weights.to(p).flatten(3 - truth.ndim)
    # Means with the weights, and their roots in each factor: sums of products are then weighted sums.
    size = (y * y * w).sum(dim=3)
    p, y = ((z - (z * w).mean(dim=3, keepdim=True)) * w.sqrt() for z in (p, y))
    variance = y.pow(2).sum(dim=3)
    values = (p * y).sum(dim=3) / (p.pow(2).sum(dim=3) * variance).sqrt().clamp_min(TINY)
    values = torch.where(torch.isfinite(values), values, torch.zeros_like(values))
    varies = (variance > CONSTANT**2 * size).double()
    return (values * varies).sum(dim=2) / varies.sum(dim=2).clamp_min(1)


def correlation_time(prediction: Tensor, truth: Tensor, weights: Tensor | None = None) -> Tensor:
    """(B,): number, from 1, of the first step whose correlation falls below 0.8; T + 1 if none does."""
    below = correlation(prediction, truth, weights) < CORRELATION_LIMIT
    num_steps = below.shape[1]
    steps = torch.arange(1, num_steps + 1, device=below.device).expand_as(below)
    return torch.where(below, steps, num_steps + 1).amin(dim=1).double()


def conservation_drift(prediction: Tensor, start: Tensor, weights: Tensor | None = None) -> Tensor:
    """(B, T, C): |integral now - integral at the start|, relative to the start's L1 norm. start: (B, C, *S)."""
    first = start.double()[:, None]
    drift = (_mean(prediction.double(), weights) - _mean(first, weights)).abs()
    return _guard(drift / _mean(first.abs(), weights).clamp_min(TINY), prediction)


def metric_columns(*, details: bool = False) -> dict[str, dict[str, Any]]:
    """Name -> heading and direction of each registered metric: a column wherever scores are shown.

    Both are optional attributes of the metric's function: `heading`, and `higher_is_better`. details: instead of these,
    the metrics with the attribute `detail`, which only the folded tables of a report show.
    """
    return {
        name: {
            "heading": str(getattr(metric, "heading", name)),
            "higher_is_better": bool(getattr(metric, "higher_is_better", False)),
        }
        for name, metric in _usable_metrics()
        if bool(getattr(metric, "detail", False)) == details
    }


def _usable_metrics() -> Iterator[tuple[str, Any]]:
    """Without those whose package cannot be imported: `ups --version --verbose` names these."""
    for name in METRICS.names():
        with contextlib.suppress(PluginError):
            yield name, METRICS.factory(name)


def registered(prediction: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """(B, T, C) of each registered metric, the worst value where the prediction is not finite; summaries get its mean.

    What scores are ranked by (RMSE relative to the trajectory, nRMSE, VRMSE) belongs to the protocol.
    """
    values = {}
    for name, metric in _usable_metrics():
        value = metric(prediction, truth)
        if tuple(value.shape) != tuple(truth.shape[:3]):
            raise PluginError(
                f"metric '{name}' of {METRICS.origin(name)} gave {tuple(value.shape)} for {tuple(truth.shape)}",
                hint="a metric returns one number for each sample, step and channel",
            )
        sign = -1.0 if getattr(metric, "higher_is_better", False) else 1.0
        values[name] = sign * _guard(sign * value, prediction)
    return values


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
    positions = torch.arange(count, dtype=torch.float64, device=members.device)
    shape = (1, -1, *[1] * (members.ndim - 2))
    apart = (ordered * (2 * positions - count + 1).reshape(shape)).sum(1)
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
    return steps.cpu().cumsum(0)[:-1]  # on a GPU the order of such a sum is not fixed
