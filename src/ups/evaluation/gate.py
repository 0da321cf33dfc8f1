"""Finds the threshold of a gated rollout on the valid split, and scores gated rollouts next to those without.

Candidates are quantiles of each signal over the steps of the operator's own rollouts. The one with the smallest error
of whole gated rollouts is kept. Whether it is worth anything is judged on other trajectories than those it was chosen
on, where the best of many is no longer better by chance: `earned` says it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ups.evaluation.metrics import trajectory_rms, trmse
from ups.evaluation.rollout import RolloutPlan, batches_of, read_inputs
from ups.formats.base import Reader
from ups.models.flow import Step, trained_flow
from ups.models.gate import REASONS, Gated, available, signals
from ups.models.rollout import rollout
from ups.models.stepper import Stepper
from ups.spec.batch import Batch
from ups.spec.grid import point_weights
from ups.spec.keyed import key_of

# Parts of the steps that stay below a candidate.
_QUANTILES = (0.5, 0.8, 0.95)
# Half of them to choose among few candidates, and half to judge the choice.
NUM_TRAJECTORIES = 32
# Of interventions at random places, over which their error is averaged.
_DRAWS = 5


@torch.no_grad()
def find_gate(
    stepper: Stepper, reader: Reader, context_frames: int, *, split: str = "valid", max_trajectories: int | None = None
) -> dict[str, Any] | None:
    """signal, threshold, and what was measured on trajectories of the split that had no part in the choice: rate of
    interventions, and errors of whole rollouts with the gate, without the corrector and with it in every step. None
    without a corrector, or where the split has too little to choose or to judge by."""
    if not trained_flow(stepper, reader.task) or reader.splits.get(split, 0) < 2:
        return None
    plan = RolloutPlan.whole(reader, context_frames, split=split)
    count = min(reader.splits[split], max_trajectories or NUM_TRAJECTORIES)
    choose, judge = (_Parts(reader, split, part, plan) for part in (range(0, count, 2), range(1, count, 2)))
    tried: list[dict[str, Any]] = [
        {"signal": name, "threshold": float(values.quantile(quantile))}
        for name, values in _signals(stepper, choose).items()
        for quantile in _QUANTILES
    ]
    errors = [_gated(stepper, choose, {one["signal"]: one["threshold"]}).error for one in tried]
    if not tried or not any(True for _ in judge):
        return None
    best = tried[errors.index(min(errors))]
    found = _gated(stepper, judge, {best["signal"]: best["threshold"]})
    never, always = (_gated(stepper, judge, limits).error for limits in ({}, {"spread": -1.0}))
    return best | {
        "rate": found.rate,
        "error": found.error,
        "error_never": never,
        "error_always": always,
        "split": split,
        "num_trajectories": count,
        "earned": found.error < never,
    }


@torch.no_grad()
def score_gate(
    stepper: Stepper,
    reader: Reader,
    plan: RolloutPlan,
    gate: Mapping[str, Any],
    *,
    split: str,
    max_trajectories: int | None,
) -> dict[str, Any]:
    """Errors of whole rollouts of a split with the gate, without it, and with as many interventions at random places
    (mean and ends of some draws of them); rate of interventions, and each of them."""
    count = min(reader.splits[split], max_trajectories or reader.splits[split])
    parts = _Parts(reader, split, range(count), plan)
    thresholds = {str(gate["signal"]): float(gate["threshold"])}
    found = _gated(stepper, parts, thresholds)
    by_chance = [_gated(stepper, parts, {}, by_chance=(draw, found.hits)).error for draw in range(_DRAWS)]
    never = _gated(stepper, parts, {}).error
    return {
        "signal": gate["signal"],
        "threshold": gate["threshold"],
        "earned": gate["earned"],
        "rate": found.rate,
        "error": found.error,
        "error_never": never,
        "error_random": statistics.fmean(by_chance),
        "error_random_range": [min(by_chance), max(by_chance)],
        "interventions": found.interventions,
    }


_Part = tuple[list[int], RolloutPlan, Batch, Tensor]


class _Parts:
    """Batches of some trajectories, read anew in each pass: memory holds one. weights: of the points of the grid."""

    def __init__(self, reader: Reader, split: str, trajectories: range, plan: RolloutPlan) -> None:
        self._reader, self._split, self._trajectories, self._plan = reader, split, trajectories, plan
        found = point_weights(reader.task.axes, reader.coordinates)
        self.weights = None if found is None else torch.from_numpy(found)
        self.task = reader.task

    def __iter__(self) -> Iterator[_Part]:
        device = torch.device("cpu")
        for part, plan in batches_of(self._reader, self._split, self._trajectories, self._plan, batch_size=16):
            yield list(part), plan, *read_inputs(self._reader, self._split, part, plan, device, torch.float32)

    def errors(self, frames: list[Tensor], part: _Part) -> Tensor:
        """(B,): error of whole rollouts relative to the RMS of the trajectory; what blew up counts as infinite."""
        _, _, batch, truth = part
        whole = truth if batch.task.steady else torch.cat([batch.state, truth], dim=1)
        scale = trajectory_rms(whole, self.weights)
        return trmse(torch.stack(frames, dim=1), truth, scale, self.weights).flatten(1).mean(1)


def _signals(stepper: Stepper, parts: _Parts) -> dict[str, Tensor]:
    """Signal -> its values over all steps of the operator's rollouts, without those that say nothing."""
    task, name = parts.task, trained_flow(stepper, parts.task)
    asked = dict.fromkeys(available(stepper, task))
    values: dict[str, list[Tensor]] = {one: [] for one in asked}
    for _, plan, batch, _ in parts:
        start = None if task.steady else batch.state[:, -1]

        def watched(given: Batch, start: Tensor | None = start) -> Tensor:
            predicted = stepper.predict(given)
            frame = stepper.fields(given, predicted)
            for one, found in signals(stepper, name, Step(given, predicted), frame, start, asked).items():
                values[one].append(found.double())
            return frame

        for _ in rollout(watched, batch, plan.num_steps):
            pass
    joined = {one: torch.cat(found) for one, found in values.items() if found}
    finite = {one: found[found.isfinite()] for one, found in joined.items()}
    return {one: found for one, found in finite.items() if len(found) and found.max() > found.min()}


@dataclass(frozen=True)
class _Rolled:
    """Gated rollouts: their mean error, and where the corrector acted. hits: how often in each batch."""

    error: float
    rate: float
    hits: list[int]
    interventions: list[dict[str, Any]]


def _gated(
    stepper: Stepper,
    parts: _Parts,
    thresholds: Mapping[str, float],
    by_chance: tuple[int, list[int]] | None = None,
) -> _Rolled:
    """Whole rollouts of all parts. by_chance: act at random instead, in this draw, so often in each batch."""
    errors, hits, steps = [], list[int](), 0
    acted: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        trajectories, plan, batch, _ = part
        chosen = None
        if by_chance is not None:
            chosen = _random_places(by_chance[0], number, by_chance[1][number], (plan.num_steps, batch.num_samples))
        predictor = Gated(stepper, thresholds, chosen=chosen)
        errors.append(parts.errors(list(rollout(predictor, batch, plan.num_steps)), part))
        hits.append(len(predictor.interventions))
        steps += predictor.num_steps * batch.num_samples
        for one in predictor.interventions:
            why = [name for bit, name in enumerate(REASONS) if one.reasons & (1 << bit)]
            acted.append({"trajectory": trajectories[one.row], "step": one.step, "why": why})
    return _Rolled(float(torch.cat(errors).mean()), sum(hits) / max(steps, 1), hits, acted)


def _random_places(draw: int, number: int, hits: int, shape: tuple[int, int]) -> Tensor:
    """(steps, B) with so many of them true, for a batch."""
    generator = torch.Generator().manual_seed(key_of(0, "gate", draw, number) >> 1)
    places = torch.zeros(shape[0] * shape[1], dtype=torch.bool)
    places[torch.randperm(len(places), generator=generator)[:hits]] = True
    return places.reshape(shape)
