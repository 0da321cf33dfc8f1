"""The Darcy solver against a manufactured solution, a layered medium and the maximum principle."""

from __future__ import annotations

import numpy as np
import pytest

from ups.solvers import darcy
from ups.solvers.problem import Draws
from ups.solvers.tasks import TASKS


def test_a_manufactured_solution_converges_with_second_order():
    errors = []
    for cells in (16, 32, 64, 128):
        x = (np.arange(cells) + 0.5) / cells
        x, y = x[:, None], x[None, :]
        medium = 2 + np.sin(2 * np.pi * x) * np.cos(np.pi * y)
        exact = np.sin(np.pi * x) * np.sin(2 * np.pi * y)
        exact_x, exact_y = (
            np.pi * np.cos(np.pi * x) * np.sin(2 * np.pi * y),
            2 * np.pi * np.sin(np.pi * x) * np.cos(2 * np.pi * y),
        )
        medium_x, medium_y = (
            2 * np.pi * np.cos(2 * np.pi * x) * np.cos(np.pi * y),
            -np.pi * np.sin(2 * np.pi * x) * np.sin(np.pi * y),
        )
        source = 5 * np.pi**2 * medium * exact - medium_x * exact_x - medium_y * exact_y
        errors.append(np.abs(darcy.solve(medium, source) - exact).max())
    assert np.log2(np.array(errors[:-1]) / np.array(errors[1:])).min() > 1.8
    assert errors[-1] < 1e-3


def test_layers_carry_the_flux_of_the_harmonic_mean():
    """Far from the long ends a medium layered along x gives the 1D profile, exact at a jump between two cells."""
    cells = 64
    medium = np.where(np.arange(cells) < cells // 2, 3.0, 12.0)[:, None] * np.ones((1, cells))
    stretched = darcy.solve(medium, np.ones((cells, cells)))
    # Integral of the equation over the square: what the source puts in leaves through the boundary.
    outflow = 2 * (
        (medium[0] * stretched[0]).sum()
        + (medium[-1] * stretched[-1]).sum()
        + (medium[:, 0] * stretched[:, 0]).sum()
        + (medium[:, -1] * stretched[:, -1]).sum()
    )
    assert outflow == pytest.approx(1.0, rel=1e-12)
    flux = 2 * 3.0 * 12.0 / 15.0 * (stretched[cells // 2] - stretched[cells // 2 - 1])
    balance = darcy.LOW * (stretched[cells // 2 - 1] - stretched[cells // 2 - 2])
    assert np.abs(flux - balance).max() < 0.1 * np.abs(balance).max()


def test_a_uniform_medium_gives_the_series_of_the_square():
    cells, value = 128, 3.0
    center = darcy.solve(np.full((cells, cells), value), np.ones((cells, cells)))[
        cells // 2 - 1 : cells // 2 + 1, cells // 2 - 1 : cells // 2 + 1
    ]
    # Poisson's equation with unit source on the unit square has the value 0.0736713 in the middle.
    assert center.mean() * value == pytest.approx(0.0736713, rel=5e-4)


def test_the_stored_task_is_positive_linear_in_beta_and_two_phased():
    task = TASKS["darcy2d"]
    one = task.solve(Draws(0, "darcy2d", "train", (0, 1), {"beta": 0.5}), 16, 0)
    two = task.solve(Draws(0, "darcy2d", "train", (0, 1), {"beta": 2.0}), 16, 0)
    assert set(np.unique(one.static)) == {3.0, 12.0}
    assert one.target.min() > 0
    assert np.allclose(4 * one.target, two.target, rtol=1e-6)
    assert one.state.shape == (2, 0, 0, 16, 16)
    assert not np.array_equal(one.static[0], one.static[1])


def test_every_medium_has_a_good_part_of_each_kind():
    medium = darcy.two_phase_medium(Draws(0, "darcy2d", "train", tuple(range(400))), 32, 1.0)
    share = (medium == 12.0).mean(axis=(1, 2))
    assert share.mean() == pytest.approx(0.5, abs=0.03)
    # No medium is of one kind almost everywhere.
    assert share.min() > 0.15
    assert share.max() < 0.85


def test_six_iterations_solve_a_random_medium_to_a_thousandth_and_sixteen_exactly():
    media = darcy.two_phase_medium(Draws(0, "darcy2d", "test", (0, 1, 2)), 32, 1.0)
    exact = np.stack([darcy.solve(medium, np.ones((32, 32))) for medium in media])
    for iterations, error in ((6, 1e-3), (16, 1e-7)):
        difference = darcy.iterate(media, 1.0, iterations) - exact
        assert np.linalg.norm(difference) < error * np.linalg.norm(exact)
