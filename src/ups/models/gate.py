"""A rollout in which the corrector acts only where something says that the operator's step is not to be trusted.

Three signals of a step, each one number for a trajectory: `drift` of an integral that the task conserves since the
last given frame, relative to the L1 norm of that frame; `residual`, by how much the frame misses the equation, where
the task has that in discretized form; `spread`, how far apart two draws of the corrector are, in usual changes. The
corrector acts where a signal is above its threshold, which was found on the valid split (`ups.evaluation.gate`).

B samples (or members of them), C channels, S space.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ups.errors import ConfigError
from ups.models.constraints import by_cells, conserved_channels
from ups.models.equation_residual import equation_residual
from ups.models.flow import Step, corrected, corrector_of, noise_of, trained_flow
from ups.models.stepper import Stepper
from ups.spec.batch import Batch
from ups.spec.task import TaskSpec

# The order is that of the bits of a recorded reason.
REASONS = ("drift", "residual", "spread")
# Relative to the L1 norm of a frame: what is below is rounding.
_LEAST_DRIFT = 1e-5


@dataclass(frozen=True)
class Intervention:
    """Where the corrector acted: row of the batch, step from 1 on, and why, as bits of `REASONS`."""

    row: int
    step: int
    reasons: int


def reason_words(reasons: int) -> str:
    """'drift and spread'."""
    return " and ".join(name for bit, name in enumerate(REASONS) if reasons & (1 << bit))


@dataclass
class Gated:
    """A predictor (`ups.models.rollout.Predictor`) for one rollout, which remembers where the corrector acted.

    thresholds: signal -> above which the corrector acts; signals without one are not computed. members, seed: as in
    `ups.models.ensemble`; without members the corrector's draw is the one that begins without noise.
    chosen: (steps, B) instead of signals, where the corrector is to act: for comparisons.
    """

    stepper: Stepper
    thresholds: Mapping[str, float]
    members: int | None = None
    seed: int = 0
    chosen: Tensor | None = None
    interventions: list[Intervention] = field(default_factory=list)
    num_steps: int = 0
    num_rows: int = 0
    _start: Tensor | None = None
    _name: str = ""

    def __post_init__(self) -> None:
        if not trained_flow(self.stepper):
            raise ConfigError(
                "this model has no corrector that could act",
                hint="train one: stage corrector, kind flow (docs/stages.md)",
            )

    def __call__(self, batch: Batch) -> Tensor:
        """The next frame (B, C, *S) of each row."""
        stepper, task = self.stepper, batch.task
        predicted = stepper.predict(batch)
        frame = stepper.fields(batch, predicted)
        self._name = self._name or corrector_of(stepper, task)
        if self._start is None and not task.steady:
            self._start = batch.state[:, -1]
        self.num_steps, self.num_rows = self.num_steps + 1, batch.num_samples
        reasons = torch.zeros(batch.num_samples, dtype=torch.int64)
        if self.chosen is not None:
            reasons += self.chosen[self.num_steps - 1].long()
        else:
            found = signals(stepper, self._name, Step(batch, predicted), frame, self._start, self.thresholds)
            for name, values in found.items():
                # not finite is above every threshold
                reasons += (~(values <= self.thresholds[name])).cpu().long() << REASONS.index(name)
        rows = reasons.nonzero()[:, 0]
        if not len(rows):
            return frame
        part, index = batch.pick(rows), rows.to(frame.device)
        noise = self._noise(batch)
        noise = torch.zeros_like(predicted[index]) if noise is None else noise.to(predicted)[index]
        better = stepper.fields(part, corrected(stepper, self._name, Step(part, predicted[index]), noise))
        for row in rows.tolist():
            self.interventions.append(Intervention(row, self.num_steps, int(reasons[row])))
        return frame.index_copy(0, index, better.to(frame.dtype))

    def _noise(self, batch: Batch) -> Tensor | None:
        """Of all rows, or None without members."""
        if self.members is None:
            return None
        first = batch.pick(torch.arange(0, batch.num_samples, self.members))
        return torch.stack([noise_of(first, self.seed, m) for m in range(self.members)], dim=1).flatten(0, 1)

    def rate(self, num_rows: int) -> float:
        """Part of the steps of all trajectories in which the corrector acted."""
        return len(self.interventions) / max(num_rows * self.num_steps, 1)


def available(stepper: Stepper, task: TaskSpec) -> list[str]:
    """The signals that a task has with this model."""
    found = ["drift"] if task.conserved and not task.steady else []
    found += ["residual"] if task.residual else []
    return [*found, "spread"] if trained_flow(stepper, task) else found


def signals(
    stepper: Stepper, name: str, step: Step, frame: Tensor, start: Tensor | None, asked: Mapping[str, object]
) -> dict[str, Tensor]:
    """(B,) of each signal that is asked for, of the frame that the operator has made of a step.

    name: of the network that draws; start (B, C, *S): the last given frame of the rollout.
    """
    found = dict[str, Tensor]()
    if "drift" in asked and start is not None:
        found["drift"] = _drift(frame, start, step.batch)
    if "residual" in asked:
        found["residual"] = equation_residual(step.batch, frame)
    if "spread" in asked:
        draws = [
            corrected(stepper, name, step, noise_of(step.batch, 0, member).to(step.predicted.dtype))
            for member in (-1, -2)  # none of those of a rollout
        ]
        found["spread"] = (draws[0] - draws[1]).square().flatten(1).mean(1).div(2).sqrt()
    return found


def _drift(frame: Tensor, start: Tensor, batch: Batch) -> Tensor:
    """(B,): the largest of the conserved fields; points count by their cells."""
    task, space = batch.task, tuple(range(2, frame.ndim))
    now, before = (by_cells(x.double(), batch) for x in (frame, start))
    moved = (now.mean(space) - before.mean(space)).abs() / before.abs().mean(space).clamp_min(1e-300)  # (B, C)
    largest = moved[:, conserved_channels(task)].amax(1)
    return torch.where(largest > _LEAST_DRIFT, largest, torch.zeros_like(largest))
