"""How many parameters of a multiscale network a task uses, and how many of them it shares with other tasks."""

from __future__ import annotations

from collections.abc import Sequence

from ups.models.grid_convolution import GridKernel
from ups.models.multiscale import MultiscaleNetwork
from ups.spec.task import TaskSpec


def count_parameters(network: MultiscaleNetwork, tasks: Sequence[TaskSpec]) -> dict[str, tuple[int, int]]:
    """Task -> (parameters that its forward pass uses, how many of them another task uses too)."""
    tables = list(network.tables().values())
    in_tables = {id(p) for table in tables for p in table.parameters()}
    kernels = [module for module in network.modules() if isinstance(module, GridKernel)]
    of_dims = {id(p) for kernel in kernels for p in (kernel.weight, *kernel.own.values()) if kernel.own}
    common = sum(p.numel() for p in network.parameters() if id(p) not in in_tables | of_dims)
    counts = {}
    for task in tasks:
        active = shared = common
        own_dims = sum(kernel.of(task.num_spatial_dims).numel() for kernel in kernels if kernel.own)
        active += own_dims
        if any(t.num_spatial_dims == task.num_spatial_dims for t in tasks if t.name != task.name):
            shared += own_dims
        for table in tables:
            row_size = sum(p.shape[1:].numel() for p in table.parameters())
            own = set(table.names_of(task))
            others = {name for t in tasks if t.name != task.name for name in table.names_of(t)}
            active += row_size * len(own)
            shared += row_size * len(own & others)
        counts[task.name] = (active, shared)
    return counts
