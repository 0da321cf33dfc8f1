"""A bundle with a corrector: members, and a gate, whose every intervention stands in the result, also in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray

from ups import Simulator
from ups.errors import BundleError
from ups.inference.bundle import load_bundle, read_info
from ups.testing.small_bundle import make_bundle

U = np.random.default_rng(0).normal(size=(3, 1, 16))
BETA = {"beta": 1.0}
EVERYWHERE = {"signal": "spread", "threshold": -1.0, "earned": False, "rate": 1.0, "split": "valid", "error": 0.5}


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Simulator:
    folder = tmp_path_factory.mktemp("bundles") / "corrected"
    return Simulator.load(make_bundle(folder, corrector=True, gates={"advection": EVERYWHERE}), device="cpu")


def test_members_of_a_corrector_differ(simulator: Simulator) -> None:
    assert simulator.is_ensemble
    result = simulator.rollout(U, 2, BETA, task="advection", members=4)
    assert result["u"].dims == ("sample", "member", "time", "x")
    assert float(result["u"].std("member").mean()) > 1e-3


@pytest.mark.parametrize("name", [None, "out.zarr", "out.nc"])
def test_every_intervention_is_in_the_result(simulator: Simulator, tmp_path: Path, name: str | None) -> None:
    out = None if name is None else tmp_path / name
    result = simulator.rollout(U, 4, BETA, task="advection", gate=True, every=2, out=out)
    assert isinstance(result, xarray.Dataset)
    assert result.attrs["interventions"] == "the corrector acted in 12 of 12 steps (100.0%): 12 by spread"
    assert float(result.attrs["intervention_rate"]) == 1.0
    assert result["intervention_sample"].values.tolist() == [0, 1, 2] * 4
    assert result["intervention_step"].values.tolist() == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert set(result["intervention_reason"].values.tolist()) == {4}
    assert result["intervention_reason"].attrs["flag_meanings"] == "drift residual spread"


def test_members_have_interventions_of_their_own(simulator: Simulator) -> None:
    result = simulator.rollout(U[0], 1, BETA, task="advection", gate=True, members=2)
    assert result["intervention_member"].values.tolist() == [0, 1]


def test_a_gate_that_never_opens_gives_the_operator(tmp_path: Path) -> None:
    closed = make_bundle(tmp_path / "closed", corrector=True, gates={"advection": EVERYWHERE | {"threshold": 1e30}})
    simulator = Simulator.load(closed, device="cpu")
    result = simulator.rollout(U, 2, BETA, task="advection", gate=True)
    assert "intervention_step" not in result
    assert result.attrs["intervention_rate"] == 0
    np.testing.assert_array_equal(result["u"], simulator.rollout(U, 2, BETA, task="advection")["u"])


def test_a_task_without_a_gate_says_so(simulator: Simulator) -> None:
    with pytest.raises(BundleError, match="no gate for task 'darcy'"):
        simulator.rollout(static=np.ones((1, 16, 16)), task="darcy", gate=True)


@pytest.mark.parametrize("name", ["out.zarr", "out.nc"])
def test_a_rollout_that_breaks_off_leaves_no_file(simulator: Simulator, tmp_path: Path, name: str) -> None:
    def interrupted(step: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(BundleError, match="no gate"):
        simulator.rollout(static=np.ones((1, 16, 16)), task="darcy", gate=True, out=tmp_path / name)
    with pytest.raises(KeyboardInterrupt):
        simulator.rollout(U, 4, BETA, task="advection", out=tmp_path / name, progress=interrupted)
    assert list(tmp_path.iterdir()) == []


def test_a_hostile_gate_is_refused_and_a_sound_one_comes_back(simulator: Simulator, tmp_path: Path) -> None:
    path = make_bundle(tmp_path / "sound", corrector=True, gates={"advection": EVERYWHERE})
    assert load_bundle(path).info.gates["advection"] == EVERYWHERE
    text = (path / "bundle.json").read_text()
    for old, new in (('"spread"', '"rumor"'), ("-1.0", '"much"'), ("-1.0", "Infinity")):
        (path / "bundle.json").write_text(text.replace(old, new))
        with pytest.raises(BundleError):
            read_info(path)
