"""Two small tasks and a recipe for the doctor: a wave on a ring (so that rolls are at work) and a steady one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from ups.formats.store_writer import StoreWriter
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

WAVE = TaskSpec(
    "wave",
    (FieldSpec("u"),),
    (AxisSpec("x"),),
    parameters=(ParameterSpec("speed", minimum=0.5, maximum=2.0),),
    dt=0.1,
    symmetries=("translation",),
)
STEADY = TaskSpec(
    "still", (FieldSpec("a", role="static"), FieldSpec("u", role="target")), (AxisSpec("x"), AxisSpec("y")), steady=True
)
POINTS, FRAMES = 32, 6
COUNTS = (("train", 9), ("valid", 5), ("test", 2))


def write_data(folder: Path) -> None:
    """wave.zarr (5 trajectories to score: not a multiple of 2 ranks) and still.zarr."""
    x = np.arange(POINTS) / POINTS
    draw = np.random.default_rng(3)
    with StoreWriter(folder / "wave.zarr", WAVE, [x], FRAMES) as writer:
        for split, count in COUNTS:
            for _ in range(count):
                speed, phase = draw.uniform(0.5, 2.0), draw.uniform(0, 6)
                times = np.arange(FRAMES)[:, None] * WAVE.dt
                state = np.sin(2 * np.pi * (x - speed * times) + phase) + 0.3 * np.cos(4 * np.pi * x)
                writer.append(split, state=state[:, None].astype(np.float32), parameters=[speed])
    y = np.arange(8) / 8
    with StoreWriter(folder / "still.zarr", STEADY, [y, y], 0) as writer:
        for split, count in COUNTS:
            for _ in range(count):
                field = draw.normal(size=(1, 8, 8)).astype(np.float32)
                writer.append(split, static=field, target=0.5 * field + np.roll(field, 1, axis=1))


def write_recipe(folder: Path) -> Path:
    """A recipe of both tasks with a small model; paths are absolute, so that any working directory will do."""
    tasks = [{"name": name, "path": str(folder / f"{name}.zarr")} for name in ("wave", "still")]
    recipe = {
        "run": {"name": "examined", "dir": str(folder / "run")},
        "data": {"tasks": tasks, "batch_size": 8},
        "model": {"type": "latent_operator", "width": 16, "depth": 1, "num_heads": 2},
        "stages": [{"type": "operator", "steps": 20}],
        "evaluate": {"max_trajectories": 64},
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path
