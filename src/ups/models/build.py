"""From a model section of a recipe to a stepper: the table of factories, and initialisation as a function of a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ups.config.model import FnoConfig, LatentOperatorConfig, ModelConfig, UnetConfig
from ups.models.fno import FnoNetwork
from ups.models.latent_operator import LatentNetwork
from ups.models.network import Network
from ups.models.single_task import only_task
from ups.models.stepper import Stepper
from ups.models.unet import UnetNetwork
from ups.models.vocabulary import Vocabulary
from ups.spec.keyed import key_of
from ups.spec.statistics import Statistics
from ups.spec.task import TaskSpec


def _latent_operator(config: LatentOperatorConfig, tasks: Sequence[TaskSpec], context_frames: int) -> Network:
    return LatentNetwork(config, Vocabulary.of(tasks), context_frames)


def _fno(config: FnoConfig, tasks: Sequence[TaskSpec], context_frames: int) -> Network:
    return FnoNetwork(config, only_task("fno", tasks), context_frames)


def _unet(config: UnetConfig, tasks: Sequence[TaskSpec], context_frames: int) -> Network:
    return UnetNetwork(config, only_task("unet", tasks), context_frames)


NETWORKS: dict[str, Callable[[Any, Sequence[TaskSpec], int], Network]] = {
    "latent_operator": _latent_operator,
    "fno": _fno,
    "unet": _unet,
}


def build_model(
    config: ModelConfig,
    tasks: Sequence[TaskSpec],
    statistics: Mapping[str, Statistics],
    context_frames: int,
    seed: int = 0,
    device: str = "cpu",
) -> Stepper:
    """A new stepper on the CPU in float32, with the same weights on every rank for the same seed.

    Drawn under a forked generator: building a model neither depends on the process' random state nor changes it.
    device "meta" builds it without memory, for weights that are put in place afterwards.
    """
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(key_of(seed, "init"))
        network = NETWORKS[config.type](config, tasks, context_frames)
    return Stepper(config, network, tasks, statistics, context_frames)
