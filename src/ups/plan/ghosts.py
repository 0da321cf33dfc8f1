"""Stages and batches without data: real shapes and types, real code, no memory and no arithmetic.

Inside `ghostly()` every tensor is torch's FakeTensor: operations give results of the right shape at once. What a stage
needs from the data itself (symmetries of a grid, window numbers that key random draws) is taken from a real batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from ups.distributed.runtime import make_mesh
from ups.spec.batch import Batch
from ups.training.stages import Stage


class HostNumbers(Tensor):
    """Window numbers inside `ghostly()`: the one tensor of a batch whose values are asked for."""

    on_host: npt.NDArray[np.int64]

    @classmethod
    def of(cls, values: npt.NDArray[np.int64]) -> HostNumbers:
        with _disable_current_modes():
            found: HostNumbers = Tensor._make_subclass(cls, torch.from_numpy(values))
        found.on_host = values
        return found

    def numpy(self, *, force: bool = False) -> npt.NDArray[np.int64]:
        """The real numbers."""
        return self.on_host


def ghostly() -> contextlib.AbstractContextManager[Any]:
    """Inside, tensors have no data."""
    mode: contextlib.AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


def make_ghost(stage: Stage, batches: Sequence[Batch], dtype: torch.dtype) -> None:
    """Replace parameters and buffers of a stage, built on the meta device, by ghosts on the CPU; inside `ghostly()`.

    batches: real ones, of every task and grid that the stage will see.
    """
    with _disable_current_modes():
        for batch in batches:
            stage._augmentation._moves_of(batch)  # looks at coordinates: kept by the stage, by task and grid
    # From averages of losses, which a ghost has none of; a number changes neither bytes nor arithmetic.
    stage.task_factor = lambda task: 1.0  # type: ignore[method-assign]
    made: dict[int, Any] = {}

    def ghost(tensor: Tensor) -> Tensor:
        kind = dtype if tensor.dtype.is_floating_point else tensor.dtype
        return torch.empty(tensor.shape, dtype=kind)

    for module in stage.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(ghost(parameter), requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = ghost(buffer)


def ghost_batch(batch: Batch, dtype: torch.dtype, samples: int) -> Batch:
    """The shapes of `samples` windows of a real batch, as the engine hands them to a stage; inside `ghostly()`."""

    def ghost(value: Tensor, cut: bool) -> Tensor:
        return torch.empty((samples if cut else value.shape[0], *value.shape[1:]), dtype=dtype)

    tensors: dict[str, Any] = {
        f.name: ghost(value, cut=True)
        for f in fields(batch)
        if isinstance(value := getattr(batch, f.name), Tensor) and f.name != "numbers"
    }
    with _disable_current_modes():
        known = np.resize(batch.numbers.numpy(), samples)
    return replace(
        batch,
        **tensors,
        coordinates=tuple(ghost(c, cut=False) for c in batch.coordinates),
        numbers=HostNumbers.of(known),
    )


@contextlib.contextmanager
def pretended_world(size: int, shard_ranks: int | None = None) -> Iterator[DeviceMesh]:
    """A process group of `size` ranks of which this process is the first and the others do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield make_mesh("cpu", size, shard_ranks)
    finally:
        dist.destroy_process_group()
