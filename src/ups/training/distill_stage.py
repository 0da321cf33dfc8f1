"""The stage `distill`: a student that draws in one evaluation what the corrector of kind `flow` draws in several.

A draw of the corrector follows a velocity and no chance: where it ends is a function of where it begins, and the
student learns that function, from the same noise, by mean square. It begins as the corrector with one step of Euler's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ups.distributed.strategies import local
from ups.models.flow import FLOW, STEPS, STUDENT, Step, endpoints, flow_of, noise_of
from ups.spec.batch import Batch
from ups.training.flow_stage import StageOnResiduals


class DistillStage(StageOnResiduals):
    """Trains the student on the ends of the corrector's draws, in usual residuals."""

    trained = STUDENT

    def step_losses(self, batches: Sequence[Batch], steps: Sequence[Step], number: int) -> list[Tensor]:
        starts = [
            noise_of(batch, self.seed, 0, number).to(s.predicted.dtype) for batch, s in zip(batches, steps, strict=True)
        ]
        with torch.no_grad():
            wanted = endpoints(self.stepper, flow_of(self.stepper, FLOW), steps, starts, STEPS)
        found = endpoints(self.stepper, self.flow, steps, starts, 1)
        return [(x - y).square().flatten(1).mean(1) for x, y in zip(found, wanted, strict=True)]

    @torch.no_grad()
    def begin(self) -> None:
        """The student starts as its teacher, as far as it has the same shapes. Each rank copies its own part."""
        student = dict(self.flow.named_parameters())
        for name, parameter in flow_of(self.stepper, FLOW).named_parameters():
            if name in student and student[name].shape == parameter.shape:
                local(student[name]).copy_(local(parameter))
