"""What the networks for one task share: the shape of their input, with parameters as constant channels.

B samples, F input channels, P parameters, C output channels, S space.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ups.errors import ConfigError
from ups.spec.task import TaskSpec


def only_task(kind: str, tasks: Sequence[TaskSpec]) -> TaskSpec:
    """The one task of a network that cannot share weights between tasks."""
    if len(tasks) != 1:
        raise ConfigError(
            f"model type '{kind}' learns one task, and the recipe has {len(tasks)}",
            hint="use a recipe per task, or model.type latent_operator, which learns them together",
        )
    return tasks[0]


def num_inputs(task: TaskSpec, context_frames: int) -> int:
    """Channels of `with_parameters`."""
    return context_frames * task.num_channels("state") + task.num_channels("static") + len(task.parameters)


def num_outputs(task: TaskSpec) -> int:
    return task.num_channels(task.predicted)


def with_parameters(fields: Tensor, parameters: Tensor) -> Tensor:
    """fields (B, F, *S), parameters (B, P) normalized -> (B, F + P, *S)."""
    space = fields.shape[2:]
    constant = parameters.reshape(*parameters.shape, *[1] * len(space)).expand(-1, -1, *space)
    return torch.cat([fields, constant.to(fields.dtype)], dim=1)
