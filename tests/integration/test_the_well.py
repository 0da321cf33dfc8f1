"""A data set of The Well through the command line: `ups data validate`, `ups train`, `ups eval`, `ups rollout`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support import the_well_files as files

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]

RECIPE = """
version: 1
run: { name: well, seed: 0 }
data:
  tasks:
    - { name: waves, path: set, first_frame: 1 }
  context_frames: 2
  batch_size: 8
model: { type: unet, width: 8 }
stages:
  - { type: operator, steps: 30, optim: { learning_rate: 3e-3 } }
evaluate: { max_trajectories: 4 }
"""


def _drifting(seed: int, count: int, frames: int) -> files.Content:
    """A wave that drifts over a periodic plane, with a vector and a tensor, and how fast it drifts."""
    content = files.plain("waves", count, frames, 16, 16)
    rng = np.random.default_rng(seed)
    speed = rng.uniform(0.5, 1.5, count).astype(np.float32)
    x = np.arange(16) / 16
    content.axes = {"x": x.astype(np.float32), "y": x.astype(np.float32)}
    time = content.time[None, :, None, None]
    phase = x[:, None] + 0 * x + 0.1 * speed[:, None, None, None] * time + rng.uniform(size=(count, 1, 1, 1))
    content.fields[0]["density"].values = np.sin(2 * np.pi * phase).astype(np.float32)
    slope = np.stack([np.cos(2 * np.pi * phase), 0.5 * np.sin(4 * np.pi * phase)], axis=-1)
    content.fields[1] = {"slope": files.Dataset(slope.astype(np.float32))}
    strain = np.stack([np.stack([np.cos(2 * np.pi * phase + i + j) for j in (0, 1)], -1) for i in (0, 1)], -2)
    content.fields[2] = {"strain": files.Dataset(strain.astype(np.float32))}
    content.fields[0]["bed"] = files.Dataset(files.numbers(16, 16, seed=3), sample=False, time=False)
    content.scalars = {"speed": files.Dataset(speed, time=False)}
    return content


def _ups(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ups", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_a_data_set_is_inspected_trained_on_and_scored(tmp_path: Path) -> None:
    contents = {
        "train": [_drifting(1, 4, 12), _drifting(2, 4, 9)],
        "valid": [_drifting(3, 2, 12)],
        "test": [_drifting(4, 4, 12)],
    }
    files.write_set(tmp_path / "set", contents)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    facts = json.loads(_ups(tmp_path, "data", "inspect", "set", "--json"))
    assert facts["format"] == "the_well"
    _ups(tmp_path, "data", "validate", "set")
    assert "VERDICT state=completed" in _ups(tmp_path, "train", "recipe.yaml")
    shown = _ups(tmp_path, "eval", "runs/well")
    assert "waves" in shown
    assert "reference" in shown
    assert "wrote out.vtkhdf" in _ups(tmp_path, "rollout", "runs/well", "--steps", "3", "-o", "out.vtkhdf")
    with h5py.File(tmp_path / "out.vtkhdf") as file:
        assert file["VTKHDF/PointData/strain"].shape[-1] == 9
        assert file["VTKHDF/Steps/Values"].shape[0] >= 3
    assert "8 train, 2 valid, 4 test" in _ups(tmp_path, "data", "pack", "set", "-o", "set.zarr")
