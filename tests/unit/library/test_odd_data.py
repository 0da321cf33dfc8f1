"""Data that fit nothing: an odd grid, not uniform, ends, lengths and time steps that differ. From store to rollout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ups
from ups.formats.store_writer import StoreWriter
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

TASK = TaskSpec(
    "layer",
    (FieldSpec("u"), FieldSpec("v", tensor_rank=1)),
    (AxisSpec("x", ("wall", "open")), AxisSpec("y")),
    dt=0.1,
    conserved=("u",),
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    x, y = np.linspace(0, 1, 13) ** 1.5, np.arange(10) / 10
    draw = np.random.default_rng(0)
    with StoreWriter(tmp_path / "layer.zarr", TASK, (x, y), 8) as writer:
        for split, count in (("train", 6), ("valid", 2), ("test", 3)):
            for number in range(count):
                frames, dt = 8 - number % 3, 0.1 * (1 + number % 2)
                phase = y - dt * np.arange(frames)[:, None] + draw.uniform()
                wave = np.sin(2 * np.pi * phase)[:, None] * np.cos(np.pi * x)[:, None]  # (T, X, Y)
                state = np.stack([1 + wave, wave, 2 * wave], axis=1).astype(np.float32)
                writer.append(split, state=state, frames=frames, dt=dt)
    return tmp_path / "layer.zarr"


def test_such_data_are_trained_scored_and_rolled_out(store: Path, tmp_path: Path) -> None:
    recipe = {
        "version": 1,
        "run": {"name": "odd", "dir": str(tmp_path / "odd")},
        "data": {"tasks": [{"name": "layer", "path": str(store)}], "batch_size": 4, "context_frames": 1},
        "model": {"type": "multiscale", "widths": [8, 8], "blocks": [1, 1], "num_heads": 1},
        "stages": [{"type": "operator", "steps": 3}],
    }
    with pytest.raises(ups.errors.ConfigError, match=r"set model.conserve: false|not equally spaced along x"):
        ups.fit(recipe, progress=False)
    recipe["model"] |= {"conserve": False}
    recipe["run"] |= {"dir": str(tmp_path / "again")}
    run = ups.fit(recipe, progress=False)
    assert run.state == "completed"
    scores = ups.evaluate(run)
    (result,) = scores.results
    assert result["protocol"] == {"context_frames": 1, "start_frame": 0, "num_steps": 7, "num_trajectories": 3}
    assert np.isfinite(result["predictors"]["model"]["summary"]["trmse"])
    assert [path.name for path in scores.write(tmp_path / "scores")] == ["scores.json"]
    simulator = ups.Simulator.load(run.path / "bundle", device="cpu")
    start = ups.open_data(store).trajectory("test", 1).isel(time=0)
    rolled = simulator.rollout(start, 3, dt=0.2)
    np.testing.assert_allclose(rolled["time"], [0.2, 0.4, 0.6])
    assert rolled["u"].shape == (3, 13, 10)
