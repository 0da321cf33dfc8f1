"""Members of an ensemble: the same step under different noise, in its condition or as the start of a corrector's draw.

A batch of an ensemble holds every sample `members` times, one behind the other. The noise of a member is a function of
(seed, task, step, sample, member): it is new at each step, no member depends on how many others there are, and equal
seeds give equal ensembles. Without noise a network gives its central member.

B samples, M members, K numbers of noise, C channels, S space.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import replace

import torch
from torch import Tensor

from ups.errors import ConfigError
from ups.models.flow import PredictedStep, corrected, corrector_of, noise_of, trained_flow, whole
from ups.models.normalization import keyed_normal
from ups.models.stepper import OPERATOR, Stepper
from ups.spec.batch import Batch
from ups.spec.keyed import key_of
from ups.spec.task import TaskSpec


class Members(ABC):
    """A predictor (`ups.models.stepper.Predictor`) of members, for batches that `Batch.repeated` made.

    stepper: what predicts without members.
    """

    def __init__(self, stepper: Stepper, members: int, seed: int = 0) -> None:
        self.stepper, self.members, self.seed = stepper, members, seed

    @abstractmethod
    def __call__(self, batch: Batch) -> Tensor:
        """The next frame (B * M, C, *S) of each member; `batch.stage_step` counts the steps of a rollout."""


def members_of(stepper: Stepper, task: TaskSpec, members: int, seed: int = 0) -> Members:
    """The members of a task: draws of its corrector or of the student of that, if there is one, else by noise."""
    return FlowMembers(stepper, members, seed) if trained_flow(stepper, task) else Ensemble(stepper, members, seed)


class FlowMembers(Members):
    """The operator's step with a draw of what it leaves over, a new one for each member and step.

    name: of the network that draws; by default the one that is trained on the task of a batch. Without members a model
    with a corrector is its operator.
    """

    def __init__(self, stepper: Stepper, members: int, seed: int, name: str = "") -> None:
        super().__init__(stepper, members, seed)
        self._name_of = functools.cache(lambda task: name or corrector_of(stepper, task))

    def __call__(self, batch: Batch) -> Tensor:
        step = PredictedStep(batch, self.stepper.predict(batch))
        each = replace(batch, numbers=batch.numbers[:: self.members], dt=batch.dt[:: self.members])
        draws = [noise_of(each, self.seed, member) for member in range(self.members)]
        noise = torch.stack(draws, dim=1).flatten(0, 1).to(step.predicted.dtype)
        return self.stepper.fields(batch, corrected(self.stepper, self._name_of(batch.task), step, noise))


class Ensemble(Members):
    """The step of a network that takes noise, with the noise of each member."""

    def __init__(self, stepper: Stepper, members: int, seed: int = 0) -> None:
        if not stepper.config.noise_numbers:
            raise ConfigError(
                f"this model of type '{stepper.config.type}' takes no noise: it has no members",
                hint="train one with a stage of type corrector and kind ensemble (docs/stages.md)",
            )
        super().__init__(stepper, members, seed)

    def __call__(self, batch: Batch) -> Tensor:
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
    sizes_and_names = stepper.network.noise_sizes()
    if sizes_and_names is None or (task is not None and stepper.network_of(task) != OPERATOR):
        return False
    sizes, names = sizes_and_names
    used = {name for name, size in zip(names, whole(sizes)[:, 0].tolist(), strict=True) if size}
    return bool(used) if task is None else task.name in used
