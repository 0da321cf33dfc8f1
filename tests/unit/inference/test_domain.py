"""A result is never labeled with a domain that the model was not trained on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xarray

from tests.support.small_bundle import ADVECTION, make_bundle
from ups import Simulator
from ups.errors import BundleError
from ups.inference.domain import fit_domain
from ups.spec.task import AxisSpec

X = np.arange(16) / 16
U = np.sin(2 * np.pi * X)
BETA = {"beta": 1.0}


@pytest.fixture(scope="module")
def simulator(tmp_path_factory) -> Simulator:
    return Simulator.load(make_bundle(tmp_path_factory.mktemp("bundles") / "small"), device="cpu")


def wave(x: np.ndarray) -> xarray.Dataset:
    return xarray.Dataset({"u": (("x",), np.resize(U, len(x)))}, coords={"x": x})


WRONG = {
    "three times as long": 3 * X,
    "from 5 to 995": np.linspace(5, 995, 16),
    "shifted": X + 4,
    "irregular": np.sort(np.random.default_rng(0).uniform(0, 1, 16)),
    "logarithmic": np.geomspace(0.01, 1, 16),
    "one point displaced": np.where(np.arange(16) == 5, X + 0.02, X),
    "the end twice": np.linspace(0, 1, 16),
    "half": X / 2,
    "another number of points on another length": np.arange(32) / 8,
}


@pytest.mark.parametrize("name", WRONG)
def test_another_domain_is_refused_with_both_and_what_to_do(simulator, name):
    with pytest.raises(BundleError, match="coordinate 'x'") as caught:
        simulator.step(wave(WRONG[name]), BETA, task="advection")
    line = caught.value.one_line()
    assert "16 points from 0 to 0.9375 (periodic, length 1)" in line
    assert caught.value.hint
    assert "\n" not in line


@pytest.mark.parametrize("name", ["three times as long", "from 5 to 995", "shifted", "half"])
def test_on_request_a_domain_is_mapped_and_the_result_says_so(simulator, name):
    result = simulator.step(wave(WRONG[name]), BETA, task="advection", rescale_domain=True)
    np.testing.assert_allclose(result["x"], WRONG[name])
    assert "mapped to the trained one" in result.attrs["warnings"]
    assert "the physics was not rescaled" in result.attrs["warnings"]
    plain = simulator.step(U[None], BETA, task="advection")
    np.testing.assert_array_equal(result["u"], plain["u"])
    assert not plain.attrs["warnings"]


@pytest.mark.parametrize("name", ["irregular", "logarithmic", "one point displaced", "the end twice"])
def test_what_no_change_of_unit_explains_is_refused_even_on_request(simulator, name):
    with pytest.raises(BundleError, match="coordinate 'x'"):
        simulator.step(wave(WRONG[name]), BETA, task="advection", rescale_domain=True)


def test_coordinates_count_wherever_they_are_given(simulator):
    inputs = (
        {"state": wave(3 * X)},
        {"state": {"u": wave(3 * X)["u"]}},
        {"state": U[None], "coordinates": {"x": 3 * X}},
        {"state": wave(X), "coordinates": {"x": 3 * X}},
    )
    for fields in inputs:
        with pytest.raises(BundleError, match="coordinate"):
            simulator.step(**fields, parameters=BETA, task="advection")
    flow = {
        "velocity": xarray.DataArray(np.ones((2, 16, 16)), dims=("component", "x", "y"), coords={"x": 3 * X}),
        "density": np.ones((16, 16)),
    }
    with pytest.raises(BundleError, match="coordinate 'x'"):  # y has none, and is no excuse for x
        simulator.step(flow, {"nu": 0.05, "rho": 1.5}, task="flow", static=np.ones((1, 16, 16)))
    with pytest.raises(BundleError, match=r"dict with one list of numbers for each of x"):
        simulator.step(U[None], BETA, task="advection", coordinates={"z": X})
    with pytest.raises(BundleError, match="8 values for 16 points"):
        simulator.step(U[None], BETA, task="advection", coordinates={"x": X[::2]})


def test_the_trained_domain_passes_as_any_program_stores_it(simulator):
    for x in (X, X.astype(np.float32), X + 1e-5, np.arange(32) / 32, (np.arange(32) + 0.5) / 32 - 1 / 32):
        result = simulator.step(wave(x), BETA, task="advection")
        assert "mapped" not in result.attrs["warnings"]
        np.testing.assert_allclose(result["x"], x)
        assert not result.attrs["notes"].startswith("no coordinates")
    assert "no coordinates were given for x" in simulator.step(U[None], BETA, task="advection").attrs["notes"]


def test_axes_that_are_stretched_differently_are_no_change_of_unit(simulator):
    y = (np.arange(16) + 0.5) / 16
    flow = {"velocity": np.ones((2, 16, 16)), "density": np.ones((16, 16))}
    call = {"parameters": {"nu": 0.05, "rho": 1.5}, "task": "flow", "static": np.ones((1, 16, 16))}
    alike = simulator.step(flow, **call, coordinates={"x": 3 * X, "y": 3 * y}, rescale_domain=True)
    np.testing.assert_allclose(alike["y"], 3 * y)
    for other in ({"x": 3 * X, "y": 2 * y}, {"x": 3 * X, "y": y}):
        with pytest.raises(BundleError, match="stretched differently"):
            simulator.step(flow, **call, coordinates=other, rescale_domain=True)
    with pytest.raises(BundleError, match="points on the boundary, and the training grid has centers of cells"):
        simulator.step(flow, **call, coordinates={"y": np.linspace(0, 1, 16)}, rescale_domain=True)


def test_along_an_axis_that_is_not_periodic_the_number_of_points_cannot_change():
    task = replace(ADVECTION, axes=(AxisSpec("x", "dirichlet"),))
    nodes = np.linspace(0, 1, 17)
    fit_domain(task, (nodes,), (17,), {"x": np.linspace(0, 1, 17)}, rescale=False)
    for axes in ({}, {"x": np.linspace(0, 1, 33)}):
        with pytest.raises(BundleError, match=r"along 'x' \(dirichlet\) cannot change: 33 points were given"):
            fit_domain(task, (nodes,), (33,), axes, rescale=True)
    with pytest.raises(BundleError, match="has centers of cells"):
        fit_domain(task, (nodes,), (17,), {"x": (np.arange(17) + 0.5) / 17}, rescale=True)


def test_an_irregular_training_grid_is_the_only_one_that_fits_it():
    task = replace(ADVECTION, axes=(AxisSpec("x", "open", extent=2.0),))
    known = np.array([0.0, 0.1, 0.4, 1.0, 2.0])
    assert fit_domain(task, (known,), (5,), {"x": known.astype(np.float32).astype(float)}, rescale=False)
    assert fit_domain(task, (known,), (5,), {"x": 10 * known}, rescale=True).rescaled
    with pytest.raises(BundleError, match="is not the training grid"):
        fit_domain(task, (known,), (5,), {"x": np.linspace(0, 2, 5)}, rescale=True)


def test_where_all_places_are_equal_a_grid_may_start_within_the_first_cell():
    even = replace(ADVECTION, symmetries=("translation",))
    half_a_cell = {"x": X + 0.5 / 16}
    assert not fit_domain(even, (X,), (16,), half_a_cell, rescale=False).rescaled
    with pytest.raises(BundleError, match="another domain"):
        fit_domain(ADVECTION, (X,), (16,), half_a_cell, rescale=False)


def test_given_frames_must_be_one_time_step_apart(tmp_path):
    simulator = Simulator.load(make_bundle(tmp_path / "two", context_frames=2), device="cpu")
    for dt, sound in ((0.05, True), (0.1, False)):
        frames = xarray.Dataset({"u": (("time", "x"), np.stack([U, U]))}, coords={"x": X, "time": [0.0, dt]})
        if sound:
            simulator.step(frames, BETA, task="advection")
        else:
            with pytest.raises(BundleError, match=r"0\.1 apart in time.*time step of 0\.05"):
                simulator.step(frames, BETA, task="advection")


@pytest.mark.parametrize("edge", [0.0, -0.5, 7.0])
def test_centers_of_cells_stay_centers_on_another_grid(edge):
    even = replace(ADVECTION, symmetries=("translation",))
    trained, finer = (edge + (np.arange(n) + 0.5) / n for n in (16, 32))
    assumed = fit_domain(even, (trained,), (32,), {}, rescale=False)
    np.testing.assert_allclose(assumed.coordinates[0], finer)
    stated = fit_domain(even, (trained,), (32,), {"x": finer}, rescale=False)
    np.testing.assert_allclose(stated.resampling.offsets, [1 / 64])
    first_stays = fit_domain(even, (trained,), (32,), {"x": finer + 1 / 64}, rescale=False)
    np.testing.assert_allclose(first_stays.resampling.offsets, [0.0], atol=1e-12)
    elsewhere = fit_domain(even, (trained,), (32,), {"x": finer + 0.3 / 32}, rescale=False)
    np.testing.assert_allclose(elsewhere.resampling.offsets, [1 / 64 - 0.3 / 32])
    mapped = fit_domain(even, (trained,), (32,), {"x": 3 * (np.arange(32) + 0.5) / 32}, rescale=True)
    np.testing.assert_allclose(mapped.resampling.offsets, [1 / 64])
