"""Results carry what scientists' tools need: CF attributes, labeled components, metadata in one request; NetCDF too."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray

from tests.support.small_bundle import ADVECTION, FLOW, grid, make_bundle
from ups.errors import BundleError
from ups.inference import results
from ups.inference.simulator import Simulator


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Simulator:
    return Simulator.load(make_bundle(tmp_path_factory.mktemp("bundle") / "b"), device="cpu")


def flow(simulator: Simulator, samples: int = 2, **options: Any) -> xarray.Dataset:
    draw = np.random.default_rng(0)
    state = draw.normal(size=(samples, 3, 16, 16)).astype(np.float32)
    static = draw.normal(size=(samples, 1, 16, 16)).astype(np.float32)
    parameters = {"nu": 0.02, "rho": 1.5}
    return simulator.rollout(state, 5, parameters, task="flow", static=static, **options)


def outputs(folder: Path) -> dict[str, Path | None]:
    return {"memory": None, "zarr": folder / "r.zarr", "netcdf": folder / "r.nc"}


@pytest.mark.parametrize("kind", ["memory", "zarr", "netcdf"])
def test_results_follow_the_cf_conventions(simulator: Simulator, tmp_path: Path, kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = flow(simulator, out=outputs(tmp_path)[kind])
    assert result.attrs["Conventions"] == "CF-1.11"
    assert dict(result["time"].attrs) == {"long_name": "time", "units": "1", "axis": "T"}
    assert result["time"].dtype == np.float64
    assert {name: result[name].attrs["axis"] for name in ("x", "y")} == {"x": "X", "y": "Y"}
    assert (result["velocity"].attrs["units"], result["velocity"].attrs["long_name"]) == ("m/s", "velocity")
    assert result["component"].values.tolist() == ["x", "y"]
    assert result["velocity"].sel(component="y").dims == ("sample", "time", "x", "y")
    assert result["blew_up"].dtype == bool
    assert result["nu"].attrs["long_name"] == "nu"


def test_the_three_ways_hold_the_same_numbers(simulator: Simulator, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        results, "CHUNK_BYTES", 2 * 4 * 2 * 3 * 16 * 16
    )  # two frames: several chunks, the last not full
    first, *others = (flow(simulator, out=out) for out in outputs(tmp_path).values())
    for other in others:
        xarray.testing.assert_identical(first, other.load())


@pytest.mark.parametrize("kind", ["memory", "zarr", "netcdf"])
def test_reversed_axes_hold_the_same_numbers_in_the_order_time_y_x(
    simulator: Simulator, tmp_path: Path, kind: str
) -> None:
    plain = flow(simulator)
    turned = flow(simulator, out=outputs(tmp_path)[kind], reversed_axes=True)
    assert turned["velocity"].dims == ("sample", "time", "component", "y", "x")
    for name in ("velocity", "nu"):
        xarray.testing.assert_equal(plain[name], turned[name].load().transpose(*plain[name].dims))


def test_a_single_sample_and_a_steady_task_as_netcdf(simulator: Simulator, tmp_path: Path) -> None:
    (x,) = grid(ADVECTION)
    wave = simulator.rollout(np.sin(x)[None], 3, {"beta": 1.0}, task="advection", out=tmp_path / "w.nc")
    assert wave["u"].dims == ("time", "x")
    solved = simulator.rollout(static=np.ones((1, 16, 16)), task="darcy", out=tmp_path / "d.nc")
    assert solved["u"].dims == ("x", "y")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.nc", "w.nc"]


def test_a_netcdf_file_is_one_that_other_programs_read(simulator: Simulator, tmp_path: Path) -> None:
    flow(simulator, out=tmp_path / "r.nc").close()
    with h5py.File(tmp_path / "r.nc") as file:
        assert file.attrs["Conventions"] in ("CF-1.11", b"CF-1.11")
        assert file["velocity"].shape == (2, 5, 2, 16, 16)
        assert [dim[0].name for dim in file["velocity"].dims] == ["/sample", "/time", "/component", "/x", "/y"]
        assert file["time"].attrs["axis"] in ("T", b"T")


def test_a_store_has_consolidated_metadata(simulator: Simulator, tmp_path: Path) -> None:
    flow(simulator, out=tmp_path / "r.zarr")
    document = json.loads((tmp_path / "r.zarr" / "zarr.json").read_text())
    assert "velocity" in document["consolidated_metadata"]["metadata"]
    assert document["consolidated_metadata"]["metadata"]["blew_up"]["attributes"] == {}
    assert document["attributes"]["blew_up"] == ""


def test_a_result_is_an_input_again(simulator: Simulator, tmp_path: Path) -> None:
    for out in (tmp_path / "r.nc", tmp_path / "r.zarr"):
        result = flow(simulator, out=out).load()
        static = np.ones((2, 1, 16, 16), np.float32)
        again = simulator.rollout(result, 1, {"nu": 0.02, "rho": 1.5}, task="flow", static=static)
        assert float(again["time"][0]) == pytest.approx(6 * FLOW.dt)


def test_a_file_that_is_there_is_not_replaced(simulator: Simulator, tmp_path: Path) -> None:
    (tmp_path / "r.nc").write_text("mine")
    with pytest.raises(BundleError, match="exists already"):
        flow(simulator, out=tmp_path / "r.nc")
    assert (tmp_path / "r.nc").read_text() == "mine"


def test_units_of_time_that_readers_take_for_durations_are_shortened(tmp_path: Path) -> None:
    from dataclasses import replace

    from ups.spec.grid import time_attributes

    units = time_attributes(replace(ADVECTION, time_unit="seconds"))
    dataset = xarray.Dataset(coords={"time": ("time", [0.5, 1.0], units)})
    dataset.to_netcdf(tmp_path / "t.nc", engine="h5netcdf")
    with xarray.open_dataset(tmp_path / "t.nc") as again:
        assert again["time"].values.tolist() == [0.5, 1.0]
