"""What a point of a grid stands for: alike on a uniform grid, by the width of its cell on any other."""

from __future__ import annotations

import numpy as np
import pytest

from ups.spec.grid import cell_widths, is_uniform, point_weights, uneven_axes
from ups.spec.task import AxisSpec

CLUSTERED = 0.5 - 0.5 * np.cos(np.pi * np.linspace(0, 1, 101))


def test_a_uniform_grid_has_no_weights() -> None:
    x, y = np.arange(100) / 100, np.linspace(0, 2, 30).astype(np.float32)
    assert is_uniform(x)
    assert is_uniform(y)
    assert point_weights((AxisSpec("x"), AxisSpec("y", "wall", 2.0)), (x, y)) is None
    np.testing.assert_allclose(cell_widths(x, AxisSpec("x")), 0.01)


def test_weights_make_sums_integrals() -> None:
    axes = (AxisSpec("x", "wall"), AxisSpec("y"))
    y = np.arange(40) / 40
    y = y + 0.05 * np.sin(2 * np.pi * y)
    weights = point_weights(axes, (CLUSTERED, y))
    assert weights is not None
    assert uneven_axes(axes, (CLUSTERED, y)) == ["x", "y"]
    assert weights.mean() == pytest.approx(1)
    field = np.multiply.outer(CLUSTERED**2, 1 + np.cos(2 * np.pi * y) ** 2)
    assert (weights * field).mean() == pytest.approx((1 / 3) * 1.5, rel=2e-3)
    assert field.mean() != pytest.approx(0.5, rel=0.05)


def test_what_lies_beyond_the_end_points_belongs_to_them() -> None:
    centers = np.array([0.05, 0.2, 0.4, 0.75])
    np.testing.assert_allclose(cell_widths(centers, AxisSpec("x", "wall")), [0.225, 0.175, 0.275, 0.325])
    np.testing.assert_allclose(cell_widths(centers, AxisSpec("x")).sum(), 1)
    nodes = np.array([0.0, 0.1, 1.0])
    np.testing.assert_allclose(cell_widths(nodes, AxisSpec("x", "wall")), [0.05, 0.5, 0.45])
