"""A small bundle with untrained weights: three kinds of task, two given frames or one, with members or without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from ups.config.model import LatentOperatorConfig, ModelConfig, MultiscaleConfig
from ups.inference.bundle import BundleInfo, write_bundle
from ups.models.build import build_model
from ups.spec.statistics import Statistics
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

ADVECTION = TaskSpec(
    "advection", (FieldSpec("u"),), (AxisSpec("x"),), (ParameterSpec("beta", minimum=0.1, maximum=4.0),), dt=0.05
)
FLOW = TaskSpec(
    "flow",
    (FieldSpec("velocity", unit="m/s", tensor_rank=1), FieldSpec("density"), FieldSpec("force", "static")),
    (AxisSpec("x"), AxisSpec("y", "wall")),
    (ParameterSpec("nu", minimum=0.01, maximum=0.1, scale="log"), ParameterSpec("rho", minimum=1.0, maximum=2.0)),
    dt=0.1,
)
DARCY = TaskSpec(
    "darcy",
    (FieldSpec("a", "static"), FieldSpec("u", "target")),
    (AxisSpec("x", "dirichlet"), AxisSpec("y", "dirichlet")),
    steady=True,
)


def statistics_of(task: TaskSpec) -> Statistics:
    def pair(count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return (0.1,) * count, (1.5,) * count

    state, static, target = (pair(task.num_channels(r)) for r in ("state", "static", "target"))
    parameters = pair(len(task.parameters))
    return Statistics(*state, *state, *static, *target, *parameters, data_identity="none", num_frames=1)


def grid(task: TaskSpec) -> tuple[np.ndarray, ...]:
    return tuple((np.arange(16) + (0 if a.periodic else 0.5)) / 16 for a in task.axes)


def make_bundle(
    directory: Path,
    context_frames: int = 1,
    tasks: tuple[TaskSpec, ...] = (ADVECTION, FLOW, DARCY),
    ensemble: bool = False,
    corrector: bool = False,
    config: ModelConfig | None = None,
) -> Path:
    if config is None and ensemble:
        config = MultiscaleConfig(widths=[8, 8], blocks=[1, 1], num_heads=2, noise_size=4)
    config = config or LatentOperatorConfig(width=16, depth=1, num_heads=2)
    statistics = {t.name: statistics_of(t) for t in tasks}
    configs = {"operator": config} | ({"flow": config} if corrector else {})
    stepper = build_model(configs, tasks, statistics, context_frames, seed=1)
    # As if it had been trained: weights that start at zero would hide parts, and that members differ.
    if not isinstance(config, LatentOperatorConfig) or corrector:
        for parameter in stepper.parameters():
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    coordinates = {t.name: grid(t) for t in tasks}
    info = BundleInfo(stepper.configs, context_frames, tasks, statistics, coordinates)
    return write_bundle(directory, stepper, info, config_text="run:\n  name: small\n", card="# small\n")
