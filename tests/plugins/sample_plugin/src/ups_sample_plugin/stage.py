"""The stage `outliers`: a loss for each sample. The engine owns everything else.

No loss of a sample depends on another sample, so that ranks and micro-batches may cut a batch anywhere: `ups doctor`
checks that N ranks give the gradient of one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ups.models.stepper import Stepper
from ups.spec.batch import Batch
from ups.training.stages import OperatorStage
from ups_sample_plugin.stage_config import OutlierStageConfig


class OutlierStage(OperatorStage):
    """Trains the step in time on a power of each sample's error."""

    def __init__(self, config: OutlierStageConfig, stepper: Stepper, seed: int) -> None:
        super().__init__(config, stepper, seed)
        self.power = config.power

    def sample_losses(self, batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        """For each batch (of one task) the error ** power of its samples (B,); `loss` is what is trained."""
        return [{"loss": losses["loss"].pow(self.power)} for losses in super().sample_losses(batches)]
