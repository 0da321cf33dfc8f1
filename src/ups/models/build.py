"""From a model section of a recipe to a stepper: the registered factory, and initialization as a function of a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ups.config.model import ModelConfig
from ups.errors import ConfigError, PluginError
from ups.models.network import Network
from ups.models.stepper import Stepper
from ups.registry import MODELS
from ups.spec.keyed import key_of
from ups.spec.statistics import Statistics
from ups.spec.task import TaskSpec


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
    build = MODELS.factory(config.type)
    for task in tasks:
        if task.num_spatial_dims not in config.dims:
            able = ", ".join(str(dims) for dims in sorted(config.dims))
            raise ConfigError(
                f"model type '{config.type}' takes tasks with {able} spatial dimensions, and task '{task.name}' has "
                f"{task.num_spatial_dims}",
                hint="choose another model.type",
            )
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(key_of(seed, "init"))
        network = build(config, tasks, context_frames)
    if not isinstance(network, Network):
        raise PluginError(
            f"model '{config.type}' of {MODELS.origin(config.type)} built a {type(network).__name__}, not a Network",
            hint="derive it from ups.models.network.Network",
        )
    return Stepper(config, network, tasks, statistics, context_frames)
