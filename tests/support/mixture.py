"""Three small real tasks with different channels and dimensions: a 1D wave with a parameter, a 2D flow, a steady map.

Written with the own store and read through the real loader, so that tests of the engine also see its data path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ups.formats.store_writer import StoreWriter
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

WAVE = TaskSpec(
    "wave1d",
    (FieldSpec("u"),),
    (AxisSpec("x"),),
    parameters=(ParameterSpec("speed", minimum=0.5, maximum=2.0),),
    dt=0.05,
    symmetries=("translation",),
)
FLOW = TaskSpec("flow2d", (FieldSpec("p"), FieldSpec("q")), (AxisSpec("x"), AxisSpec("y", boundary="wall")), dt=0.1)
DARCY = TaskSpec(
    "darcy2d",
    (FieldSpec("a", role="static"), FieldSpec("u", role="target")),
    (AxisSpec("x", boundary="dirichlet"), AxisSpec("y", boundary="dirichlet")),
    steady=True,
)
# Small networks that learn all three together.
MODELS: dict[str, dict[str, Any]] = {
    "latent_operator": {"type": "latent_operator", "width": 16, "depth": 2, "num_heads": 2, "patch_size": 2},
    "deep_encoder": {
        "type": "latent_operator",
        "width": 16,
        "depth": 2,
        "num_heads": 2,
        "patch_size": 2,
        "encoder_blocks": 2,
        "latent_channels": 3,
    },
    "multiscale": {
        "type": "multiscale",
        "widths": [8, 8],
        "blocks": [1, 1],
        "kernel_size": 3,
        "own_kernels": True,
        "num_heads": 2,
    },
}
COUNTS = {"train": 6, "valid": 3, "test": 2}
FRAMES = 7


def write_mixture(folder: Path, seed: int = 7) -> list[dict[str, Any]]:
    """Write the three stores; returns the `data.tasks` of a recipe."""
    draw = np.random.default_rng(seed)
    x, y = np.arange(16) / 16, np.arange(8) / 8
    times = np.arange(FRAMES)
    with StoreWriter(folder / "wave1d.zarr", WAVE, [x], FRAMES) as writer:
        for split, count in COUNTS.items():
            for _ in range(count):
                speed, phase = draw.uniform(0.5, 2.0), draw.uniform()
                along = x[None] - speed * WAVE.dt * times[:, None] + phase
                state = np.sin(2 * np.pi * along) + 0.3 * np.sin(4 * np.pi * along)
                writer.append(split, state=state[:, None], parameters=[speed])
    with StoreWriter(folder / "flow2d.zarr", FLOW, [y, y], FRAMES) as writer:
        for split, count in COUNTS.items():
            for _ in range(count):
                waves = draw.normal(size=(2, 2, 2))
                phases = 2 * np.pi * (y[None, :, None] + y[None, None, :] - 0.1 * times[:, None, None])
                state = np.stack([w[0, 0] * np.sin(phases + w[1, 0]) + w[0, 1] for w in waves], axis=1)
                writer.append(split, state=state)
    with StoreWriter(folder / "darcy2d.zarr", DARCY, [y, y], 0) as writer:
        for split, count in COUNTS.items():
            for _ in range(count):
                medium = np.exp(draw.normal(size=(1, 8, 8)))
                writer.append(split, static=medium, target=1.0 / (1.0 + medium))
    return [{"name": task.name, "path": str(folder / f"{task.name}.zarr")} for task in (WAVE, FLOW, DARCY)]


def mixture_recipe(folder: Path, tasks: list[dict[str, Any]], **sections: Any) -> dict[str, Any]:
    """A complete recipe over the mixture, as plain data; `sections` replace or add top-level sections."""
    return {
        "version": 1,
        "run": {"name": "mixture", "dir": str(folder), "seed": 3},
        "data": {"tasks": tasks, "batch_size": 4},
        "model": MODELS["latent_operator"],
        "stages": [{"type": "operator", "steps": 8, "optim": {"learning_rate": 2e-3}}],
        "engine": {"device": "cpu", "threads": 1},
        "checkpoint": {"interval_steps": 3},
        "tracking": {"log_interval_steps": 2},
        "evaluate": {"max_trajectories": 4},
        "supervise": {"max_restarts": 0},
    } | sections
