"""The simulator as a torch module: the same numbers as a rollout, and gradients that finite differences confirm."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.small_bundle import make_bundle
from tests.support.small_model import awake
from ups import Simulator
from ups.errors import BundleError

DRAW = torch.Generator().manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAW, dtype=torch.float64)


U, FLOW, FORCE = random(2, 1, 16), random(2, 3, 16, 16), random(2, 1, 16, 16)
NUMBERS = {"nu": torch.tensor([0.03, 0.08], dtype=torch.float64), "rho": 1.5}


@pytest.fixture(scope="module")
def simulator(tmp_path_factory) -> Simulator:
    return Simulator.load(make_bundle(tmp_path_factory.mktemp("bundles") / "small"), device="cpu")


def test_it_answers_like_a_rollout(simulator):
    states = simulator.module(FLOW, NUMBERS, FORCE, steps=3, task="flow")
    assert states.shape == (2, 3, 3, 16, 16)
    numbers = {"nu": NUMBERS["nu"].numpy(), "rho": 1.5}
    result = simulator.rollout(FLOW, 3, numbers, task="flow", static=FORCE)
    np.testing.assert_array_equal(states[:, :, :2].numpy(), result["velocity"].values)
    np.testing.assert_array_equal(states[:, :, 2].numpy(), result["density"].values)
    table = torch.tensor([[0.03, 1.5], [0.08, 1.5]])
    torch.testing.assert_close(simulator.module(FLOW, table, FORCE, steps=3, task="flow"), states)


def test_a_steady_task_has_one_solution(simulator):
    medium = random(2, 1, 16, 16)
    solution = simulator.module(static=medium, task="darcy")
    result = simulator.rollout(static=medium, task="darcy")
    np.testing.assert_array_equal(solution[:, 0].numpy(), result["u"].values)


def test_another_grid_is_resampled_as_in_a_rollout_and_gradients_flow(simulator):
    state = random(2, 1, 24).requires_grad_()
    states = simulator.module(state, {"beta": 1.0}, steps=2, task="advection")
    result = simulator.rollout(state.detach(), 2, {"beta": 1.0}, task="advection")
    np.testing.assert_allclose(states[:, :, 0].detach().numpy(), result["u"].values, atol=1e-5)
    states.sum().backward()
    assert state.grad.abs().max() > 0
    with pytest.raises(BundleError, match="too coarse"):
        simulator.module(random(2, 1, 3), {"beta": 1.0}, task="advection")
    with pytest.raises(BundleError, match=r"along 'y' \(wall\) cannot change"):
        simulator.module(random(2, 3, 16, 32), NUMBERS, random(2, 1, 16, 32), task="flow")


@pytest.mark.parametrize("context_frames", [1, 2])
def test_gradients_through_a_rollout_are_those_of_finite_differences(tmp_path, context_frames):
    path = make_bundle(tmp_path / "exact", context_frames=context_frames)
    module = Simulator.load(path, device="cpu").module.double()
    awake(module.stepper)
    nu = torch.tensor([0.03, 0.08], dtype=torch.float64)
    state = FLOW if context_frames == 1 else torch.stack([FLOW, random(*FLOW.shape)], dim=1)

    def energy(state: torch.Tensor, nu: torch.Tensor, force: torch.Tensor) -> torch.Tensor:
        frames = module(state, {"nu": nu, "rho": 1.5}, force, steps=4, task="flow")
        return frames[:, -1].square().mean((1, 2, 3))

    inputs = [x.clone().requires_grad_() for x in (state, nu, FORCE)]
    total = energy(*inputs).sum()
    gradients = torch.autograd.grad(total, inputs)
    assert total.dtype == torch.float64
    step = 1e-6
    for number, gradient in enumerate(gradients):
        assert gradient.abs().max() > 1e-6, "the rollout does not depend on this input at all"
        direction = random(*gradient.shape)
        if number == 1:
            direction = 0.01 * direction  # a parameter on a log scale stays above 0
        ahead, behind = (
            energy(*(x.detach() + sign * step * direction if i == number else x.detach() for i, x in enumerate(inputs)))
            for sign in (1, -1)
        )
        numeric = (ahead - behind).sum() / (2 * step)
        torch.testing.assert_close((gradient * direction).sum(), numeric, rtol=1e-5, atol=1e-9)


def test_the_weights_ask_for_no_gradient_and_are_not_those_of_the_simulator(simulator):
    before = simulator.rollout(U, 2, {"beta": 1.0}, task="advection")["u"].values
    module = simulator.module
    assert module is simulator.module
    assert not any(p.requires_grad for p in module.parameters())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1)
    np.testing.assert_array_equal(simulator.rollout(U, 2, {"beta": 1.0}, task="advection")["u"].values, before)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"state": U, "parameters": {"beta": 1.0}}, "several tasks"),
        ({"state": U, "parameters": {"beta": 1.0}, "task": "advektion"}, "did you mean 'advection'"),
        ({"state": U, "parameters": {"bta": 1.0}, "task": "advection"}, "did you mean 'beta'"),
        ({"state": U, "task": "advection"}, "'beta' of task 'advection' is missing"),
        ({"state": U, "parameters": {"beta": torch.ones(3)}, "task": "advection"}, "one number or 2"),
        ({"state": U, "parameters": torch.ones(2, 2), "task": "advection"}, r"expected \(2, 1\)"),
        ({"state": U[0], "parameters": {"beta": 1.0}, "task": "advection"}, "has shape"),
        ({"state": U[..., :0], "parameters": {"beta": 1.0}, "task": "advection"}, "no points along 'x'"),
        ({"state": U, "parameters": {"beta": 1.0}, "steps": 0, "task": "advection"}, "for 0 steps"),
        ({"state": FLOW, "parameters": NUMBERS, "task": "flow"}, "needs static fields"),
        ({"state": FLOW[:1], "static": FORCE, "parameters": NUMBERS, "task": "flow"}, "differ in samples or grid"),
        ({"state": U, "static": FORCE, "task": "darcy"}, "has no state fields"),
        ({"static": FORCE, "steps": 2, "task": "darcy"}, "for 2 steps"),
    ],
)
def test_what_does_not_fit_is_refused(simulator, arguments, words):
    with pytest.raises(BundleError, match=words):
        simulator.module(**arguments)
