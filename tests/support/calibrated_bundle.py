"""A small bundle with statements about its errors: three tasks, untrained weights, drawn trajectories."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.small_bundle import ADVECTION, DARCY, FLOW, grid, make_bundle
from ups.config.model import MultiscaleConfig
from ups.config.recipe import resolve_data
from ups.data.pack import pack
from ups.formats.base import Array, Reader, Source
from ups.formats.set_aside import SetAside
from ups.inference.bundle import load_bundle, write_bundle, write_card
from ups.run.calibrate import calibrate, choose
from ups.spec.task import Role, TaskSpec

TASKS = (ADVECTION, FLOW, DARCY)
STEPS = 5


class Drawn(Reader):
    """Smooth random trajectories of a task, of different sizes: 40 train, 12 valid, 1 test."""

    def __init__(self, task: TaskSpec, frames: int = STEPS + 1) -> None:
        super().__init__(Source(task, grid(task), 0 if task.steady else frames, {"train": 40, "valid": 12, "test": 1}))

    def where(self, split: str, trajectory: int) -> str:
        return f"{split} {trajectory}"

    def close(self) -> None:
        pass

    def _draw(self, split: str, trajectory: int, role: Role, frames: int) -> Array:
        draw = np.random.default_rng([len(split), trajectory, len(role)])
        shape = (frames, self.task.num_channels(role), *self.space)
        return draw.uniform(0.5, 1.5) * np.cumsum(draw.normal(size=shape), axis=-1) / 4

    def _frames(self, split: str, trajectory: int, start: int, stop: int, step: int) -> Array:
        return self._draw(split, trajectory, "state", STEPS + 1)[start:stop:step]

    def _given(self, split: str, trajectory: int, role: Role) -> Array:
        return self._draw(split, trajectory, role, 1)[0]

    def _parameters(self, split: str, trajectory: int) -> Array:
        draw = np.random.default_rng([len(split), trajectory])
        return np.array([draw.uniform(p.minimum, p.maximum) for p in self.task.parameters])

    def _source_identity(self) -> str:
        return self.task.name


def largest(fields: Any, points: Any) -> Any:
    return fields["u"].max(axis=1)


def calibrated_bundle(path: Path, more: tuple[TaskSpec, ...] = ()) -> Path:
    """more: tasks of the bundle without statements."""
    config = MultiscaleConfig(widths=[16, 16], blocks=[1, 1], num_heads=2, own_kernels=True)
    make_bundle(path, tasks=(*TASKS, *more), config=config)
    bundle = load_bundle(path)
    readers = [SetAside(Drawn(task), 0.5) for task in TASKS]
    tasks = [SimpleNamespace(name=task.name) for task in TASKS]
    trained: Any = SimpleNamespace(
        readers=readers, stepper=bundle.stepper, recipe=SimpleNamespace(data=SimpleNamespace(tasks=tasks))
    )
    chosen = choose(trained, {})
    assert {split for _, split in chosen.values()} == {"calibration"}
    found = calibrate(trained, {"advection": chosen.pop("advection")}, {"largest": largest})
    found |= calibrate(trained, chosen)
    text, card = (path / "config.yaml").read_text(), (path / "card.md").read_text()
    return write_bundle(path, bundle.stepper, bundle.info, config_text=text, card=card, stated=found)


def make_shipped(folder: Path) -> Path:
    """FOLDER/bundle and FOLDER/states/TASK.zarr, as `benchmarks/model/ship.py` writes them; returns the bundle."""
    for task in TASKS:
        pack(Drawn(task), folder / "states" / f"{task.name}.zarr")
    bundle = load_bundle(calibrated_bundle(folder / "bundle"))
    recipe = {
        "version": 1,
        "run": {"name": folder.name},
        "data": {
            "tasks": [{"name": t.name, "path": f"data/{t.name}.zarr", "calibration_fraction": 0.5} for t in TASKS]
        },
        "model": bundle.info.model.model_dump(mode="json"),
        "stages": [{"type": "operator", "steps": 1}],
    }
    card = write_card(folder.name, bundle.info, bundle.calibrations)
    text = resolve_data(recipe).text
    return write_bundle(
        bundle.path, bundle.stepper, bundle.info, config_text=text, card=card, stated=bundle.calibrations
    )
