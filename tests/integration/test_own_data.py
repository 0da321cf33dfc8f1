"""From a file of one's own to a film: `ups init`, one edited line, `ups train`, `ups rollout`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import xarray

from tests.integration.environments import ROOT
from tests.support.command_line import ups_here

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]


def two_fields_in_netcdf(path: Path) -> None:
    """Height and velocity of standing waves between walls, 96 x 80 points, as xarray writes them."""
    rng = np.random.default_rng(0)
    x, y, t = (np.arange(96) + 0.5) / 96 * 2, (np.arange(80) + 0.5) / 80, np.arange(6) * 0.05
    height, speed = np.zeros((2, 10, 6, 80, 96))
    for m, n in ((1, 1), (2, 1), (3, 2), (1, 4)):
        phase = rng.uniform(0, 6, (10, 1, 1, 1))
        wave = np.cos(3 * np.hypot(m / 2, n) * t[None, :, None, None] + phase) * rng.normal(size=(10, 1, 1, 1))
        across = np.cos(np.pi * n * y)[:, None]
        height += wave * across * np.cos(np.pi * m * x / 2)
        speed += wave * np.sin(np.pi * n * y)[:, None] * np.sin(np.pi * m * x / 2)
    dims = ("member", "time", "y", "x")
    dataset = xarray.Dataset(
        {"height": (dims, height, {"units": "m"}), "speed": (dims, speed, {"units": "m/s"})},
        {"x": ("x", x, {"units": "km"}), "y": ("y", y, {"units": "km"}), "time": ("time", t, {"units": "h"})},
        {"gravity": 9.81},
    )
    dataset.astype("float32").to_netcdf(path, engine="h5netcdf")


def array_of_numpy(path: Path) -> None:
    """(N, T, X), and nothing else."""
    np.save(path, _waves(12, 12, 64))


def hundred_points_in_hdf5(path: Path) -> None:
    """A dataset for each thing, a number for each trajectory, 100 points."""
    with h5py.File(path, "w") as file:
        file["velocity"] = _waves(12, 12, 100)
        file["x"] = np.arange(100) * 0.02
        file["t"] = np.arange(12) * 0.1
        file["viscosity"] = np.linspace(0.1, 0.2, 12)


@pytest.mark.parametrize(
    ("name", "write", "said"),
    [
        ("waves.nc", two_fields_in_netcdf, ("wall", "gravity", "0.05", "m/s")),
        pytest.param(
            *("array.npy", array_of_numpy, ("periodic", "check: the file has no times")), marks=pytest.mark.long
        ),
        pytest.param(*("flow.h5", hundred_points_in_hdf5, ("periodic", "viscosity", "0.1")), marks=pytest.mark.long),
    ],
)
def test_three_commands_and_one_line_make_a_film(
    tmp_path: Path, name: str, write: object, said: tuple[str, ...]
) -> None:
    pytest.importorskip("imageio")
    write(tmp_path / name)  # type: ignore[operator]
    shown = ups(tmp_path, "init", "mine", "--data", name)
    for words in said:
        assert words in shown
    # The one line: minutes of training are not spent in a test.
    recipe = tmp_path / "mine" / "recipe.yaml"
    (line,) = [one for one in recipe.read_text().splitlines() if one.startswith("    steps: ")]
    recipe.write_text(recipe.read_text().replace(line, "    steps: 2"))
    assert "VERDICT state=completed" in ups(tmp_path, "train", "mine")
    shown = ups(tmp_path, "rollout", "mine", "--film", "film.mp4")
    assert "from test trajectory 0" in shown
    assert "relative to the RMS of the trajectory" in shown, "there is a truth to compare with"
    assert (tmp_path / "film.mp4").stat().st_size > 3_000


def test_a_file_for_each_simulation(tmp_path: Path) -> None:
    """Of unequal lengths; what is rolled out is one of the files that were held out."""
    for number, frames in enumerate([9, 12, 10, 12, 11, 12, 9, 10, 12, 12]):
        np.save(tmp_path / f"run_{number}.npy", _waves(1, frames, 32)[0] * (1 + number))
    ups(tmp_path, "init", "mine", "--data", "run_*.npy")
    recipe = tmp_path / "mine" / "recipe.yaml"
    recipe.write_text(re.sub(r"^    steps: .*", "    steps: 2", recipe.read_text(), flags=re.M))
    ups(tmp_path, "train", "mine")
    shown = ups(tmp_path, "rollout", "mine", "-o", "out.nc")
    assert "11 steps from test trajectory 0" in shown
    assert "relative to the RMS of the trajectory" in shown


def test_the_page_can_be_followed(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "own-data.md").read_text()
    for kind, block in re.findall(r"^```(python|bash)\n(.*?)^```", page, re.M | re.S):
        if kind == "python":
            subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True, timeout=600)
            continue
        for line in block.splitlines():
            words = line.split()
            assert words[0] == "ups"
            if words[1] == "train":
                recipe = tmp_path / words[2]
                recipe.write_text(re.sub(r"^    steps: .*", "    steps: 2", recipe.read_text(), flags=re.M))
            ups(tmp_path, *words[1:])
    assert (tmp_path / "waves.mp4").exists()


@pytest.mark.long
def test_one_command_holds_a_model_against_baselines_with_the_same_cpu_time(tmp_path: Path) -> None:
    """docs/bench-own-data.md, small; the second call trains nothing."""
    pytest.importorskip("neuralop")
    np.savez(tmp_path / "waves.npz", u=_waves(30, 12, 32), x=np.arange(32) / 32, t=np.arange(12) / 12)
    ups(tmp_path, "init", "waves", "--data", "waves.npz")
    words = ["bench", "waves/recipe.yaml", "--set", "model.widths=[8, 16]", "--set", "model.blocks=[1, 1]"]
    words += ["--set", "model.num_heads=1", "--set", "stages.0.steps=60"]
    shown = ups(tmp_path, *words)
    assert shown.count("VERDICT state=completed") == 3
    table = shown[shown.index("* significantly best") :]
    assert re.search(r"error +waves +fno +unet +reference", table)
    assert re.search(r"rollout +\S+ +\S+ +\S+ +\S+ +(persistence|training mean)", table)
    folder = tmp_path / "runs" / "waves-bench"
    page = (folder / "index.html").read_text()
    for words_of_page in ("<td>waves</td>", "<td>fno</td>", "<td>unet</td>", "<td>persistence</td>", "CPU seconds"):
        assert words_of_page in page
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/checkpoints/*")}
    facts = json.loads(_stdout(tmp_path, *words, "--json"))
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/checkpoints/*")} == before
    costs = facts["costs"]
    assert list(costs) == ["waves", "fno", "unet"]
    assert all(cost["steps"] > 3 for cost in costs.values()), costs
    for name in ("fno", "unet"):
        assert costs[name]["CPU seconds"] == pytest.approx(costs["waves"]["CPU seconds"], rel=0.25), costs
    assert facts["tasks"][0]["references"].keys() >= {"persistence", "training mean"}


def _stdout(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "ups", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=600
    ).stdout


def ups(folder: Path, *arguments: str) -> str:
    """What a command says. Trainings are processes anyway; nothing else needs one."""
    done = started(folder, *arguments) if arguments[0] in ("train", "bench") else ups_here(folder, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ups", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def _waves(count: int, frames: int, points: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    x, t = np.arange(points) / points, np.arange(frames) / 12
    phase, speed = rng.uniform(0, 1, (2, count, 1, 1))
    position = x + phase + speed * t[None, :, None]
    return np.asarray(np.sin(2 * np.pi * position) + 0.3 * np.cos(6 * np.pi * (position + phase)), np.float32)
