"""Fields with holes, from a file with NaN in obstacles to a bundle, a result and a picture."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import xarray

import ups
from tests.support.command_line import ups_here
from ups.errors import BundleError

SIZE = 16


def heat_around_obstacles(trajectories: int, frames: int) -> tuple[np.ndarray, np.ndarray]:
    """(N, T, X, Y) with NaN in a disc, through which and through the walls nothing flows; and the discs (N, X, Y)."""
    random = np.random.default_rng(0)
    x = (np.arange(SIZE) + 0.5) / SIZE
    center = random.uniform(0.3, 0.7, (trajectories, 2))
    holes = np.hypot(x[:, None] - center[:, :1, None], x - center[:, 1:, None]) < 0.2
    u = random.normal(size=(trajectories, SIZE, SIZE)).cumsum(1).cumsum(2) / 4 + 5
    every = []
    for _ in range(frames):
        every.append(np.where(holes, np.nan, u))
        for _ in range(5):
            rate = np.zeros_like(u)
            for axis in (1, 2):
                inside = np.swapaxes(holes, 1, axis)
                flux = np.diff(np.swapaxes(u, 1, axis), axis=1) * ~(inside[:, 1:] | inside[:, :-1])
                into = np.zeros_like(u)
                into[:, :-1] += flux
                into[:, 1:] -= flux
                rate += np.swapaxes(into, 1, axis)
            u = u + 0.2 * rate
    return np.stack(every, 1).astype(np.float32), holes


def test_a_file_with_obstacles_becomes_a_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    u, holes = heat_around_obstacles(16, 6)
    np.savez(tmp_path / "heat.npz", u=u, t=np.arange(6) * 0.1)
    shown = ups_here(tmp_path, "init", "mine", "--data", "heat.npz")
    assert shown.returncode == 0, shown.stderr
    assert "mask: mask" in (tmp_path / "mine" / "task.yaml").read_text()
    recipe = tmp_path / "mine" / "recipe.yaml"
    recipe.write_text(re.sub(r"^    steps: .*", "    steps: 30", recipe.read_text(), flags=re.M))
    run = ups.fit(recipe, progress=False)
    simulator = ups.Simulator.load(run.path / "bundle", device="cpu")
    (task,) = simulator.tasks.values()
    assert task.mask == "mask"
    statistics = simulator._bundle.info.statistics[task.name]
    assert statistics.static_std == (0.0,)
    assert statistics.state_mean[0] > 4  # zeros in holes are not counted
    state = xarray.Dataset({"u": (("x", "y"), u[-1, 0])})
    result = simulator.rollout(state, 3)
    assert (np.isnan(result["u"].values) == holes[-1]).all()
    given = simulator.rollout(np.nan_to_num(u[-1, :1], nan=7.0), 3, static=holes[-1:].astype(float))
    np.testing.assert_array_equal(given["u"].values, result["u"].values)
    assert int(result["warnings"]) & 8 == 0
    rolled = ups_here(tmp_path, "rollout", "mine", "--picture", "p.png", "-o", "out.nc", "--json")
    assert rolled.returncode == 0, rolled.stderr
    errors = json.loads(rolled.stdout)["errors"]
    assert all(np.isfinite(value) for value in errors.values())
    assert {"model", "persistence"} <= {*errors}
    hole, corner = np.argwhere(holes[-1])[20] / SIZE, [0.02, 0.9]
    found = simulator.query(result, [hole, corner])["u"]
    assert np.isnan(found[:, 0]).all()
    assert np.isfinite(found[:, 1]).all()
    torn = np.where(holes[-1], np.nan, u[-1, :1])
    torn[0, 0, 0] = np.inf
    with pytest.raises(BundleError, match="not finite at 1 points"):
        simulator.rollout(torn, 1)
    with pytest.raises(BundleError, match="no point with a value"):
        simulator.rollout(np.full((1, SIZE, SIZE), np.nan), 1)
