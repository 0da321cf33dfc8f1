"""From a model section of a recipe to a stepper: the table of factories, and initialisation as a function of a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ups.config.model import LatentOperatorConfig, ModelConfig
from ups.models.latent_operator import LatentNetwork
from ups.models.stepper import Stepper
from ups.models.vocabulary import Vocabulary
from ups.spec.keyed import key_of
from ups.spec.statistics import Statistics
from ups.spec.task import TaskSpec


def _latent_operator(config: LatentOperatorConfig, vocabulary: Vocabulary, context_frames: int) -> LatentNetwork:
    return LatentNetwork(config, vocabulary, context_frames)


NETWORKS: dict[str, Callable[[LatentOperatorConfig, Vocabulary, int], LatentNetwork]] = {
    "latent_operator": _latent_operator,
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
    vocabulary = Vocabulary.of(tasks)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(key_of(seed, "init"))
        network = NETWORKS[config.type](config, vocabulary, context_frames)
    return Stepper(config, network, tasks, statistics, context_frames)
