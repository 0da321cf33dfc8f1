"""The FitzHugh-Nagumo solver against linear modes, a refined solution and an independent integrator."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from ups.solvers import diffreact
from ups.solvers.problem import Draws
from ups.solvers.tasks import TASKS

REST = -np.cbrt(diffreact.OFFSET)


@pytest.mark.parametrize(("i", "j"), [(0, 0), (4, 2), (9, 0), (15, 15)])
def test_small_waves_about_rest_follow_the_linear_equations(i, j):
    points, extent, time, size = 48, 2.0, 2.0, 1e-7
    x = (np.arange(points) + 0.5) / points
    shape = np.cos(np.pi * i * x)[:, None] * np.cos(np.pi * j * x)[None, :]
    square = (np.pi / extent) ** 2 * (i * i + j * j)
    matrix = np.array(
        [
            [1 - 3 * REST**2 - diffreact.DIFFUSIVITY_U * square, -1.0],
            [1.0, -1 - diffreact.DIFFUSIVITY_V * square],
        ]
    )
    fields = REST + size * np.array([1.0, -0.5])[:, None, None, None] * shape
    after = diffreact.evolve(fields, extent, time, 2, max_step=0.02)[-1]
    rates, vectors = np.linalg.eig(matrix)
    exact = (vectors * np.exp(time * rates)) @ np.linalg.solve(vectors, np.array([1.0, -0.5]))
    amplitude = ((after - REST) / size * shape).sum(axis=(2, 3))[:, 0] / (shape**2).sum()
    assert amplitude == pytest.approx(exact.real, rel=1e-5, abs=1e-5)


def test_uniform_fields_follow_the_ordinary_differential_equation():
    def right_hand_side(_, y):
        u, v = y
        return [u - u**3 - diffreact.OFFSET - v, u - v]

    exact = solve_ivp(right_hand_side, (0, 4), [0.9, -0.3], rtol=1e-11, atol=1e-12).y[:, -1]
    fields = np.array([0.9, -0.3])[:, None, None, None] * np.ones((1, 8, 8))
    after = diffreact.evolve(fields, 2.0, 4.0, 2, max_step=0.02)[-1]
    assert np.abs(after - exact[:, None, None, None]).max() < 1e-6


def noise(points):
    draws = Draws(0, "diffreact2d", "train", (0, 1))
    return np.stack([diffreact.cosine_noise(draws, name, points, 2.0) for name in ("activator", "inhibitor")])


def test_fourth_order_in_time():
    start = noise(32)
    exact = diffreact.evolve(start, 2.0, 0.5, 2, max_step=0.00125)[-1]
    errors = [np.abs(diffreact.evolve(start, 2.0, 0.5, 2, max_step=h)[-1] - exact).max() for h in (0.02, 0.01, 0.005)]
    assert np.log2(np.array(errors[:-1]) / np.array(errors[1:])).min() > 3.6


def test_the_stored_frames_agree_with_a_refined_solution():
    stored = TASKS["diffreact2d"].solve(Draws(0, "diffreact2d", "train", (0, 1)), 32, 3).state
    later = diffreact.evolve(noise(128), 2.0, 1.0, 2, max_step=0.01)[-1]
    fine = diffreact.evolve(later, 2.0, 0.2, 3, max_step=0.025)
    refined = np.stack([diffreact.resample_cosine(f, 32) for f in fine])  # (T, 2, n, R, R)
    assert np.abs(stored - np.transpose(refined, (2, 0, 1, 3, 4))).max() < 1e-4


def test_the_noise_does_not_depend_on_the_grid_and_has_the_stated_size():
    coarse, fine = noise(32), noise(96)
    assert np.allclose(fine[..., 1::3, 1::3], coarse)
    many = diffreact.cosine_noise(Draws(0, "x", "train", tuple(range(64))), "activator", 32, 2.0)
    assert many.std() == pytest.approx(diffreact.NOISE_STD, rel=0.02)
