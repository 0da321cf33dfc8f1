"""The stage `distill`: a student that draws in one evaluation what the corrector of kind `flow` draws in several.

A draw of the corrector follows a velocity and no chance: where it ends is a function of where it begins, and the
student learns that function, from the same noise, by mean square. It begins as the corrector with one step of Euler's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ups.distributed.strategies import local, set_rows
from ups.errors import ConfigError
from ups.models.flow import FLOW, STEPS, STUDENT, PredictedStep, endpoints, flow_of, noise_of
from ups.spec.batch import Batch
from ups.training.corrector_stage import StageOnResiduals


class DistillStage(StageOnResiduals):
    """Trains the student on the ends of the corrector's draws, in usual residuals."""

    trained = STUDENT

    def step_losses(self, batches: Sequence[Batch], steps: Sequence[PredictedStep], number: int) -> list[Tensor]:
        starts = [
            noise_of(batch, self.seed, 0, number).to(s.predicted.dtype) for batch, s in zip(batches, steps, strict=True)
        ]
        with torch.no_grad():
            wanted = endpoints(self.stepper, flow_of(self.stepper, FLOW), steps, starts, STEPS)
        drawn = endpoints(self.stepper, self.flow, steps, starts, 1)
        return [(x - y).square().flatten(1).mean(1) for x, y in zip(drawn, wanted, strict=True)]

    def check_start(self) -> None:
        """Raises ConfigError for a task that the teacher was not trained on: its draws would be the noise."""
        teacher = flow_of(self.stepper, FLOW)
        unknown = [task.name for task in self.tasks if not teacher.is_trained(task)]
        if not unknown:
            return
        known = [task.name for task in self.stepper.tasks if teacher.is_trained(task)]
        raise ConfigError(
            f"stage 'distill' learns from a corrector of kind flow, and there is none of task '{unknown[0]}'",
            hint=f"set `tasks: [{', '.join(known)}]` of the stage"
            if known
            else "put a stage of type corrector and kind flow before it, or start from a run that has one",
        )

    @torch.no_grad()
    def begin(self) -> None:
        """The student starts as its teacher, as far as it has the same shapes. Each rank copies its own part."""
        teacher, student = flow_of(self.stepper, FLOW), dict(self.flow.named_parameters())
        for name, parameter in teacher.named_parameters():
            if name in student and student[name].shape == parameter.shape:
                local(student[name]).copy_(local(parameter))
        # What it does not learn it cannot draw in one evaluation: there its teacher draws.
        learned = {task.name for task in self.tasks}
        others = [task.name for task in self.stepper.tasks if task.name not in learned]
        set_rows(self.flow.scale, self.flow.scale_without(others))
