"""Sums of scores in memory that does not grow with fields or steps of past trajectories, exact over any ranks.

A rank adds its own trajectories; `merge` joins the accumulators of all ranks. Per step and channel only sums are kept,
and of the energy spectra those of the first and the last step; per trajectory one short row (for medians, bootstrap
intervals and the worst five), some hundred bytes each. A trajectory that is added twice is an error, so a sample can
not be counted twice.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ups.errors import DataError
from ups.evaluation import metrics
from ups.spec.descriptors import DivergenceLimits

# Means over samples, steps and channels of these (B, T, C) metrics make up a trajectory's row.
ROW_METRICS = ("rmse", "nrmse", "vrmse", "trmse")
# A rollout has blown up from the step on in which every field is off by so many times its size in the trajectory: long
# before numbers end. Every field, because one that is zero throughout the truth has no size.
BLOW_UP = 10.0


@dataclass
class Accumulator:
    """Scores of one model on one task, for predictions of at most `num_steps` steps.

    weights (*S): how much each point of the grid counts, where it is not uniform; there are no spectra then.
    may_be_shorter: whether trajectories may have fewer steps. limits: above which a prediction has diverged, whatever
    the truth is; without them it diverges where it is not finite.
    """

    num_steps: int
    channels: tuple[str, ...]
    weights: Tensor | None = None
    may_be_shorter: bool = False
    limits: DivergenceLimits | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)  # metric -> (T, C) sums over samples
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)  # trajectory -> its own means
    energy: dict[str, Tensor] = field(default_factory=dict)  # of prediction and truth: (steps, C, shells) sums
    means: dict[str, Tensor] = field(default_factory=dict)  # metric -> (C,) sums over samples of their means over steps

    def __post_init__(self) -> None:
        self.largest = torch.zeros(self.num_steps, len(self.channels), dtype=torch.float64)
        self.counts = torch.zeros(self.num_steps, dtype=torch.int64)  # samples that have a step

    @property
    def spectrum_steps(self) -> tuple[int, ...]:
        """The predicted steps, from 1, whose energy spectra are kept: the first and the last; none if not uniform."""
        if self.weights is not None:
            return ()
        return (1, self.num_steps) if self.num_steps > 1 else (1,)

    def add(
        self,
        trajectories: Sequence[int],
        prediction: Tensor,
        truth: Tensor,
        before: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> None:
        """Adds samples. prediction, truth (B, T, C, *S); before (B, T', C, *S): the frames before the truth, if any.

        valid (B, 1, *S): 0 at points that do not count. Spectra have 0 there."""
        if tuple(prediction.shape) != tuple(truth.shape):
            raise DataError(f"prediction {tuple(prediction.shape)} and truth {tuple(truth.shape)} differ in shape")
        steps = truth.shape[1]
        fits = steps == self.num_steps or (self.may_be_shorter and 1 <= steps < self.num_steps)
        if not fits or (truth.shape[0], truth.shape[2]) != (len(trajectories), len(self.channels)):
            raise DataError(
                f"scores expect (samples, {self.num_steps} steps, {len(self.channels)} channels), "
                f"not {tuple(truth.shape[:3])}"
            )
        weights = self.weights
        if valid is not None:
            prediction = prediction.where(valid[:, None] > 0, torch.zeros_like(prediction))
            valid = valid[:, None]  # (B, 1, 1, *S)
        weights = metrics.without_holes(weights, valid)
        known = truth if before is None else torch.cat([before, truth], dim=1)
        values = {
            "rmse": metrics.rmse(prediction, truth, weights),
            "nrmse": metrics.nrmse(prediction, truth, weights),
            "vrmse": metrics.vrmse(prediction, truth, weights),
            "trmse": metrics.trmse(prediction, truth, metrics.trajectory_rms(known, weights), weights),
            "integral_square": metrics.integral_error(prediction, truth, weights) ** 2,
        }
        values |= metrics.registered(prediction, truth)
        if self.weights is None:
            bands = metrics.band_rmse(prediction, truth)
            for number, name in enumerate(metrics.BAND_NAMES):
                values[f"frmse_{name}"] = bands[..., number]
        if before is not None:
            values["drift"] = metrics.conservation_drift(prediction, before[:, -1], weights)
        self._check_new(trajectories)
        _add(self.sums, {name: self._over_all_steps(value.sum(dim=0)) for name, value in values.items()})
        _add(self.means, {name: value.mean(dim=1).sum(dim=0) for name, value in values.items()})
        self.counts[:steps] += len(trajectories)
        peak = self._over_all_steps(metrics.max_error(prediction, truth).amax(dim=0))
        self.largest = torch.maximum(self.largest, peak.cpu())
        if self.weights is None:
            self._add_energy(prediction, truth)
        self._add_rows(trajectories, values, prediction, truth, weights)

    def _over_all_steps(self, values: Tensor) -> Tensor:
        """(steps, C) of trajectories that may be shorter -> (T, C), nothing after their end."""
        missing = self.num_steps - values.shape[0]
        return torch.cat([values, values.new_zeros(missing, *values.shape[1:])]) if missing else values

    def _add_energy(self, prediction: Tensor, truth: Tensor) -> None:
        chosen = [step - 1 for step in self.spectrum_steps if step <= truth.shape[1]]
        for name, frames in (("prediction", prediction), ("truth", truth)):
            energy = metrics.shell_energy(frames[:, chosen])
            # a blow-up counts: its spectrum, and so the mean, is infinite
            total = torch.where(torch.isfinite(energy), energy, torch.inf).sum(dim=0)
            if len(chosen) < len(self.spectrum_steps):
                total = torch.cat([total, torch.zeros_like(total)])
            _add(self.energy, {name: total})

    def _check_new(self, trajectories: Iterable[int]) -> None:
        seen: set[int] = set(self.rows)
        for trajectory in trajectories:
            if trajectory in seen:
                raise DataError(f"trajectory {trajectory} was scored twice")
            seen.add(trajectory)

    def _add_rows(
        self,
        trajectories: Sequence[int],
        values: dict[str, Tensor],
        prediction: Tensor,
        truth: Tensor,
        weights: Tensor | None,
    ) -> None:
        lasting = metrics.correlation_time(prediction, truth, weights).cpu()
        finite = torch.isfinite(prediction).flatten(1).all(dim=1).cpu()
        diverged = ~finite
        if self.limits is not None:
            diverged = self.limits.exceeded(prediction.flatten(0, 1)).reshape(prediction.shape[:2]).any(dim=1).cpu()
        names = (*ROW_METRICS, *metrics.metric_columns())
        values = {name: values[name].cpu() for name in names}  # at once: a GPU is waited for by each number
        for i, trajectory in enumerate(trajectories):
            row: dict[str, Any] = {name: values[name][i].mean(dim=0).tolist() for name in names}  # per channel
            row["correlation_time"] = float(lasting[i])
            lost = (values["trmse"][i] > BLOW_UP).all(dim=-1).any()
            row["blew_up"] = not bool(finite[i]) or bool(lost)
            row["diverged"] = bool(diverged[i])
            self.rows[int(trajectory)] = row

    def merge(self, others: Iterable[Accumulator]) -> Accumulator:
        """This accumulator joined with those of other ranks; a trajectory that two ranks scored is an error."""
        merged = replace(
            self, sums=dict(self.sums), rows=dict(self.rows), energy=dict(self.energy), means=dict(self.means)
        )
        merged.largest, merged.counts = self.largest, self.counts.clone()
        for other in others:
            if (other.num_steps, other.channels) != (self.num_steps, self.channels):
                raise DataError("accumulators of different tasks or lengths can not be merged")
            merged._check_new(other.rows)
            _add(merged.sums, other.sums)
            _add(merged.energy, other.energy)
            _add(merged.means, other.means)
            merged.largest = torch.maximum(merged.largest, other.largest)
            merged.counts = merged.counts + other.counts
            merged.rows.update(other.rows)
        return merged

    @property
    def num_samples(self) -> int:
        return len(self.rows)

    def curve(self, name: str) -> Tensor:
        """(T, C): mean of a metric at each step over the samples that have it."""
        if not self.rows:
            raise DataError("nothing was scored")
        return self.sums[name] / self._counts(self.sums[name])[:, None]

    def spectra(self, of: str = "prediction") -> Tensor:
        """(steps, C, shells): mean over samples of the energy in each wave number shell at `spectrum_steps`.

        of: `prediction` or `truth`.
        """
        if not self.rows:
            raise DataError("nothing was scored")
        if not self.spectrum_steps:
            return torch.zeros(0, len(self.channels), 0)
        counts = self._counts(self.energy[of])
        return self.energy[of] / counts[[step - 1 for step in self.spectrum_steps]][:, None, None]

    def _counts(self, like: Tensor) -> Tensor:
        """(T,) samples that have a step, at least 1: ranks may have none of the longest."""
        return self.counts.clamp_min(1).to(like.device)

    @property
    def equally_long(self) -> bool:
        """Whether all samples have all steps."""
        return bool((self.counts == self.num_samples).all())

    def summary(self) -> dict[str, float]:
        """Scores over all samples, steps and channels: means of every metric, medians of the per-trajectory means.

        Each sample counts alike, whatever its length.
        """
        result = {name: float(self.curve(name).mean()) for name in self.sums if name != "integral_square"}
        if not self.equally_long:
            result |= {name: float((self.means[name] / self.num_samples).mean()) for name in result}
        there = self.counts > 0  # steps that no scored sample has say nothing
        result["crmse"] = float(self.curve("integral_square")[there].sqrt().mean())
        result["max_error"] = float(self.largest[there].mean())
        for name in ROW_METRICS:
            result[f"{name}_median"] = statistics.median(_mean(r[name]) for r in self.rows.values())
        result["correlation_time"] = _mean([r["correlation_time"] for r in self.rows.values()])
        result["num_blown_up"] = float(sum(bool(r["blew_up"]) for r in self.rows.values()))
        result["num_diverged"] = float(sum(bool(r["diverged"]) for r in self.rows.values()))
        result["num_samples"] = float(self.num_samples)
        return result

    def worst(self, count: int = 5) -> list[int]:
        """Trajectories with the largest mean error relative to themselves, worst first; a blow-up is worse than any.

        Not by nRMSE: then a trajectory that has decayed to nothing is worse than one that is visibly wrong.
        """
        ranked = sorted(
            self.rows, key=lambda t: (self.rows[t]["blew_up"], _mean(self.rows[t]["trmse"]), t), reverse=True
        )
        return ranked[:count]


def _add(sums: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Adds to each sum; one that is not there yet begins."""
    for name, value in more.items():
        sums[name] = sums[name] + value if name in sums else value


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
