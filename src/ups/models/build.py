"""From a model section of a recipe to a stepper: the registered factory, and initialization as a function of a seed."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ups.config.model import ModelConfig
from ups.errors import ConfigError, PluginError
from ups.models.flow import FLOW, STUDENT, FlowNetwork, flow_settings, flow_task
from ups.models.network import Network
from ups.models.stepper import OPERATOR, STEADY, Stepper
from ups.registry import MODELS
from ups.spec.keyed import key_of
from ups.spec.statistics import Statistics
from ups.spec.task import TaskSpec


def build_model(
    config: ModelConfig | Mapping[str, ModelConfig],
    tasks: Sequence[TaskSpec],
    statistics: Mapping[str, Statistics],
    context_frames: int,
    seed: int = 0,
    device: str = "cpu",
) -> Stepper:
    """A new stepper on the CPU in float32, with the same weights on every rank for the same seed.

    config: of the network that makes the step, or of several networks by name, that one as `operator`.
    Drawn under a forked generator: building a model neither depends on the process' random state nor changes it.
    device "meta" builds it without memory, for weights that are put in place afterwards.
    """
    configs = {OPERATOR: config} if isinstance(config, ModelConfig) else config
    problem = wrong_names(configs)
    if problem:
        raise ConfigError(problem)
    of = {name: _tasks_of(name, configs, tasks) for name in configs}
    networks = {name: _build(name, one, of[name], context_frames, seed, device) for name, one in configs.items()}
    return Stepper(configs, networks, tasks, statistics, context_frames)


def _tasks_of(name: str, configs: Collection[str], tasks: Sequence[TaskSpec]) -> list[TaskSpec]:
    """The tasks that a network is built for: steady ones may have one of their own."""
    chosen = list(tasks)
    if STEADY in configs and name in (OPERATOR, STEADY):
        chosen = [task for task in tasks if task.steady == (name == STEADY)]
    if not chosen:
        raise ConfigError(
            f"network '{name}' would have no task: networks.steady is for steady tasks next to others",
            hint="leave networks.steady out: the model itself learns tasks of one kind",
        )
    return chosen


def wrong_names(names: Collection[str]) -> str:
    """'' if networks can be called like this, else what is wrong."""
    if OPERATOR not in names:
        return f"no network is called '{OPERATOR}': that one makes the step"
    taken = nn.ModuleDict()
    for name in names:
        if not re.fullmatch("[a-z][a-z0-9_]{0,31}", name) or hasattr(taken, name):
            return f"a network cannot be called {name[:40]!r}"
    return ""


class _ShapesOnly(TorchFunctionMode):
    """For initial values without memory: their arithmetic on the meta device would import torch's compiler for 2 s."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, tensors = kwargs or {}, [one for one in args if isinstance(one, torch.Tensor)]
        if function is nn.init.normal_:
            return kwargs["tensor"]
        are_shapes = {(one.is_meta, one.is_floating_point()) for one in tensors} == {(True, True)}
        if are_shapes and function.__name__ in ("add", "mul", "div"):
            shape = np.broadcast_shapes(*(one.shape for one in tensors))
            return torch.empty(shape, dtype=torch.result_type(args[0], args[-1]), device="meta")
        return (torch.empty if function is torch.randn and not kwargs else function)(*args, **kwargs)


def _build(
    name: str, config: ModelConfig, tasks: Sequence[TaskSpec], context_frames: int, seed: int, device: str
) -> Network:
    build = MODELS.factory(config.type)
    for task in tasks:
        if task.num_spatial_dims not in config.dims:
            able = ", ".join(str(dims) for dims in sorted(config.dims))
            raise ConfigError(
                f"model type '{config.type}' takes tasks with {able} spatial dimensions, and task '{task.name}' has "
                f"{task.num_spatial_dims}",
                hint="choose another model.type",
            )
    flows = name in (FLOW, STUDENT)
    with torch.random.fork_rng(devices=[]), torch.device(device), _ShapesOnly() if device == "meta" else nullcontext():
        # Each name has draws of its own: a network next to the operator does not change the operator.
        torch.manual_seed(key_of(seed, "init") if name == OPERATOR else key_of(seed, "init", name))
        if flows:
            network = build(flow_settings(config), [flow_task(task) for task in tasks], context_frames)
        else:
            network = build(config, tasks, context_frames)
    if not isinstance(network, Network):
        raise PluginError(
            f"model '{config.type}' of {MODELS.origin(config.type)} built a {type(network).__name__}, not a Network",
            hint="derive it from ups.models.network.Network",
        )
    if flows:
        with torch.device(device):
            return FlowNetwork(network, config, tasks)
    return network
