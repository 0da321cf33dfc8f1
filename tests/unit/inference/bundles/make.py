"""Writes stored bundles of the current format and what they answer. Run for a new format version or a new kind:

    python tests/unit/inference/bundles/make.py

It refuses to replace what is there: a stored bundle is a promise to those who keep one, and test_stored_bundles.py
loads every one of them for ever. Weights are random but not those of a new model, which would predict no change.
Inputs and answers are stored as numbers, so that nothing depends on how another version of a library draws them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import numpy as np
import torch

from tests.support.small_bundle import ADVECTION, DARCY, FLOW, grid, statistics_of
from ups import Simulator
from ups.config.model import LatentOperatorConfig, ModelConfig, UnetConfig
from ups.inference.bundle import VERSION, BundleInfo, write_bundle
from ups.models.build import build_model
from ups.spec.task import TaskSpec

HERE = Path(__file__).resolve().parent
STEPS = 8
SAMPLES = 2
STORED: dict[str, tuple[ModelConfig | dict[str, ModelConfig], tuple[TaskSpec, ...], int]] = {
    "latent_operator": (
        LatentOperatorConfig(width=16, depth=2, num_heads=2, window_tokens=2),
        (ADVECTION, FLOW, DARCY),
        1,
    ),
    "unet_two_frames": (UnetConfig(width=4, levels=2, blocks=1), (ADVECTION,), 2),
    "two_networks": (
        {
            "operator": LatentOperatorConfig(width=8, depth=1, num_heads=1),
            "corrector": UnetConfig(width=4, levels=2, blocks=1),
        },
        (ADVECTION,),
        1,
    ),
}


def write(name: str, directory: Path) -> None:
    """directory/NAME: a bundle; directory/NAME.npz: arrays TASK.INPUT and TASK.answer.FIELD."""
    config, tasks, context_frames = STORED[name]
    statistics = {t.name: statistics_of(t) for t in tasks}
    stepper = build_model(config, tasks, statistics, context_frames, seed=1)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in stepper.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=draw)
    info = BundleInfo(stepper.configs, context_frames, tasks, statistics, {t.name: grid(t) for t in tasks})
    path = write_bundle(directory / name, stepper, info, config_text="run:\n  name: stored\n", card="# stored\n")
    simulator = Simulator.load(path, device="cpu")
    arrays: dict[str, Any] = {}
    for number, task in enumerate(tasks):
        inputs = inputs_of(task, context_frames, np.random.default_rng(number))
        answer = simulator.rollout(**inputs, steps=1 if task.steady else STEPS, task=task.name)
        arrays |= {f"{task.name}.{key}": value for key, value in inputs.items() if key != "parameters"}
        arrays |= {f"{task.name}.parameters.{key}": value for key, value in inputs["parameters"].items()}
        for field in task.fields_of(task.predicted):
            arrays[f"{task.name}.answer.{field.name}"] = answer[field.name].values
    np.savez_compressed(directory / f"{name}.npz", **arrays)


def inputs_of(task: TaskSpec, context_frames: int, draw: np.random.Generator) -> dict[str, Any]:
    """Arguments of `Simulator.rollout` for two samples."""
    space = (16,) * task.num_spatial_dims

    def noise(*shape: int) -> Any:
        return draw.normal(size=(SAMPLES, *shape, *space)).astype(np.float32)

    inputs: dict[str, Any] = {
        "parameters": {p.name: draw.uniform(p.minimum, p.maximum, SAMPLES) for p in task.parameters}
    }
    if not task.steady:
        frames = (context_frames,) if context_frames > 1 else ()
        inputs["state"] = noise(*frames, task.num_channels("state"))
    if task.fields_of("static"):
        inputs["static"] = noise(task.num_channels("static"))
    return inputs


def main() -> int:
    directory = HERE / f"v{VERSION}"
    directory.mkdir(exist_ok=True)
    for name in STORED:
        if (directory / name).exists():
            print(f"{directory / name} is there already, and stays as it is")
        else:
            write(name, directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
