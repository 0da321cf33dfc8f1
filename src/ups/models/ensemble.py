"""Members of an ensemble: the same step under different noise, in its condition or as the start of a corrector's draw.

A batch of an ensemble holds every sample `members` times, one behind the other. The noise of a member is a function of
(seed, task, step, sample, member): it is new at each step, no member depends on how many others there are, and equal
seeds give equal ensembles. Without noise a network gives its central member.

B samples, M members, K numbers of noise, C channels, S space.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ups.errors import ConfigError
from ups.models.flow import Step, corrected, corrector_of, noise_of, trained_flow
from ups.models.normalization import keyed_normal
from ups.models.stepper import OPERATOR, Stepper
from ups.spec.batch import Batch
from ups.spec.keyed import key_of
from ups.spec.task import TaskSpec


class Members(Protocol):
    """A predictor (`ups.models.stepper.Predictor`) of members, for batches that `Batch.repeated` made.

    stepper: what predicts without members.
    """

    stepper: Stepper
    members: int
    seed: int

    def __call__(self, batch: Batch) -> Tensor:
        """The next frame (B * M, C, *S) of each member; `batch.stage_step` counts the steps of a rollout."""
        ...


def members_of(stepper: Stepper, task: TaskSpec, members: int, seed: int = 0) -> Members:
    """The members of a task: draws of its corrector or of the student of that, if there is one, else by noise."""
    return FlowMembers(stepper, members, seed) if trained_flow(stepper, task) else Ensemble(stepper, members, seed)


class FlowMembers:
    """The operator's step with a draw of what it leaves over, a new one for each member and step.

    name: of the network that draws; by default the one that is trained on the task of a batch. Without members a model
    with a corrector is its operator.
    """

    def __init__(self, stepper: Stepper, members: int, seed: int, name: str = "") -> None:
        self.stepper, self.members, self.seed, self.name = stepper, members, seed, name
        self._names: dict[str, str] = {}

    def _name_of(self, task: TaskSpec) -> str:
        if task.name not in self._names:
            self._names[task.name] = self.name or corrector_of(self.stepper, task)
        return self._names[task.name]

    def __call__(self, batch: Batch) -> Tensor:
        """The next frame (B * M, C, *S) of each member; `batch.stage_step` counts the steps of a rollout."""
        step = Step(batch, self.stepper.predict(batch))
        each = replace(batch, numbers=batch.numbers[:: self.members], dt=batch.dt[:: self.members])
        draws = [noise_of(each, self.seed, member) for member in range(self.members)]
        noise = torch.stack(draws, dim=1).flatten(0, 1).to(step.predicted.dtype)
        return self.stepper.fields(batch, corrected(self.stepper, self._name_of(batch.task), step, noise))


class Ensemble:
    """A predictor (`ups.models.stepper.Predictor`) of members, for batches that `Batch.repeated` made."""

    def __init__(self, stepper: Stepper, members: int, seed: int = 0) -> None:
        if not stepper.config.noise_numbers:
            raise ConfigError(
                f"this model of type '{stepper.config.type}' takes no noise: it has no members",
                hint="train one with a stage of type corrector and kind ensemble (docs/stages.md)",
            )
        self.stepper, self.members, self.seed = stepper, members, seed

    def __call__(self, batch: Batch) -> Tensor:
        """The next frame (B * M, C, *S) of each member; `batch.stage_step` counts the steps of a rollout."""
        frame: Tensor = self.stepper(self.with_noise(batch))
        return frame

    def with_noise(self, batch: Batch, step: int = 0) -> Batch:
        """The batch, whose samples are repeated, with the noise of each member. step: inside of a training sample."""
        size, numbers = self.stepper.config.noise_numbers, batch.numbers[:: self.members].numpy()
        task, at = batch.task.name, batch.stage_step
        draws = [
            keyed_normal(key_of(self.seed, "member", member, task, at, step), numbers, size, batch.dt)
            for member in range(self.members)
        ]
        return replace(batch, noise=torch.stack(draws, dim=1).flatten(0, 1))


def by_member(x: Tensor, members: int) -> Tensor:
    """(B * M, ...) -> (B, M, ...)."""
    return x.reshape(-1, members, *x.shape[1:])


def has_members(stepper: Stepper, task: TaskSpec | None = None) -> bool:
    """Whether the members of a model differ: it has a corrector, or takes noise and was trained to use it.

    task: whose members are meant. Collective if sharded.
    """
    if trained_flow(stepper, task):
        return True
    return (task is None or stepper.network_of(task) == OPERATOR) and stepper.network.uses_noise(task)
