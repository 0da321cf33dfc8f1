"""An error model: how large the error of a rollout may be at each step, and how unusual the rollout is.

    numbers of a step: parameters, shape of the given fields and of the change, pooled features of the network
      -> principal components (K) -> a linear law for the logarithm of the error, and a distance

A rollout costs a few reductions more, and all of it is plain tensor operations that export to ONNX. The law is fitted
after the training (`ups.run.calibrate`); it only has to rank errors, because calibration measures how far it is off.

B samples, C channels, S space, F numbers, K components, L leads, M fields.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from ups.models.network import Network
from ups.models.normalization import Constants
from ups.models.stepper import Stepper
from ups.spec.batch import Batch, Memo
from ups.spec.task import TaskSpec

MAX_COMPONENTS = 32
# Channels of the network that are pooled: as good as a projection of all, and the law stays small.
MAX_FEATURES = 32
# Sizes below this part of a usual deviation are noise; numbers beyond the limit are equally far away.
_SMALLEST, _LARGEST = 1e-4, 1e3
# The law moves a log error by at most this from the usual one: beyond its data a line goes anywhere.
_MOST_CHANGE = 4.0
PENALTIES = (1e-4, 1e-3, 1e-2, 0.1, 1.0)
_PERIODS = 13
# Of an axis; the table of a long axis would cost more than the network.
_MOST_WAVES = 512


def shape_numbers(x: Tensor, task: TaskSpec, constants: Constants) -> Tensor:
    """(B, C, *S) -> (B, N): mean, size and extremes of each channel; along each axis its slopes and waves by octave."""
    flat = x.flatten(2)
    mean = flat.mean(2)
    numbers, sizes = [mean, flat.amax(2), flat.amin(2)], [_size(flat - mean[..., None])[..., None]]
    for number, axis in enumerate(task.axes, start=2):
        points = x.shape[number]
        slopes = (x.narrow(number, 1, points - 1) - x.narrow(number, 0, points - 1)).flatten(2)
        sizes.append(torch.stack([slopes.amax(2), -slopes.amin(2)], dim=2).clamp_min(0))
        key = (points, axis.periodic)
        waves = constants.get(partial(_waves, *key), ("waves", *key), x.device, x.dtype)
        octaves = constants.get(partial(_octaves, *key), ("octaves", *key), x.device, x.dtype)
        lines = x.movedim(number, -1).reshape(*x.shape[:2], -1, points)
        power = (lines @ waves).square().mean(2)
        sizes.append((power @ octaves).sqrt())
        if waves.shape[1] < points - 1:  # what is shorter than the waves of the table
            sizes.append((lines.var(-1, correction=0).mean(2) - power.sum(2)).clamp_min(0).sqrt()[..., None])
    return torch.cat([torch.stack(numbers, 2), (torch.cat(sizes, 2) + _SMALLEST).log()], 2).flatten(1)


def _waves(points: int, periodic: bool) -> Tensor:
    """(points, M): the waves of an axis of unit size, or half waves. A product instead of an FFT exports everywhere."""
    places, modes = torch.arange(points) + 0.5, torch.arange(1, min(points, _MOST_WAVES + 1))
    angle = math.pi / points * places[:, None] * (2 * ((modes + 1) // 2) if periodic else modes)
    shift = math.pi / 2 * (modes % 2 == 0) if periodic else 0.0
    return (angle - shift).cos() * math.sqrt(2) / points


def _octaves(points: int, periodic: bool) -> Tensor:
    """(M, octaves): which of these waves belong to each octave."""
    modes = torch.arange(1, min(points, _MOST_WAVES + 1))
    octave = ((modes + 1) // 2 if periodic else modes).log2().ceil().long()
    return nn.functional.one_hot(octave).float()


def _size(x: Tensor) -> Tensor:
    """(B, C, N) -> (B, C)."""
    return x.square().mean(2).sqrt()


class Watched:
    """A predictor (`ups.models.stepper.Predictor`) that keeps the numbers (B, F) of its last step."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._features: Tensor | None = None
        self._constants = Constants()
        self.numbers = torch.empty(0)

    def __call__(self, batch: Batch) -> Tensor:
        network = cast(Network, self._stepper.networks[self._stepper.network_of(batch.task)])
        module = network.feature_module()
        hook = None if module is None else module.register_forward_hook(self._keep)
        try:
            frame: Tensor = self._stepper(batch)
        finally:
            if hook is not None:
                hook.remove()
        self.numbers = self._numbers(batch, frame)
        return frame

    def _keep(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        # Near 0 a channel is silent: that is nothing unusual, however small its numbers are.
        self._features = _size(output.flatten(1, -2)[..., :MAX_FEATURES].transpose(1, 2)).log1p()

    def _numbers(self, batch: Batch, frame: Tensor) -> Tensor:
        task, normal, memo = batch.task, self._stepper.normalization, batch.memo or Memo()
        shape = partial(shape_numbers, task=task, constants=self._constants)

        def lasting() -> list[Tensor]:
            fields = [shape(normal.normalize("static", task, batch.static, 1))] if task.num_channels("static") else []
            return [normal.parameters_of(task, batch.parameters), *fields] if task.parameters else fields

        parts = list(memo.once("error numbers", lasting))
        if task.steady:
            parts.append(shape(normal.normalize("target", task, frame, 1)))
        else:
            last = batch.state[:, -1]
            change = (frame - last) / normal.change_scale(task, frame)
            parts.append(shape(torch.cat([normal.normalize("state", task, last, 1), change], 1)))
        parts += [] if self._features is None else [self._features]
        numbers = torch.cat([part.to(frame.dtype) for part in parts], dim=1)
        return torch.nan_to_num(numbers, _LARGEST).clamp(-_LARGEST, _LARGEST)


@dataclass(frozen=True)
class ErrorModel:
    """The law of one task.

    center, scale (F,); basis (F, K): principal components of unit deviation. typical (L, M): log error at each lead;
    slopes (2 K, M): its change with the components, and how that changes with the lead; late (L,): the logarithm of the
    lead, from 0 to 1. spread (L, M): how far errors go beyond the law. limits (4, P, F): where the tail of each number
    begins in each period of a rollout, and how long it is; of the largest values, then of the smallest.
    """

    center: Tensor
    scale: Tensor
    basis: Tensor
    typical: Tensor
    slopes: Tensor
    late: Tensor
    spread: Tensor
    limits: Tensor

    def components(self, numbers: Tensor) -> Tensor:
        """(..., F) -> (..., K)."""
        return ((numbers - self.center) / self.scale) @ self.basis

    def distance(self, numbers: Tensor, period: int | Tensor) -> Tensor:
        """(B, F) -> (B,): how far the most unusual number is out in the tail that it has in this period.

        (L, B, F) and a period for each step -> (L, B)."""
        high, above, low, below = self.limits[:, period] if isinstance(period, int) else self.limits[:, period, None]
        return torch.maximum((numbers - high) / above, (low - numbers) / below).amax(-1)

    def log_error(self, mean_components: Tensor, number: int | slice | list[int] | Tensor) -> Tensor:
        """Components (B, [L,] K), averaged over the steps so far -> log error (B, [L,] M) at this lead."""
        change = law_inputs(mean_components, self.late[number]) @ self.slopes
        return self.typical[number] + change.clamp(-_MOST_CHANGE, _MOST_CHANGE)


def period_ends(steps: int) -> list[int]:
    """The last step of each period of a rollout: early steps each have one, later ones share longer ones."""
    return sorted({round(steps ** (n / (_PERIODS - 1))) for n in range(_PERIODS)})


def law_inputs(components: Tensor, late: Tensor) -> Tensor:
    """(..., K) and the lead -> (..., 2 K)."""
    return torch.cat([components, components * late[..., None]], dim=-1)


def field_rms(values: Tensor, task: TaskSpec, weights: Tensor | None = None) -> Tensor:
    """(B, C, *S) -> (B, M): spatial RMS of each predicted field, of a vector that of its length."""
    squares = values.square() if weights is None else values.square() * weights
    means = squares.flatten(2).mean(2)
    sizes = [field.num_channels(task.num_spatial_dims) for field in task.fields_of(task.predicted)]
    return torch.stack([part.sum(1) for part in torch.split(means, sizes, dim=1)], dim=1).sqrt()


@dataclass(frozen=True)
class Rollouts:
    """What is known of rollouts next to their truth. means (N, L, F): numbers, averaged over the steps up to each lead;
    errors (N, L, M); low and high (N, P, F): the extremes of the numbers in each period; apart (N, L, Q): predicted
    less true quantities; distance (N,): the largest. NaN, or infinite, after the end of a trajectory."""

    means: Tensor
    errors: Tensor
    low: Tensor
    high: Tensor
    apart: Tensor
    distance: Tensor

    @classmethod
    def joined(cls, batches: Iterable[Rollouts]) -> Rollouts:
        """All batches."""
        return cls(*(torch.cat(parts) for parts in zip(*(vars(one).values() for one in batches), strict=True)))


def fit_error_model(leads: Sequence[int], train: Rollouts, held: Rollouts) -> ErrorModel:
    """The law of the train rollouts; `held` ones choose its penalty, and the usual error at each lead.

    One solve of a small system for each penalty. What is not finite is left out.
    """
    rows = train.means.double().flatten(0, 1)
    rows = rows[rows.isfinite().all(1)]
    center, scale = rows.mean(0), rows.std(0).clamp_min(1e-3)
    given = (rows - center) / scale
    variances, vectors = torch.linalg.eigh(given.T @ given / len(given))
    count = min(MAX_COMPONENTS, given.shape[1], max(1, len(train.means) // 4))
    basis = vectors.flip(1)[:, :count] / variances.flip(0)[:count].clamp_min(1e-6).sqrt()
    late = (torch.tensor(leads, dtype=torch.float64).log() / max(math.log(leads[-1]), 1e-9)).to(basis.device)

    def prepared(rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        inputs = law_inputs(((rollouts.means.double() - center) / scale) @ basis, late)
        errors = rollouts.errors.double()
        return inputs, torch.where(errors.isfinite() & (errors > 0), errors, torch.nan).log()

    (x, y), (held_x, held_y) = prepared(train), prepared(held)
    away_x, away_y = x - x.nanmean(0), y - y.nanmean(0)
    known = away_y.isfinite().all(2) & away_x.isfinite().all(2)
    rows_x, rows_y = away_x[known], away_y[known]
    square, product = rows_x.T @ rows_x / max(1, len(rows_x)), rows_x.T @ rows_y / max(1, len(rows_x))
    identity = torch.eye(len(square)).to(square)
    candidates = [torch.linalg.solve(square + penalty * identity, product) for penalty in PENALTIES]
    candidates.append(torch.zeros_like(product))  # no law: an error that is the same for all

    def left_over(slopes: Tensor) -> Tensor:
        return held_y - (held_x @ slopes).clamp(-_MOST_CHANGE, _MOST_CHANGE)

    def loss(slopes: Tensor) -> float:
        rest = left_over(slopes)
        return float((rest - rest.nanmean(0)).square().nanmean())

    slopes = min(candidates, key=loss)
    rest = left_over(slopes)
    typical = rest.nanmedian(0).values
    spread = (rest - typical).nanquantile(0.9, dim=0).exp()
    (start, above), (under, below) = _tail(train.high, held.high), _tail(-train.low, -held.low)
    limits = torch.stack([start, above, -under, below])
    tensors = (center, scale, basis, typical, slopes, late, spread, limits)
    return ErrorModel(*(torch.nan_to_num(tensor.float()).contiguous() for tensor in tensors))


def _tail(largest: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """(N, P, F) -> where the tail of the largest begins, and its mean length with its standard error, (P, F) each.

    A tail that held rollouts exceed is longer: one number with a long tail would hide all others. A number that never
    changes has a short tail, and not none: rounding is no reason to doubt.
    """
    ranked, size = largest.sort(0, descending=True).values, math.isqrt(len(largest))
    start = ranked[min(size, len(ranked) - 1)]
    excess = (ranked[:size].mean(0) - start) * (1 + 1 / math.sqrt(size))
    usual = ranked.isfinite().all(0)  # where some have ended, too few are left to know
    length = torch.where(usual, excess, 1.0).maximum(1e-2 + 0.02 * torch.where(usual, largest, 0.0).std(0))
    longer = ((held - start) / length).nan_to_num(0.0, 1e6, 0.0).amax(0).clamp_min(1)
    return torch.where(usual, start, torch.inf), length * longer
