"""Files as users bring them to `ups init` and `ups data import`: read as they are meant, or refused with what to do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import xarray
import zarr

import ups
from ups.cli.main import run

X, T = np.arange(24) * 0.1, np.arange(11) * 0.05
RNG = np.random.default_rng(0)
SPEED, PHASE = RNG.uniform(0.5, 2, (30, 1, 1)), RNG.uniform(0, 6, (30, 1, 1))
PLACE = 2 * np.pi / 2.4 * (X - SPEED * T[:, None])
WAVES = np.sin(PLACE + PHASE) + 0.5 * np.sin(2 * PLACE + 2 * PHASE)  # (30, 11, 24)

pytestmark = pytest.mark.timeout(600)  # each HDF5 file is looked at by a process of its own


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _init(path: str, *options: str) -> int:
    return run(["init", "mine", "--data", path, *options])


def one_large_value() -> str:
    np.savez("large.npz", u=np.where(np.arange(24) == 7, 1e200, WAVES), x=X, t=T)
    return "large.npz"


def one_large_parameter() -> str:
    np.savez("large.npz", u=WAVES, x=X, t=T, nu=np.where(np.arange(30) == 7, 1e200, SPEED.ravel()))
    return "large.npz"


def _packed(values: Any, scale: float, offset: float = 0.0) -> str:
    attributes = {"scale_factor": scale, "add_offset": offset}
    dataset = xarray.Dataset({"u": (("n", "time", "x"), values, attributes)}, {"x": X, "time": T})
    dataset.to_netcdf("packed.nc", engine="h5netcdf")
    return "packed.nc"


def scale_of_zero() -> str:
    return _packed((WAVES * 100).astype("i2"), 0.0, 1.0)


def scale_that_is_infinite() -> str:
    return _packed((WAVES * 100).astype("i2"), np.inf)


def scale_that_is_large() -> str:
    return _packed((WAVES * 100).astype("i2"), 1e300)


def scale_of_single_precision() -> str:
    return _packed((WAVES * 1e30).astype("f4"), 1e10)


def _zarr(change: Callable[[dict[str, Any]], None], **options: Any) -> str:
    group = zarr.open_group("waves.zarr", mode="w", zarr_format=2)
    group.create_array("u", shape=WAVES.shape, dtype="f8", chunks=(5, 11, 24), fill_value=np.nan, **options)[:] = WAVES
    file = Path("waves.zarr/u/.zarray")
    metadata = json.loads(file.read_text())
    change(metadata)
    file.write_text(json.dumps(metadata))
    return "waves.zarr"


def _filtered(scale: float) -> str:
    packing = numcodecs.FixedScaleOffset(offset=0, scale=100, dtype="f8", astype="i2")
    return _zarr(lambda metadata: metadata["filters"][0].update(scale=scale), filters=[packing])


def filter_with_scale_of_zero() -> str:
    return _filtered(0)


def filter_with_tiny_scale() -> str:
    return _filtered(1e-308)


def other_separator() -> str:
    return _zarr(lambda metadata: metadata.update(dimension_separator="/"))


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (one_large_value, "trajectory 0 (train trajectory 0) has finite values that float32 cannot hold"),
        (one_large_parameter, "parameter 'nu' has the value 1e+200, which float32 cannot hold"),
        (scale_of_zero, "array 'u' has scale_factor 0 and add_offset 1"),
        (scale_that_is_infinite, "array 'u' has scale_factor inf"),
        (scale_that_is_large, "has finite values that float32 cannot hold"),
        (scale_of_single_precision, "has finite values that float32 cannot hold"),
        (filter_with_scale_of_zero, "the filters of array 'u' compute values that are not finite"),
        (filter_with_tiny_scale, "the filters of array 'u' compute values that are not finite"),
        (other_separator, "no chunk is stored: chunks must be named 0/0/0, and are 0.0.0"),
    ],
)
def test_finite_values_never_become_others_in_silence(
    write: Callable[[], str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write()
    assert run(["data", "import", path, "-o", "out.zarr"]) == 4
    assert words in capsys.readouterr().err
    assert not Path("out.zarr").exists()


def test_one_infinite_value_changes_no_guess_and_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    values = WAVES.copy()
    values[4, 3, 2] = np.inf
    np.save("waves.npy", values)
    assert run(["data", "import", "waves.npy", "-o", "out.zarr"]) == 0
    assert "1 of 7920 values are not finite" in capsys.readouterr().out
    data = ups.open_data("out.zarr")
    assert data.card["splits"] == {"train": 21, "valid": 3, "test": 6}
    assert [axis["boundary"] for axis in data.card["axes"]] == ["periodic"]


def test_chunks_of_other_names_are_no_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(_zarr(lambda metadata: None))
    (path / "u" / "2.0.0").rename(path / "u" / "2.0.0.part")
    assert run(["data", "import", str(path), "-o", "out.zarr"]) == 0
    assert "1 of 6 chunks of 'u', which are not stored" in capsys.readouterr().out


S = np.arange(64) / 64


def pulse_that_sways_about_the_seam(t: Any, c: Any) -> Any:
    return np.exp(8 * (np.cos(2 * np.pi * (S - 0.05 * c - 0.02 * np.sin(9 * t))) - 1))


def layers_at_the_seam(t: Any, c: Any) -> Any:
    return np.tanh(6 * np.sin(2 * np.pi * (S - 0.01 * c * np.cos(8 * t)))) + 0.1 * c * np.sin(2 * np.pi * (S - t))


def narrow_pulse_that_crosses_the_seam(t: Any, c: Any) -> Any:
    return np.exp(20 * (np.cos(2 * np.pi * (S - 0.02 * c - 0.03 * t)) - 1))


def pulse_that_leaves(t: Any, c: Any) -> Any:
    return np.exp(-(((S - 0.6 - 0.2 * c - 0.8 * t) / 0.08) ** 2))


def slope(t: Any, c: Any) -> Any:
    return np.sin(3 * (S - t) + 6 * c) + c * S


@pytest.mark.parametrize(
    ("field", "boundary", "most"),
    [
        (pulse_that_sways_about_the_seam, "periodic", 1.4),
        (layers_at_the_seam, "periodic", 1.4),
        (narrow_pulse_that_crosses_the_seam, "periodic", 1.4),
        (pulse_that_leaves, "unknown", 100.0),
        (slope, "unknown", 1e5),
    ],
)
def test_the_seam_is_compared_with_the_largest_step_inside(
    field: Callable[[Any, Any], Any], boundary: str, most: float, capsys: pytest.CaptureFixture[str]
) -> None:
    t, c = 0.05 * np.arange(12)[:, None], RNG.uniform(-1, 1, (12, 1, 1))
    np.savez("waves.npz", u=field(t, c), x=S, t=t.ravel())
    assert _init("waves.npz", "--dims", "trajectory,time,x", "--json") == 0
    (why,) = [g["why"] for g in json.loads(capsys.readouterr().out)["guesses"] if g["field"] == "axis x boundary"]
    assert ups.load_recipe("mine/recipe.yaml").data.tasks[0].description.axes[0].boundary == boundary  # type: ignore
    found = re.search(
        r"first is ([\d.e+]+) times the largest inside \(.*differences, RMS ([\d.e-]+) and ([\d.e-]+)\)", why
    )
    assert found, why
    factor, over, inside = map(float, found.groups())
    assert factor == pytest.approx(over / inside, rel=0.1)
    assert factor <= most
