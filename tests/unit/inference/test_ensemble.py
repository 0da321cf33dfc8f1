"""A bundle that is an ensemble: members along an axis of their own, made by a seed, in memory and in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.small_bundle import make_bundle
from ups import Simulator
from ups.errors import BundleError

RNG = np.random.default_rng(0)
U = RNG.normal(size=(1, 16))
FLOW = {"velocity": RNG.normal(size=(3, 2, 16, 16)), "density": RNG.normal(size=(3, 16, 16))}
FORCE = RNG.normal(size=(1, 16, 16))
NUMBERS = {"nu": 0.05, "rho": 1.5}
BETA = {"beta": 1.0}


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Simulator:
    return Simulator.load(make_bundle(tmp_path_factory.mktemp("bundles") / "members", ensemble=True), device="cpu")


def test_members_have_an_axis_of_their_own_and_differ(simulator: Simulator) -> None:
    assert simulator.is_ensemble
    result = simulator.rollout(FLOW, 4, NUMBERS, task="flow", static=FORCE, members=5, every=2)
    assert result["velocity"].dims == ("sample", "member", "time", "component", "x", "y")
    assert result["density"].shape == (3, 5, 2, 16, 16)
    assert result["warnings"].dims == ("sample",)
    assert result["blew_up"].dims == ("sample", "member")
    assert result.attrs["ensemble"] == "5 members, seed 0"
    spread = result["density"].std("member")
    assert float(spread.isel(time=0).mean()) > 1e-4
    alone = simulator.rollout(U, 2, BETA, task="advection", members=3)
    assert alone["u"].dims == ("member", "time", "x")
    steady = simulator.rollout(static=FORCE, task="darcy", members=3)
    assert steady["u"].dims == ("member", "x", "y")


def test_a_seed_makes_the_same_members_however_many_there_are(simulator: Simulator) -> None:
    few, many, other = (
        simulator.rollout(U, 3, BETA, task="advection", members=count, seed=seed)["u"].values
        for count, seed in ((2, 4), (6, 4), (2, 5))
    )
    np.testing.assert_allclose(few, many[:2], atol=1e-6)
    assert np.abs(few - other).max() > 1e-4


def test_without_members_it_is_the_one_without_noise_whatever_the_seed(simulator: Simulator) -> None:
    first, second = (simulator.rollout(U, 3, BETA, task="advection", seed=seed) for seed in (0, 1))
    assert first["u"].dims == ("time", "x")
    np.testing.assert_array_equal(first["u"], second["u"])
    import torch

    module = simulator.module(torch.tensor(U, dtype=torch.float32)[None], BETA, steps=3, task="advection")
    np.testing.assert_allclose(module[0, :, 0].numpy(), first["u"], atol=1e-6)


@pytest.mark.parametrize("name", ["members.zarr", "members.nc"])
def test_members_stream_to_a_file(simulator: Simulator, tmp_path: Path, name: str) -> None:
    arguments = {"task": "flow", "static": FORCE, "members": 3}
    in_memory = simulator.rollout(FLOW, 3, NUMBERS, **arguments)
    read = simulator.rollout(FLOW, 3, NUMBERS, out=tmp_path / name, **arguments)
    for field in ("velocity", "density", "blew_up", "warnings", "member"):
        assert read[field].dims == in_memory[field].dims
        np.testing.assert_array_equal(read[field], in_memory[field])
    read.close()


def test_who_blows_up_is_named_by_sample_and_member(simulator: Simulator) -> None:
    from ups.inference.inputs import read_start
    from ups.inference.results import Divergence, Layout
    from ups.inference.trust import Trust

    task = simulator.tasks["advection"]
    start = read_start(task, 1, np.ones((2, 1, 16)), None, BETA, (np.arange(16) / 16,))
    divergence = Divergence(Layout(task, start, 2, 1, Trust(np.zeros(2, np.int32), (), ()), {}, members=3))
    frame = torch.zeros(6, 1, 16)
    divergence.look(frame[None], 1)
    frame[4] = torch.nan
    divergence.look(frame[None], 2)
    assert divergence.words() == "sample 1, member 1, diverged at step 2 (time 0.1)"
    assert divergence.first_step.tolist() == [0, 0, 0, 0, 2, 0]


def test_a_bundle_that_is_no_ensemble_refuses_members(tmp_path: Path, simulator: Simulator) -> None:
    single = Simulator.load(make_bundle(tmp_path / "single"), device="cpu")
    assert not single.is_ensemble
    with pytest.raises(BundleError, match="was not trained as an ensemble"):
        single.rollout(U, 2, BETA, task="advection", members=2)
    for wrong in ({"members": 0}, {"members": 2.5}, {"seed": -1}, {"seed": "x"}):
        with pytest.raises(BundleError, match="must be a whole number"):
            simulator.rollout(U, 2, BETA, task="advection", **wrong)  # type: ignore[arg-type]
