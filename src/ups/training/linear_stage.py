"""The stage `linear`: fits what is linear in each problem before the rest of the network is trained.

Trained together, the network explains the data before the phases of waves are found, and they never are. Where a linear
law explains too little of a task, its part goes back to zero and is left to the training of the whole.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ups.config.stage import LinearStageConfig
from ups.distributed.strategies import scale_rows
from ups.models.stepper import Stepper
from ups.spec.batch import Batch
from ups.training.augment import noisy
from ups.training.averages import TaskAverages
from ups.training.stages import Stage, baseline_loss, field_errors

logger = logging.getLogger(__name__)

_MEMORY = 0.9


class LinearStage(Stage):
    """Trains the linear part alone, on the error of each field relative to the field itself."""

    config: LinearStageConfig
    averages: TaskAverages

    def __init__(self, config: LinearStageConfig, stepper: Stepper, seed: int) -> None:
        super().__init__(stepper, seed)
        self.config = config
        start = {task.name: baseline_loss(stepper, task) for task in stepper.tasks}
        self.averages = TaskAverages(start, _MEMORY)

    def trained_modules(self) -> list[nn.Module]:
        return [self.stepper.linear.linear_part]

    def sample_losses(self, batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        return [{"loss": self.errors(self.prepare(batch, self.config.augment))} for batch in batches]

    def errors(self, batch: Batch) -> Tensor:
        """(B,) errors of one step of the linear part; nothing of a steady task, with every parameter in the graph."""
        stepper, context, network = self.stepper, self.stepper.context_frames, self.stepper.linear
        if batch.task.steady:
            nothing = sum(p.sum() for p in network.linear_part.parameters()) * 0.0
            return torch.zeros_like(batch.dt) + nothing
        frames, normalization = batch.state[:, :context], stepper.normalization
        history = noisy(batch, frames, normalization, self.seed, largest=self.config.noise, clean=0.0)
        predicted = network.linear(stepper.network_input(batch.with_state(history)))
        truth = batch.state[:, context]
        error = predicted - stepper.scaled_change(history[:, -1], truth, batch.task)
        return field_errors(stepper, batch.task, error, batch.state[:, context - 1 : context + 1])

    def finish(self) -> None:
        """Zero the rows of tasks that a linear law explains too little of. Collective: all ranks.

        What an earlier stage, or the run that this one started from, found for other tasks stays.
        """
        averages, most = self.averages, self.config.keep_below
        useless = {task for task in averages.tasks if averages.was_seen(task) and averages.fraction(task) > most}
        if useless:
            logger.info("a linear law explains too little of %s: starts at zero again", ", ".join(sorted(useless)))
        for parameter, owners in self.stepper.linear.linear_rows():
            scale_rows(parameter, torch.tensor([float(owner not in useless) for owner in owners]))
