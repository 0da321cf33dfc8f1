"""The stage `outliers`: a loss for one batch. The engine owns everything else.

A loss is a mean over samples in which no sample depends on another, so that ranks and micro-batches may cut a batch
anywhere: `ups doctor` checks that N ranks give the gradient of one.
"""

from __future__ import annotations

from ups.models.stepper import Stepper
from ups.spec.batch import Batch
from ups.training.losses import Losses
from ups.training.stages import OperatorStage
from ups_sample_plugin.stage_config import OutlierStageConfig


class OutlierStage(OperatorStage):
    """Trains the step in time on a power of each sample's error."""

    def __init__(self, config: OutlierStageConfig, stepper: Stepper, seed: int) -> None:
        super().__init__(config, stepper, seed)
        self.power = config.power

    def forward(self, batch: Batch) -> Losses:
        """The mean over the samples of error ** power."""
        batch = self.prepare(batch, self.config.augment)
        errors = self.steady_errors(batch) if batch.task.steady else self.unrolled_errors(batch)  # (B,)
        loss = errors.pow(self.power).mean()
        return Losses(loss, {f"train/{batch.task.name}/loss": loss.detach()})
