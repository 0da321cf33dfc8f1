"""Values between grid points, and unknowns found from sensors: exact where they can be, refused where not."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ups
from tests.support.small_bundle import ADVECTION, FLOW, make_bundle
from ups.errors import BundleError
from ups.inference import fit as fit_module
from ups.inference.query import Interpolant, frame_numbers
from ups.spec.task import AxisSpec, Boundary, FieldSpec, TaskSpec

DRAW = np.random.default_rng(0)


def task_on(*boundaries: Boundary) -> TaskSpec:
    axes = tuple(AxisSpec(name, boundary, 2.0) for name, boundary in zip("xyz", boundaries, strict=False))
    return TaskSpec("t", (FieldSpec("u"),), axes, dt=0.1)


def centers(points: int) -> np.ndarray:
    return (np.arange(points) + 0.5) * 2 / points


@pytest.mark.parametrize("first", [0.0, 0.0625])
def test_waves_that_the_grid_holds_are_exact(first: float) -> None:
    x, y, points = first + np.arange(16) / 8, centers(12), DRAW.uniform(0, 2, (40, 2))
    points[:, 0] += np.resize([-2, 0, 4], 40)  # around a periodic axis

    def wave(x: Any, y: Any) -> Any:
        return 0.3 + np.sin(3 * math.pi * x) * np.cos(5 * math.pi * y / 2) + np.cos(8 * math.pi * (x - first))

    values = torch.from_numpy(wave(x[:, None], y[None]))
    found = Interpolant(task_on("periodic", "neumann"), [x, y], [x, y], points)(values)
    np.testing.assert_allclose(found.numpy(), wave(*points.T), atol=1e-10)


@pytest.mark.parametrize("boundary", ["wall", "open", "dirichlet", "unknown", "neumann"])
def test_other_axes_are_limited_up_to_their_ends(boundary: Boundary) -> None:
    nodes = np.linspace(0, 2, 9) if boundary == "neumann" else centers(8)
    found = Interpolant(task_on(boundary), [nodes], [nodes], [0.0, 0.7, 2.0])(torch.from_numpy(3 * nodes - 1))
    np.testing.assert_allclose(found.numpy(), [-1, 1.1, 5], atol=1e-12)
    shock = torch.from_numpy((nodes > 1).astype(float))
    inside = Interpolant(task_on(boundary), [nodes], [nodes], np.linspace(0, 2, 200))(shock)
    assert -1e-12 <= inside.min() <= inside.max() <= 1 + 1e-12


def test_gradients_to_values_and_points_are_right() -> None:
    task, grid = task_on("periodic", "neumann", "open"), [np.arange(6) / 3, centers(4), centers(3)]
    values = torch.randn(2, 6, 4, 3, dtype=torch.float64, requires_grad=True)
    points = torch.rand(5, 3, dtype=torch.float64).mul(1.8).add(0.1).requires_grad_()
    assert torch.autograd.gradcheck(lambda v, p: Interpolant(task, grid, grid, p)(v), (values, points))


def test_a_point_outside_and_a_time_between_frames_are_refused() -> None:
    with pytest.raises(
        BundleError, match=r"1 points are outside of the domain, the first with x = 2.1; expected 0 to 2"
    ):
        Interpolant(task_on("wall"), [centers(8)], [centers(8)], [0.1, 2.1])
    with pytest.raises(BundleError, match=r"no frame at time 0.15; the nearest are at 0.1 and 0.2"):
        frame_numbers([0.1, 0.15], np.array([0.1, 0.2, 0.3]), 0.1)
    assert frame_numbers(0.3 + 1e-9, np.array([0.1, 0.2, 0.3]), 0.1) == [2]


@pytest.fixture
def simulator(tmp_path: Path) -> ups.Simulator:
    """Moves a wave by beta in a unit of time, exactly."""
    simulator = ups.Simulator.load(make_bundle(tmp_path / "b", tasks=(ADVECTION,)), device="cpu")
    simulator._stepper.forward = advected  # type: ignore[method-assign]
    return simulator


def advected(batch: Any, exploit: float = math.inf) -> torch.Tensor:
    """The exact step; for beta above `exploit` it is a network's nonsense, which fits anything better."""
    state, beta = batch.state[:, -1], batch.parameters[:, :1, None]
    shift = torch.exp(-2j * math.pi * torch.arange(9) * beta * batch.dt[:, None, None])
    exact = torch.fft.irfft(torch.fft.rfft(state) * shift, n=16)
    return torch.where(beta > exploit, torch.zeros(()), exact)


def sensors(noise: float, beta: float = 1.5, seed: int = 0) -> tuple[dict[str, Any], np.ndarray]:
    draw = np.random.default_rng(seed)
    points, times = draw.uniform(0, 1, (60, 1)), draw.integers(0, 6, 60) * 0.05

    def wave(x: Any) -> Any:
        return np.sin(2 * math.pi * x) + 0.4 * np.cos(4 * math.pi * x + 1)

    values = wave(points[:, 0] - beta * times) + noise * draw.normal(size=60)
    return {"points": points, "times": times, "u": values}, wave(np.arange(16) / 16)[None]


def test_a_result_is_queried_by_name_of_its_dimensions(simulator: ups.Simulator) -> None:
    _, first = sensors(0.0)
    result = simulator.rollout(np.stack([first, 2 * first]), 4, {"beta": 1.0})
    found = simulator.query(result, [[0.3], [1.3]], times=[0.1, 0.2])
    assert dict(found["u"].sizes) == {"sample": 2, "time": 2, "point": 2}
    expected = np.sin(2 * math.pi * 0.2) + 0.4 * np.cos(4 * math.pi * 0.2 + 1)
    np.testing.assert_allclose(found["u"].sel(time=0.1)[0], expected, atol=1e-6)
    np.testing.assert_allclose(found["u"][1], 2 * found["u"][0], rtol=1e-5)
    with pytest.raises(BundleError, match=r"no frame at time 0\.12"):
        simulator.query(result, [0.3], times=0.12)
    frames = torch.from_numpy(result["u"].values)[:, :, None]
    torch.testing.assert_close(
        simulator.query(frames, [0.3])[:, 1, 0, 0], torch.from_numpy(found["u"].values[:, 0, 0]).float()
    )


def test_parameter_and_initial_state_are_found(simulator: ups.Simulator) -> None:
    seen, first = sensors(0.01)
    found = simulator.fit(seen, ["beta", "initial_state"], noise=0.01)
    low, high = found.intervals["beta"]
    assert low <= 1.5 <= high < low + 0.05
    assert np.abs(found.initial_state - first).max() < 0.05
    assert (np.abs(found.initial_state - first) <= found.state_intervals).mean() > 0.7
    assert 0.5 < found.misfit < 1.5
    assert found.solver_misfit is None
    assert "solver" in found.notes
    assert float(found.result["beta"]) == found.parameters["beta"]


def test_more_noise_gives_wider_intervals_and_a_known_state_narrower_ones(simulator: ups.Simulator) -> None:
    widths = []
    for noise in (0.01, 0.1):
        seen, first = sensors(noise)
        for unknown, state in ((["beta"], first), (["beta", "initial_state"], None)):
            low, high = simulator.fit(seen, unknown, noise=noise, state=state).intervals["beta"]
            widths.append(high - low)
    assert widths[0] < widths[1] < widths[3]
    assert widths[0] < widths[2] < widths[3]
    assert widths[2] / widths[0] == pytest.approx(10, rel=0.5)


def test_what_does_not_fit_is_declined(simulator: ups.Simulator) -> None:
    seen, first = sensors(0.01)
    found = simulator.fit(seen | {"u": DRAW.normal(size=60)}, ["beta"], noise=0.01, state=first)
    assert "sensors are off by" in found.declined
    seen = seen | {"u": np.where(np.arange(60) % 2, seen["u"], np.nan)}
    assert "off by" not in simulator.fit(seen, ["beta"], noise=0.01, state=first).declined  # NaN: nothing was measured


class Far:
    """A calibration that finds everything above beta = 3 far away."""

    document = SimpleNamespace(leads=[1, 2, 3, 4, 5])
    alarm = 0.01

    def __init__(self, penalty: bool) -> None:
        self.penalty = penalty
        self.model = SimpleNamespace(distance=lambda numbers, period: 20 * numbers[:, 0])

    def bound(self, name: str, level: float) -> np.ndarray:
        return np.asarray(60.0 if self.penalty else np.inf)


@pytest.mark.parametrize("penalty", [True, False])
def test_the_distance_keeps_the_search_inside(simulator: ups.Simulator, monkeypatch: Any, penalty: bool) -> None:
    """An optimizer finds where nonsense fits better than the truth, unless that is far away."""
    seen, first = sensors(0.01)
    seen["u"] = np.where(seen["times"] > 0, 0.35 * seen["u"], seen["u"])

    def watched(stepper: Any) -> Any:
        class Watched:
            def __call__(self, batch: Any) -> torch.Tensor:
                self.numbers = batch.parameters
                return advected(batch, exploit=3.2)

        return Watched()

    monkeypatch.setattr(fit_module, "Watched", watched)
    start = ups.inference.inputs.read_start(
        ADVECTION, 1, first, None, {"beta": 1.0}, simulator._bundle.info.coordinates["advection"]
    )
    problem = fit_module.Problem(start.batch, simulator._stepper, Far(penalty), {"beta"}, seen, 0.3, 0.0)  # type: ignore[arg-type]
    with torch.no_grad():
        beta = float(problem.inputs(problem.best()[None]).parameters)
    assert (beta < 3.2) == penalty


@pytest.mark.parametrize(
    ("change", "unknown", "noise", "words"),
    [
        ({"v": [1.0]}, ["beta"], 0.1, "expected points, times and some of u"),
        ({"times": [0.1]}, ["beta"], 0.1, "a time and values for each point"),
        ({}, ["beta"], 0.0, "noise > 0"),
        ({}, ["bta"], 0.1, "cannot be fitted"),
        ({}, [], 0.1, "cannot be fitted"),
        ({"times": np.full(60, 0.07)}, ["beta"], 0.1, "no frame at time 0.07"),
        ({"times": np.full(60, -0.05)}, ["beta"], 0.1, "no frame at time -0.05"),
    ],
)
def test_a_wrong_call_is_refused(simulator: ups.Simulator, change: Any, unknown: Any, noise: float, words: str) -> None:
    seen, first = sensors(0.1)
    with pytest.raises(BundleError, match=words):
        simulator.fit(seen | change, unknown, noise=noise, state=first)


def test_static_fields_may_have_an_axis_of_samples(tmp_path: Path) -> None:
    simulator = ups.Simulator.load(make_bundle(tmp_path, tasks=(FLOW,)))
    seen = {"points": [[0.3, 0.4], [0.5, 0.6]], "times": [0.1, 0.1], "density": [1.0, 1.1]}
    known = {"state": np.ones((3, 16, 16)), "static": np.zeros((1, 1, 16, 16))}
    found = simulator.fit(seen, ["nu", "rho"], noise=0.1, **known)
    assert "sample" not in found.result.dims
