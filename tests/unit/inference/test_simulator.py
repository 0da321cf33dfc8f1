"""What a user does with a bundle."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray

from tests.support.small_bundle import ADVECTION, grid, make_bundle
from ups import Simulator
from ups.errors import BundleError

RNG = np.random.default_rng(0)
U = RNG.normal(size=(1, 16))
FLOW = {"velocity": RNG.normal(size=(2, 16, 16)), "density": RNG.normal(size=(16, 16))}
FORCE = RNG.normal(size=(1, 16, 16))
NUMBERS = {"nu": 0.05, "rho": 1.5}


@pytest.fixture(scope="module")
def simulator(tmp_path_factory) -> Simulator:
    return Simulator.load(make_bundle(tmp_path_factory.mktemp("bundles") / "small"), device="cpu")


def test_a_rollout_has_names_units_time_and_coordinates(simulator):
    result = simulator.rollout(FLOW, 6, NUMBERS, task="flow", static=FORCE, every=2)
    assert result["velocity"].dims == ("time", "component", "x", "y")
    assert result["velocity"].attrs["units"] == "m/s"
    assert result["density"].shape == (3, 16, 16)
    np.testing.assert_allclose(result["time"], [0.2, 0.4, 0.6])
    np.testing.assert_allclose(result["y"], (np.arange(16) + 0.5) / 16)
    assert not result.attrs["warnings"]
    assert float(result["nu"]) == pytest.approx(0.05)


def test_a_rollout_is_its_steps_one_by_one(simulator):
    whole = simulator.rollout(U, 3, {"beta": 1.0}, task="advection")
    state = U
    for step in range(3):
        state = simulator.step(state, {"beta": 1.0}, task="advection")["u"].values
        np.testing.assert_array_equal(state[0], whole["u"].values[step])


def test_numpy_torch_dict_and_xarray_mean_the_same(simulator):
    dataset = xarray.Dataset({"u": (("x",), U[0])}, coords={"x": grid(simulator.tasks["advection"])[0]})
    kinds = [U, torch.tensor(U), {"u": U[0]}, {"u": torch.tensor(U[0])}, dataset, U.astype(np.float32).tolist()]
    results = [simulator.step(k, {"beta": 1.0}, task="advection")["u"].values for k in kinds]
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], atol=1e-7)


def test_a_dataset_carries_its_own_time_parameters_and_given_fields(simulator):
    dataset = xarray.Dataset(
        {
            "velocity": (("time", "y", "x", "component"), RNG.normal(size=(2, 16, 16, 2))),
            "density": (("time", "x", "y"), RNG.normal(size=(2, 16, 16))),
            "force": (("x", "y"), FORCE[0]),
            "nu": ((), 0.02),
            "rho": ((), 1.1),
        },
        coords={"time": [0.0, 3.0]},
    )
    result = simulator.step(dataset, task="flow")
    np.testing.assert_allclose(result["time"], [3.1])
    again = simulator.step(
        {
            "velocity": dataset["velocity"].isel(time=1).transpose("component", "x", "y").values,
            "density": dataset["density"].values[1],
        },
        {"nu": 0.02, "rho": 1.1},
        task="flow",
        static=FORCE,
    )
    np.testing.assert_allclose(result["density"], again["density"], atol=1e-6)


def test_a_batch_is_its_samples_one_by_one(simulator):
    states = RNG.normal(size=(3, 1, 16))
    batch = simulator.rollout(states, 2, {"beta": [0.5, 1.0, 2.0]}, task="advection")
    assert batch["u"].dims == ("sample", "time", "x")
    for i, beta in enumerate((0.5, 1.0, 2.0)):
        alone = simulator.rollout(states[i], 2, {"beta": beta}, task="advection")
        np.testing.assert_allclose(batch["u"].values[i], alone["u"].values, atol=1e-5)


def test_one_state_with_many_parameters_makes_a_batch(simulator):
    result = simulator.rollout(U, 1, {"beta": [0.5, 1.0]}, task="advection")
    assert result.sizes["sample"] == 2


def test_a_steady_task_is_solved_not_stepped(simulator):
    result = simulator.rollout(static=np.ones((1, 16, 16)), task="darcy")
    assert result["u"].dims == ("x", "y")


def test_streaming_to_a_store_gives_the_same_frames(simulator, tmp_path, monkeypatch):
    monkeypatch.setattr("ups.inference.results.CHUNK_BYTES", 16 * 4 * 3)
    for states, options in ((U, {}), (RNG.normal(size=(2, 1, 16)), {"every": 2})):
        memory = simulator.rollout(states, 10, {"beta": 1.0}, task="advection", **options)
        stored = simulator.rollout(
            states, 10, {"beta": 1.0}, task="advection", out=tmp_path / f"{states.ndim}.zarr", **options
        )
        xarray.testing.assert_equal(memory, stored.load())
        assert stored.attrs["warnings"] == memory.attrs["warnings"]
    vectors = simulator.rollout(FLOW, 4, NUMBERS, task="flow", static=FORCE, out=tmp_path / "flow.zarr")
    assert vectors["velocity"].dims == ("time", "component", "x", "y")
    steady = simulator.rollout(static=np.ones((1, 16, 16)), task="darcy", out=tmp_path / "steady.zarr")
    assert np.isfinite(steady["u"].values).all()


def test_what_not_to_believe_is_in_the_attributes(simulator):
    far = simulator.step(U, {"beta": 7.9}, task="advection").attrs["warnings"]
    assert far == "parameter beta=7.9 is outside the training range [0.1, 4] by 3.9 (1 of its width)"
    finer = simulator.step(np.ones((1, 32)), {"beta": 1.0}, task="advection")
    words = "resampled from 32 points to the training grid of 16 and back"
    assert finer.attrs["warnings"] == f"{words}: finer scales are lost, up to 0.0% of the RMS of a given field"
    np.testing.assert_allclose(finer["x"], np.arange(32) / 32)
    assert simulator.step(np.ones((1, 12)), {"beta": 1.0}, task="advection").attrs["warnings"] == words.replace(
        "32", "12"
    )


def test_results_do_not_depend_on_what_ran_before(simulator):
    first = simulator.rollout(U, 5, {"beta": 1.0}, task="advection")
    torch.manual_seed(123)
    simulator.rollout(FLOW, 2, NUMBERS, task="flow", static=FORCE)
    xarray.testing.assert_identical(first, simulator.rollout(U, 5, {"beta": 1.0}, task="advection"))


def test_two_given_frames_are_both_used(tmp_path):
    simulator = Simulator.load(make_bundle(tmp_path / "two", context_frames=2))
    frames = RNG.normal(size=(2, 1, 16))
    whole = simulator.rollout(frames, 3, {"beta": 1.0}, task="advection")
    second = simulator.step(np.stack([frames[1], whole["u"].values[0][None]]), {"beta": 1.0}, task="advection")[
        "u"
    ].values
    np.testing.assert_allclose(second[0], whole["u"].values[1], atol=1e-6)


def test_a_time_step_can_be_asked_for_where_trained_ones_differ(tmp_path):
    ranged = replace(ADVECTION, dt_range=(0.02, 0.1))
    simulator = Simulator.load(make_bundle(tmp_path / "ranged", tasks=(ranged,)), device="cpu")
    u = np.sin(2 * np.pi * np.arange(16) / 16)
    result = simulator.rollout({"u": u}, 3, {"beta": 1.0}, dt=0.1)
    np.testing.assert_allclose(result["time"], [0.1, 0.2, 0.3])
    np.testing.assert_allclose(simulator.rollout({"u": u}, 2, {"beta": 1.0})["time"], [0.05, 0.1])
    with pytest.raises(BundleError, match=r"time steps from 0.02 to 0.1, not 0.2"):
        simulator.rollout({"u": u}, 1, {"beta": 1.0}, dt=0.2)
    fixed = Simulator.load(make_bundle(tmp_path / "fixed"), device="cpu")
    with pytest.raises(BundleError, match=r"a time step of 0.05, not 0.1"):
        fixed.rollout({"u": u}, 1, {"beta": 1.0}, task="advection", dt=0.1)


def test_a_grid_that_patches_do_not_divide_is_rolled_out_on_its_own_points(simulator):
    u = np.sin(2 * np.pi * np.arange(15) / 15)
    result = simulator.rollout({"u": u}, 2, {"beta": 1.0}, task="advection")
    assert result["u"].shape == (2, 15)
    assert np.isfinite(result["u"]).all()
    gradient = torch.zeros(1, 1, 15, requires_grad=True)
    simulator.module(gradient, {"beta": 1.0}, task="advection").sum().backward()
    assert gradient.grad.isfinite().all()


def test_loading_a_simulator_imports_nothing_of_several_ranks():
    """Sharded tensors take as long to import as the rest of torch; who only simulates has none."""
    code = "import sys, ups; ups.Simulator; print([m for m in sys.modules if m.startswith('torch.distributed.')])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert not any(name in shown for name in ("torch.distributed.tensor", "torch.distributed.fsdp", "checkpoint"))
