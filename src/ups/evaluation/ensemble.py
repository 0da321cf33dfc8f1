"""Drives an ensemble over held-out trajectories and scores its members together.

Errors are relative to the RMS of the trajectory, as in `ups.evaluation.metrics.trmse`. Memory holds one step of all
members of a batch. Rank r of W takes trajectories r, r + W, ..., as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ups.evaluation import metrics
from ups.evaluation.rollout import RolloutPlan, batches_of, own_part, read_inputs, weights_of
from ups.formats.base import Reader
from ups.models.ensemble import Members, by_member
from ups.models.stepper import rollout
from ups.spec.batch import Batch, RankInfo

# Of which curves are kept. absolute_error: of the central member, which has no spread; gaussian: with noise of the
# members' spread around it; mean_rmse: of the mean of the members.
SCORES = ("crps", "absolute_error", "gaussian", "mean_rmse")
_SQUARES = ("spread_square", "error_square")


@dataclass
class EnsembleScores:
    """Sums of the scores of one ensemble on one task, over samples.

    sums: name -> (T, C). means: score -> trajectory -> its mean over steps and channels. ranks: (M + 1,) points.
    energy: of members, central member and truth at the last step, (C, shells); none on a grid that is not uniform.
    """

    members: int
    seed: int
    num_steps: int
    channels: tuple[str, ...]
    weights: Tensor | None = None
    means: dict[str, dict[int, float]] = field(default_factory=lambda: {name: {} for name in SCORES})
    energy: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.num_steps, len(self.channels)
        self.sums = {name: torch.zeros(shape, dtype=torch.float64) for name in (*SCORES, *_SQUARES)}
        self.counts = torch.zeros(self.num_steps)  # samples that have a step
        self.ranks = torch.zeros(self.members + 1, dtype=torch.float64)

    def add(
        self,
        step: int,
        members: Tensor,
        center: Tensor,
        truth: Tensor,
        scale: Tensor,
        valid: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Adds step `step` (from 0) of some samples; returns each of their scores (B,).

        members (B, M, C, *S), center and truth (B, C, *S) in physical units; scale (B, C) of the trajectory; valid
        (B, 1, *S): 0 at points that do not count.
        """
        weights = metrics.without_holes(self.weights, valid)
        size = scale.clamp_min(1e-12).reshape(*scale.shape, *[1] * (truth.ndim - 2))
        ensemble, single, wanted = members.double() / size[:, None], center.double() / size, truth.double() / size
        spread = metrics.spread_square(ensemble, weights)
        error = metrics.mean_square_of_mean(ensemble, wanted, weights)
        scores = {
            "crps": metrics.fair_crps(ensemble, wanted, weights),
            "absolute_error": metrics.mean_over_space((single - wanted).abs(), weights),
            "gaussian": metrics.gaussian_crps(single, wanted, spread.sqrt(), weights),
            "mean_rmse": error.sqrt(),
            "spread_square": spread,
            "error_square": error,
        }
        for name, values in scores.items():
            self.sums[name][step] += values.sum(0).cpu()
        self.counts[step] += len(truth)
        if valid is not None:  # (points, M, C) and (points, C)
            there = valid[:, 0] > 0
            ensemble, wanted = ensemble.movedim((1, 2), (-2, -1))[there], wanted.movedim(1, -1)[there]
        self.ranks += metrics.rank_counts(ensemble, wanted).cpu()
        return {name: scores[name].mean(1).cpu() for name in SCORES}

    def add_energy(self, members: Tensor, center: Tensor, truth: Tensor) -> None:
        """Adds the spectra of the last step of some samples."""
        count = members.shape[1]
        parts = {"members": members.flatten(0, 1), "central": center, "truth": truth}
        for name, frames in parts.items():
            total = metrics.shell_energy(frames[:, None]).sum((0, 1)).cpu() / (count if name == "members" else 1)
            self.energy[name] = self.energy[name] + total if name in self.energy else total

    def result(self) -> dict[str, Any]:
        """As plain data: summary (all trajectories count alike, however long), curves over steps, rank histogram,
        spectra."""
        counts = self.counts.clamp_min(1)[:, None]
        means = {name: total / counts for name, total in self.sums.items()}
        rows = self.means["crps"]
        summary = {name: sum(values.values()) / max(len(values), 1) for name, values in self.means.items()}
        half = len(self.counts) // 2
        for name, part in (("spread_skill", slice(None)), ("spread_skill_second_half", slice(half, None))):
            spread, error = (means[key][part].mean(0) for key in _SQUARES)
            summary[name] = float(metrics.spread_skill(spread, error, self.members).mean())
        curves = {name: means[name].mean(1).tolist() for name in SCORES}
        curves["spread"] = means["spread_square"].sqrt().mean(1).tolist()
        curves["error"] = means["error_square"].sqrt().mean(1).tolist()
        return {
            "members": self.members,
            "seed": self.seed,
            "num_trajectories": len(rows),
            "summary": summary,
            "curves": curves,
            "ranks": (self.ranks / self.ranks.sum().clamp_min(1e-300)).tolist(),
            "spectra": {name: (total / self.counts[-1].clamp_min(1)).tolist() for name, total in self.energy.items()},
            "rows": {str(t): value for t, value in sorted(rows.items())},
        }


@torch.no_grad()
def score_ensemble(
    ensemble: Members,
    reader: Reader,
    rank_info: RankInfo,
    plan: RolloutPlan,
    *,
    split: str = "test",
    batch_size: int = 8,
    max_trajectories: int | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    kind: Literal["rollout", "one_step"] = "rollout",
    progress: Callable[[int], None] | None = None,
) -> EnsembleScores:
    """This rank's share of the scores of an ensemble's members on one task; kind: as in `score_task`."""
    task, members, seed = reader.task, ensemble.members, ensemble.seed
    counts = weights_of(reader)
    scores = EnsembleScores(members, seed, plan.num_steps, task.channel_names(task.predicted), counts)
    for part, span in batches_of(reader, split, own_part(reader, split, rank_info, max_trajectories), plan, batch_size):
        batch, truth = read_inputs(reader, split, part, span, device or torch.device("cpu"), dtype)
        valid = batch.valid
        counted = metrics.without_holes(counts, None if valid is None else valid[:, None])
        scale = metrics.trajectory_rms(truth if task.steady else torch.cat([batch.state, truth], dim=1), counted)
        frames = _rollouts(ensemble, batch, span) if kind == "rollout" else _one_steps(ensemble, batch, truth)
        totals = {name: torch.zeros(len(part), dtype=torch.float64) for name in SCORES}
        for step, (together, center) in enumerate(frames):
            predictions = by_member(together, members)
            for name, values in scores.add(step, predictions, center, truth[:, step], scale, valid).items():
                totals[name] += values
            if step + 1 == plan.num_steps and counts is None:
                scores.add_energy(predictions, center, truth[:, step])
        for name, total in totals.items():
            means = (total / truth.shape[1]).tolist()
            scores.means[name].update({int(t): value for t, value in zip(part, means, strict=True)})
        if progress is not None:
            progress(len(part))
    return scores


def _rollouts(ensemble: Members, batch: Batch, plan: RolloutPlan) -> Iterator[tuple[Tensor, Tensor]]:
    """For each step the frames (B * M, C, *S) of all members, and those of the central one (B, C, *S)."""
    all_members = rollout(ensemble, batch.repeated(ensemble.members), plan.num_steps)
    return zip(all_members, rollout(ensemble.stepper, batch, plan.num_steps), strict=True)


def _one_steps(ensemble: Members, batch: Batch, truth: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """As `_rollouts`, each frame from the true ones before it."""
    context = batch.state.shape[1]
    frames = truth if batch.task.steady else torch.cat([batch.state, truth], dim=1)
    for step in range(truth.shape[1]):
        inputs = batch
        if not batch.task.steady:
            inputs = replace(batch, state=frames[:, step : step + context], stage_step=step)
        yield ensemble(inputs.repeated(ensemble.members)), ensemble.stepper(inputs)
