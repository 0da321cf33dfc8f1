"""Finds the threshold of a gated rollout on the valid split, and scores gated rollouts next to those without.

Candidates are quantiles of each signal over the steps of the operator's own rollouts. The one with the smallest error
of whole gated rollouts is kept, also where that is larger than without a corrector: `earned` says which it is.
"""

from __future__ import annotations

from collections.abc import Mapping
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
# Enough to choose among few candidates.
NUM_TRAJECTORIES = 16


@torch.no_grad()
def find_gate(
    stepper: Stepper, reader: Reader, context_frames: int, *, split: str = "valid", max_trajectories: int | None = None
) -> dict[str, Any] | None:
    """signal, threshold, and what was measured on the split: rate of interventions, and errors of whole rollouts with
    the gate, without the corrector and with it in every step. None without a corrector or a split."""
    if not trained_flow(stepper, reader.task) or not reader.splits.get(split, 0):
        return None
    plan = RolloutPlan.whole(reader, context_frames, split=split)
    count = min(reader.splits[split], max_trajectories or NUM_TRAJECTORIES)
    parts = _read(reader, split, count, plan)
    weights = _weights(reader)
    seen = _signals(stepper, parts, weights)
    found = {"never": seen.pop("error"), "always": _gated(stepper, parts, {"spread": -1.0}, weights)[0]}
    tried: list[dict[str, Any]] = []
    for name, values in seen.items():
        for quantile in _QUANTILES:
            threshold = float(values.quantile(quantile))
            error, rate = _gated(stepper, parts, {name: threshold}, weights)
            tried.append({"signal": name, "threshold": threshold, "rate": rate, "error": float(error)})
    best = min(tried, key=lambda one: one["error"])
    errors = {f"error_{name}": float(value) for name, value in found.items()}
    return best | errors | {"split": split, "num_trajectories": count, "earned": best["error"] < errors["error_never"]}


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
    """Errors of whole rollouts of a split with the gate, without it, and with as many interventions at random places;
    rate of interventions, and each of them."""
    count = min(reader.splits[split], max_trajectories or reader.splits[split])
    parts, weights = _read(reader, split, count, plan), _weights(reader)
    thresholds = {str(gate["signal"]): float(gate["threshold"])}
    acted: list[dict[str, Any]] = []
    error, rate = _gated(stepper, parts, thresholds, weights, acted)
    by_chance, _ = _gated(stepper, parts, thresholds, weights, random_rate=rate)
    never, _ = _gated(stepper, parts, {}, weights)
    return {
        "signal": gate["signal"],
        "threshold": gate["threshold"],
        "earned": gate["earned"],
        "rate": rate,
        "error": float(error),
        "error_never": float(never),
        "error_random": float(by_chance),
        "interventions": acted,
    }


_Part = tuple[list[int], RolloutPlan, Batch, Tensor]


def _read(reader: Reader, split: str, count: int, plan: RolloutPlan) -> list[_Part]:
    device = torch.device("cpu")
    return [
        (list(part), its_plan, *read_inputs(reader, split, part, its_plan, device, torch.float32))
        for part, its_plan in batches_of(reader, split, range(count), plan, batch_size=16)
    ]


def _weights(reader: Reader) -> Tensor | None:
    found = point_weights(reader.task.axes, reader.coordinates)
    return None if found is None else torch.from_numpy(found)


def _errors(frames: list[Tensor], part: _Part, weights: Tensor | None) -> Tensor:
    """(B,): error of whole rollouts relative to the RMS of the trajectory; what blew up counts as infinite."""
    _, _, batch, truth = part
    whole = truth if batch.task.steady else torch.cat([batch.state, truth], dim=1)
    found = trmse(torch.stack(frames, dim=1), truth, trajectory_rms(whole, weights), weights)
    return found.flatten(1).mean(1)


def _signals(stepper: Stepper, parts: list[_Part], weights: Tensor | None) -> dict[str, Tensor]:
    """Signal -> its values over all steps of the operator's rollouts, without those that say nothing; `error`."""
    task, name = parts[0][2].task, trained_flow(stepper)
    asked = dict.fromkeys(available(stepper, task))
    values: dict[str, list[Tensor]] = {one: [] for one in asked}
    errors = []
    for part in parts:
        batch, frames = part[2], []
        start = None if task.steady else batch.state[:, -1]

        def watched(given: Batch, start: Tensor | None = start) -> Tensor:
            predicted = stepper.predict(given)
            frame = stepper.fields(given, predicted)
            for one, found in signals(stepper, name, Step(given, predicted), frame, start, asked).items():
                values[one].append(found.double())
            return frame

        frames = list(rollout(watched, batch, part[1].num_steps))
        errors.append(_errors(frames, part, weights))
    joined = {one: torch.cat(found) for one, found in values.items()}
    finite = {one: found[found.isfinite()] for one, found in joined.items()}
    return {one: v for one, v in finite.items() if len(v) and v.max() > v.min()} | {"error": torch.cat(errors).mean()}


def _gated(
    stepper: Stepper,
    parts: list[_Part],
    thresholds: Mapping[str, float],
    weights: Tensor | None,
    acted: list[dict[str, Any]] | None = None,
    random_rate: float | None = None,
) -> tuple[Tensor, float]:
    """Error of whole gated rollouts, and the rate of interventions, which are added to `acted`.

    random_rate: act in so many steps by chance instead.
    """
    errors, hits, steps = [], 0, 0
    for number, part in enumerate(parts):
        trajectories, plan, batch, _ = part
        chosen = None
        if random_rate is not None:
            generator = torch.Generator().manual_seed(key_of(0, "gate", number) >> 1)
            chosen = torch.rand(plan.num_steps, batch.num_samples, generator=generator) < random_rate
        predictor = Gated(stepper, thresholds, chosen=chosen)
        frames = list(rollout(predictor, batch, plan.num_steps))
        errors.append(_errors(frames, part, weights))
        hits, steps = hits + len(predictor.interventions), steps + predictor.num_steps * batch.num_samples
        for one in predictor.interventions if acted is not None else ():
            why = [name for bit, name in enumerate(REASONS) if one.reasons & (1 << bit)]
            acted.append({"trajectory": trajectories[one.row], "step": one.step, "why": why})  # type: ignore[union-attr]
    return torch.cat(errors).mean(), hits / max(steps, 1)
