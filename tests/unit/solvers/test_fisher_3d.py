"""Fisher-KPP in 3D: against the solver in 1D, against itself with smaller steps, and what must hold of any solution."""

from __future__ import annotations

import numpy as np
import pytest

from ups.solvers.problem import Draws
from ups.solvers.spectral import fisher_kpp_3d, reacdiff3d
from ups.solvers.tasks import BENCH_TASKS, find_task

PARAMETERS = np.array([3e-3, 2.0])
POINTS = 16


def smooth(points: int) -> np.ndarray:
    x = np.arange(points) / points
    wave = [0.5 + 0.4 * np.cos(2 * np.pi * (x - shift)) for shift in (0.1, 0.4, 0.7)]
    return np.einsum("x,y,z->xyz", *wave)


def test_what_does_not_depend_on_two_axes_is_the_solution_in_1d() -> None:
    spectral = pytest.importorskip("ups.solvers.spectral")
    pytest.importorskip("exponax")
    line = 0.4 + 0.3 * np.cos(2 * np.pi * np.arange(32) / 32)
    wanted = np.fft.irfft(spectral.fisher_kpp(line[None], PARAMETERS[None], 1.0, 0.1, 6)[0], n=32)
    for axis in range(3):
        start = np.moveaxis(np.broadcast_to(line, (32, 32, 32)), -1, axis)
        frames = np.moveaxis(fisher_kpp_3d(start, PARAMETERS, 1.0, 0.1, 6), axis + 1, -1)
        assert np.abs(frames - wanted[:, None, None]).max() < 2e-6


def test_the_error_falls_with_the_square_of_the_step() -> None:
    exact = fisher_kpp_3d(smooth(POINTS), PARAMETERS, 1.0, 0.5, 2, substeps=256)[-1]
    errors = [
        np.abs(fisher_kpp_3d(smooth(POINTS), PARAMETERS, 1.0, 0.5, 2, substeps=n)[-1] - exact).max() for n in (4, 8, 16)
    ]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)


def test_a_flat_field_grows_as_the_logistic_curve() -> None:
    frames = fisher_kpp_3d(np.full((8, 8, 8), 0.1), PARAMETERS, 1.0, 0.3, 5)
    grown = np.exp(2.0 * 0.3 * np.arange(5))
    wanted = 0.1 * grown / (1 + 0.1 * (grown - 1))
    assert frames == pytest.approx(np.broadcast_to(wanted[:, None, None, None], frames.shape))


def test_without_growth_the_mean_stays_and_waves_decay_as_they_should() -> None:
    start = smooth(POINTS)
    frames = fisher_kpp_3d(start, np.array([1e-2, 0.0]), 1.0, 0.5, 3)
    assert frames.mean(axis=(1, 2, 3)) == pytest.approx(start.mean())
    wave = np.abs(np.fft.fftn(frames, axes=(1, 2, 3))[:, 1, 0, 0])
    assert wave / wave[0] == pytest.approx(np.exp(-1e-2 * (2 * np.pi) ** 2 * 0.5 * np.arange(3)))


def test_the_task_is_stored_within_bounds_and_is_no_task_of_the_benchmark() -> None:
    task = find_task("reacdiff3d")
    draws = Draws(0, "reacdiff3d", "train", (0, 1))
    solution = reacdiff3d(task.spec, draws, 16, 3)
    assert solution.state.shape == (2, 3, 1, 16, 16, 16)
    assert 0 <= solution.state.min() < solution.state.max() <= 1
    assert (solution.state[:, 1:].mean(axis=(2, 3, 4, 5)) > solution.state[:, :-1].mean(axis=(2, 3, 4, 5))).all()
    again = reacdiff3d(task.spec, Draws(0, "reacdiff3d", "train", (1,)), 16, 3)
    assert np.array_equal(solution.state[1:], again.state)
    assert "reacdiff3d" not in BENCH_TASKS
