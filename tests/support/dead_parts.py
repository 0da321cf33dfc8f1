"""Which parts of a network do nothing: each is set to zero in turn, and the errors on test states are compared."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from torch import nn

from ups.data.open import open_paths
from ups.inference.bundle import load_bundle
from ups.models.stepper import Stepper, rollout
from ups.spec.batch import Batch

NUM_STATES = 2  # of each task
# By which part the error of at least one task must grow.
LEAST = 0.01
States = list[tuple[Batch, torch.Tensor]]


def states_of(bundle: Path) -> States:
    """Test states that came along with a bundle, a batch for each task, with the true frame that follows."""
    info, pairs = load_bundle(bundle).info, []
    for task in info.tasks:
        with contextlib.closing(open_paths(bundle.parent / "states" / f"{task.name}.zarr")) as reader:
            frames = 0 if task.steady else info.context_frames + 1
            numbers = range(min(NUM_STATES, reader.splits["test"]))
            block = reader.read_block("test", list(numbers), [0] * len(numbers), frames)
            given, truth = block.state[:, : info.context_frames], block.state[:, info.context_frames :]
            batch = Batch.of(
                task,
                state=None if task.steady else given,
                static=block.static if block.static.size else None,
                parameters=block.parameters,
                dt=task.dt,
                coordinates=block.coordinates,
            )
            pairs.append((batch, torch.from_numpy(block.target[:, None] if task.steady else truth)))
    return pairs


@torch.no_grad()
def errors(stepper: Stepper, states: States) -> torch.Tensor:
    """(tasks,): the error of a step, each channel in units of its own size."""
    rows = []
    for batch, truth in states:
        predicted = torch.stack(list(rollout(stepper, batch, truth.shape[1])), dim=1)
        space = tuple(range(3, truth.ndim))
        squares = (predicted - truth).square().mean((0, 1, *space)) / truth.square().mean((0, 1, *space))
        rows.append(squares.mean().sqrt())
    return torch.stack(rows).nan_to_num(torch.inf)


def parts_of(network: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Each matrix or table; and the vectors of a module that has nothing else. Biases belong to their matrix."""
    parts: dict[str, list[nn.Parameter]] = {}
    for name, module in network.named_modules():
        own = dict(module.named_parameters(recurse=False))
        tables = {f"{name}.{key}": [tensor] for key, tensor in own.items() if tensor.ndim > 1}
        parts |= tables or ({name: list(own.values())} if own else {})
    return parts


def dead_parts(stepper: Stepper, states: States) -> list[str]:
    """Names of the parts whose zeroing makes no task worse."""
    usual, dead = errors(stepper, states), []
    for name, tensors in parts_of(stepper).items():
        kept = [tensor.detach().clone() for tensor in tensors]
        with torch.no_grad():
            for tensor in tensors:
                tensor.zero_()
            worse = float((errors(stepper, states) / usual).max()) - 1
            for tensor, values in zip(tensors, kept, strict=True):
                tensor.copy_(values)
        if worse <= LEAST:
            dead.append(name)
    return dead
