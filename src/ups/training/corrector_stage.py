"""The stage `corrector` of kind `ensemble`: the operator trained on, so that it says what it cannot know.

Noise in the condition of the network makes members that differ. Members of one sample are judged
together, by the almost fair CRPS of each point over a short rollout of each: its first part asks for members near the
truth, its second for members that are as far from each other as from the truth.

B samples, M members, C channels, S space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ups.config.stage import CorrectorStageConfig
from ups.distributed.strategies import gathered, set_rows
from ups.models.ensemble import Ensemble, by_member, repeated
from ups.models.stepper import Stepper
from ups.spec.batch import Batch
from ups.training.flow_stage import FlowStage
from ups.training.losses import almost_fair_crps
from ups.training.stages import BalancedStage, Stage, in_field_units


@dataclass
class _Sample:
    """A batch with its members on the way: their batch as it was given, their frames now, their losses of each step."""

    batch: Batch
    members: Batch
    history: Tensor
    losses: list[dict[str, Tensor]] = field(default_factory=list)


class EnsembleStage(BalancedStage):
    """Trains the whole network, with noise, on the scores of members together."""

    trains_members = True

    def __init__(self, config: CorrectorStageConfig, stepper: Stepper, seed: int) -> None:
        super().__init__(config, stepper, seed)
        self.config = config
        self._ensemble = Ensemble(stepper, config.members, seed)

    def begin(self) -> None:
        """Let noise act on the tasks of this stage; on those that it already acts on, as much as it does."""
        super().begin()
        found = self.stepper.network.noise_sizes()
        assert found is not None  # the ensemble would have refused
        parameter, names = found
        sizes = gathered(parameter)[:, 0]
        new = torch.tensor([self.config.trains(name) for name in names], device=sizes.device) & (sizes == 0)
        set_rows(parameter, torch.where(new, 1.0, sizes))

    def sample_losses(self, batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        """`loss` is the CRPS. error and spread: how far members are from the truth, and from each other."""
        samples = [self._begin(self.prepare(batch, self.config.augment)) for batch in batches]
        for step in range(self.config.unroll_steps):
            active = [s for s in samples if not s.batch.task.steady or step == 0]
            if not active:
                break
            given = [self._ensemble.with_noise(s.members.with_state(s.history), step) for s in active]
            for sample, predicted in zip(active, self.stepper.predict_group(given), strict=True):
                sample.losses.append(self._losses(sample, predicted, step))
                if not sample.batch.task.steady and step + 1 < self.config.unroll_steps:
                    following = self.stepper.advance(sample.history[:, -1], predicted, sample.batch.task)
                    newest = following[:, None].to(sample.history.dtype)
                    sample.history = torch.cat([sample.history[:, 1:], newest], dim=1)
        return [_means(sample.losses) for sample in samples]

    def _begin(self, batch: Batch) -> _Sample:
        members = repeated(batch, self.config.members)
        return _Sample(batch, members, members.state[:, : self.stepper.context_frames])

    def _losses(self, sample: _Sample, predicted: Tensor, step: int) -> dict[str, Tensor]:
        """(B,) each, from the scaled changes (or normalized targets) of all members, (B * M, C, *S)."""
        batch, members, stepper = sample.batch, sample.members, self.stepper
        task, at = batch.task, stepper.context_frames + step
        if task.steady:
            wanted = stepper.normalization.normalize("target", task, members.target, 1)
            fields = batch.target[:, None]
        else:
            wanted = stepper.scaled_change(sample.history[:, -1], members.state[:, at], task)
            fields = batch.state[:, at - 1 : at + 1]
        errors = by_member(predicted - wanted, self.config.members)  # (B, M, C, *S)
        errors, fields, floor = in_field_units(stepper, task, errors, fields)
        score = almost_fair_crps(errors, fields, floor)
        with torch.no_grad():
            spread = errors[:, 0] - errors[:, 1]  # of two of them: members are alike
            apart = {"error": errors[:, 0].abs().flatten(1).mean(1), "spread": spread.abs().flatten(1).mean(1)}
        return {"loss": score, **apart}


def _means(losses: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in losses]).mean(0) for name in losses[0]}


def build_corrector(config: CorrectorStageConfig, stepper: Stepper, seed: int) -> Stage:
    """The corrector of the kind that the recipe names."""
    return (FlowStage if config.kind == "flow" else EnsembleStage)(config, stepper, seed)
