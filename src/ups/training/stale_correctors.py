"""What corrects a network is true of that network alone: when a stage trains it on, correctors of its tasks and members
by noise are forgotten, also those that came with the weights it started from.
"""

from __future__ import annotations

import logging

import torch

from ups.distributed.strategies import gathered, set_rows
from ups.models.flow import FLOW, STUDENT, flow_of
from ups.models.stepper import OPERATOR, Stepper

logger = logging.getLogger(__name__)


def forget_correctors(stepper: Stepper, network: str, *, members: bool) -> None:
    """Of the tasks that `network` predicts. members: also those that noise makes. Collective: all ranks."""
    tasks = [task for task in stepper.tasks if stepper.network_of(task) == network]
    forgotten = set()
    for name in (FLOW, STUDENT):
        if name in stepper.networks:
            flow = flow_of(stepper, name)
            forgotten |= {task.name for task in tasks if flow.is_trained(task)}
            set_rows(flow.scale, flow.scale_without([task.name for task in tasks]))
    found = stepper.network.noise_sizes() if members and network == OPERATOR else None
    if found is not None:
        sizes, names = found
        forgotten |= {name for name, size in zip(names, gathered(sizes)[:, 0].tolist(), strict=True) if size}
        set_rows(sizes, torch.zeros(len(names)))
    if forgotten:
        logger.warning(
            "what corrects %s was trained for other weights than this stage ends with, and is forgotten",
            ", ".join(sorted(forgotten)),
        )
