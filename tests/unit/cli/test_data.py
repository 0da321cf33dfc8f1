"""`ups data inspect / validate / pack` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from ups.cli.main import run


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    x = (np.arange(32) + 0.5) / 32
    phases = np.random.default_rng(0).uniform(0, 6, 10)
    position = x[None, None] - 0.02 * np.arange(9)[None, :, None]
    waves = np.sin(2 * np.pi * position + phases[:, None, None]).astype(np.float32)
    paths = {}
    for name in ("good", "bad"):
        paths[name] = folder / name / "1D_Advection_Sols_beta0.4.hdf5"
        paths[name].parent.mkdir()
        with h5py.File(paths[name], "w") as file:
            file["tensor"] = waves
            file["x-coordinate"] = x
            file["t-coordinate"] = np.arange(10) * 0.05
            file.attrs["beta"] = 0.4
        waves[3, 5, 2] = np.nan
    paths["darcy"] = folder / "2D_DarcyFlow_beta1.0_Train.hdf5"
    with h5py.File(paths["darcy"], "w") as file:
        file["nu"] = np.random.default_rng(1).uniform(size=(10, 8, 8)).astype(np.float32)
        file["tensor"] = np.random.default_rng(2).uniform(size=(10, 1, 8, 8)).astype(np.float32)
        file["x-coordinate"] = file["y-coordinate"] = (np.arange(8) + 0.5) / 8
    return paths


def test_inspect_prints_a_card_and_draws(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    for name in ("good", "darcy"):
        picture = tmp_path / f"{name}.png"
        assert run(["data", "inspect", str(files[name]), "--picture", str(picture)]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size > 10_000
    out = capsys.readouterr().out
    assert "advection1d" in out
    assert "steady" in out


def test_a_reader_can_be_named(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = files["good"].rename(tmp_path / files["good"].name)
    try:
        assert run(["data", "inspect", str(path), "--format", "pdebench", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["format"] == "pdebench"
        assert run(["data", "validate", str(path), "--format", "pdebench"]) == 0
        capsys.readouterr()
        assert run(["data", "inspect", str(path), "--format", "store"]) == 4
        assert run(["data", "validate", str(path), "--format", "pdebnch"]) == 3
        assert "there is no reader 'pdebnch' -> did you mean 'pdebench'?" in capsys.readouterr().err
    finally:
        path.rename(files["good"])


def test_inspect_as_json(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "inspect", str(files["good"]), "--json"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert card["splits"] == {"train": 8, "valid": 1, "test": 1}


def test_validate_names_the_place_and_leaves_with_code_4(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["data", "validate", str(files["good"])]) == 0
    assert "nothing wrong" in capsys.readouterr().out
    assert run(["data", "validate", str(files["bad"])]) == 4
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"not_finite: {files['bad']} trajectory 3 (train trajectory 3) frame 5: ")
    assert run(["data", "validate", str(files["bad"]), "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["counts"] == {"not_finite": 1}
    assert run(["data", "validate", str(files["bad"]), "--allow", "not_finite"]) == 0
    assert run(["data", "validate", str(files["bad"]), "--allow", "nonsense"]) == 3


def test_pack_then_validate(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "a.zarr")
    assert run(["data", "pack", str(files["good"]), "-o", out, "--time-stride", "2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["task"], facts["splits"]["train"]) == ("advection1d", 8)
    assert run(["data", "validate", out]) == 0
    assert run(["data", "pack", str(files["good"]), "-o", out]) == 4
    assert "exists already" in capsys.readouterr().err
    assert run(["data", "pack", str(files["good"]), "-o", out, "--overwrite", "--compress"]) == 0
    assert run(["data", "inspect", str(tmp_path / "missing.zarr")]) == 4
