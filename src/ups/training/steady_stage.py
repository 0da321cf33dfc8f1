"""The stage `steady`: the solution of problems without time, in one step from what is given.

Where the equation of a task is known in discretized form, and the model refines by it, the error after refinement
counts too: the network learns what a few steps of the solver cannot make up for.

B samples, C predicted channels, S space.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ups.config.stage import SteadyStageConfig
from ups.spec.batch import Batch
from ups.spec.task import TaskSpec
from ups.training.stages import BalancedStage, field_errors


class SteadyStage(BalancedStage):
    """Trains the network of steady tasks on the error of each field relative to the field."""

    config: SteadyStageConfig

    def trained_modules(self) -> list[nn.Module]:
        steady = [task for task in self.stepper.tasks if task.steady]
        return [self.stepper.networks[self.stepper.network_of(task)] for task in steady[:1]]

    def takes(self, task: TaskSpec) -> bool:
        return task.steady

    def sample_losses(self, batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        """`direct` and `refined`: errors before and after refinement, where there is one."""
        batches = [self.prepare(batch, self.config.augment) for batch in batches]
        stepper = self.stepper
        losses = []
        for batch, predicted in zip(batches, stepper.predict_group(batches, refine=False), strict=True):
            direct = self._errors(batch, predicted)
            num_steps = stepper.configs[stepper.network_of(batch.task)].refine_steps
            if not (num_steps and batch.task.residual and self.config.refined_weight):
                losses.append({"loss": direct})
                continue
            refined = self._errors(batch, stepper.refined(batch, predicted, num_steps))
            losses.append({"loss": direct + self.config.refined_weight * refined, "direct": direct, "refined": refined})
        return losses

    def _errors(self, batch: Batch, predicted: Tensor) -> Tensor:
        wanted = self.stepper.normalization.normalize("target", batch.task, batch.target, 1)
        return field_errors(self.stepper, batch.task, predicted - wanted, batch.target[:, None])
