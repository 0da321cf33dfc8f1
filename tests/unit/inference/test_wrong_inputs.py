"""Forty ways to hold it wrong: each gives one line that names the mistake, never a traceback from inside torch."""

from __future__ import annotations

import numpy as np
import pytest
import xarray

from tests.support.small_bundle import make_bundle
from ups import Simulator
from ups.errors import BundleError

ONES = np.ones((1, 16))
FLOW = {"velocity": np.ones((2, 16, 16)), "density": np.ones((16, 16))}
FORCE = np.ones((1, 16, 16))
NAN = np.where(np.arange(16) == 3, np.nan, 1.0)[None]


def call(state=None, steps=1, parameters=None, task="advection", **rest):
    return (state, steps, parameters), {"task": task, **rest}


def flow(state=FLOW, parameters=None, static=FORCE, **rest):
    return call(state, 1, {"nu": 0.05, "rho": 1.5} if parameters is None else parameters, "flow", static=static, **rest)


def dataset(**variables):
    return xarray.Dataset(variables)


BETA = {"beta": 1.0}
CASES = [
    (call(ONES, 1, BETA, "advektion"), "does not know task 'advektion'; did you mean 'advection'?"),
    (call(ONES, 1, BETA, None), "knows several tasks"),
    (call(ONES, 1, BETA, 3), "does not know task '3'"),
    (call(None, 1, BETA), "needs state fields u"),
    (call(np.ones(16), 1, BETA), "has shape (16,); expected (1 channels (u), x)"),
    (call(np.ones((2, 2, 1, 16)), 1, BETA), "has shape (2, 2, 1, 16)"),
    (call(np.ones((2, 16)), 1, BETA), "has shape (2, 16); expected (1 channels (u), x)"),
    (call(np.ones((0, 1, 16)), 1, BETA), "no samples were given"),
    (call(np.ones((1, 0)), 1, BETA), "the fields have no points along 'x'"),
    (call(np.ones((2, 1, 0)), 1, BETA), "the fields have no points along 'x'"),
    (call(NAN, 1, BETA), "is not finite at 1 points, the first at index (0, 3)"),
    (call(ONES * np.inf, 1, BETA), "is not finite at 16 points"),
    (call(ONES * 1j, 1, BETA), "must hold real numbers, not complex128"),
    (call([["a"] * 16], 1, BETA), "must hold real numbers"),
    (call([[1.0, 2.0], [1.0]], 1, BETA), "is not a regular array"),
    (call({"v": np.ones(16)}, 1, BETA), "has no state field 'v'"),
    (call({}, 1, BETA), "state field 'u' of task 'advection' is missing"),
    (call({"u": np.ones((1, 1, 16))}, 1, BETA), "field 'u' has shape (1, 1, 16); expected (x)"),
    (call(ONES, 0, BETA), "steps must be a whole number from 1"),
    (call(ONES, -3, BETA), "steps must be a whole number"),
    (call(ONES, 2.5, BETA), "steps must be a whole number from 1 to 100000000, not '2.5'"),
    (call(ONES, True, BETA), "steps must be a whole number"),
    (call(ONES, 4, BETA, every=0), "every must be a whole number"),
    (call(ONES, 4, BETA, every=5), "every=5 keeps no frame of 4 steps"),
    (call(np.ones((9, 1, 16)), 10**8, BETA), "GiB of memory"),
    (call(ONES), "parameter 'beta' of task 'advection' is missing"),
    (call(ONES, 1, {"betta": 1.0}), "has no parameter 'betta'; did you mean 'beta'?"),
    (call(ONES, 1, 1.0), "parameters must be a dict such as {'beta': 1.0}, not float"),
    (call(ONES, 1, {"beta": []}), "parameter 'beta' must be one number or one for each of the 1 samples"),
    (call(ONES, 1, {"beta": "fast"}), "parameter 'beta' must hold real numbers"),
    (call(ONES, 1, {"beta": np.nan}), "parameter 'beta' is not finite"),
    (call(np.ones((3, 1, 16)), 1, {"beta": [1.0, 2.0]}), "one for each of the 3 samples, not shape (2,)"),
    (call(ONES, 1, {"beta": [[1.0]]}), "parameter 'beta' must be one number"),
    (call(ONES, 1, BETA, static=np.ones((1, 16))), "has no static fields, but some were given"),
    (flow(parameters={"nu": 0.0, "rho": 1.0}), "parameter 'nu' must be above 0"),
    (flow(parameters={"nu": 0.05, "rho": [1.0, 2.0, 3.0]}, state={**FLOW}), ""),
    (flow(static=None), "needs static fields force"),
    (flow(static=np.ones((1, 8, 8))), "are on different grids: (16, 16) and (8, 8)"),
    (flow(state={**FLOW, "density": np.ones((8, 8))}), "differ in samples, frames or grid"),
    (
        flow(state={**FLOW, "velocity": np.ones((3, 16, 16))}),
        "has shape (3, 16, 16); expected (2 channels (x, y), x, y)",
    ),
    (flow(state={k: np.stack([v, v]) for k, v in FLOW.items()}, static=np.ones((3, 1, 16, 16))), "[2, 3]"),
    (call(dataset(v=(("x",), np.ones(16))), 1, BETA), "has no variable 'u'"),
    (call(dataset(u=(("z",), np.ones(16))), 1, BETA), "has dimensions ('z',); expected ('x',)"),
    (call(dataset(u=(("x",), np.ones(16)), x=np.arange(16)[::-1]), 1, BETA), "one increasing list of numbers"),
    (call(ONES, 1, None, "darcy"), "is steady: it has no state"),
    (call(None, 5, None, "darcy", static=FORCE), "has one solution, not 5 steps"),
    (call(None, 1, None, "darcy"), "needs static fields a"),
]


@pytest.fixture(scope="module")
def simulator(tmp_path_factory) -> Simulator:
    return Simulator.load(make_bundle(tmp_path_factory.mktemp("bundles") / "small"), device="cpu")


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_wrong_input_names_the_mistake(simulator, number):
    (arguments, options), words = CASES[number]
    if words == "":
        simulator.rollout(*arguments, **options)  # one state and three parameter values: a batch of three
        return
    with pytest.raises(BundleError) as caught:
        simulator.rollout(*arguments, **options)
    assert words in caught.value.message
    assert "\n" not in caught.value.one_line()


def test_there_are_forty_of_them():
    assert len([c for c in CASES if c[1]]) >= 40


@pytest.mark.parametrize("device", ["cuda", "gpu", "meta"])
def test_a_device_that_is_not_there_is_refused(tmp_path, device):
    with pytest.raises(BundleError, match="device"):
        Simulator.load(make_bundle(tmp_path / "b"), device=device)
