"""Finite-element solvers against exact solutions, the geometries that are drawn, and the files that are written."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from ups.errors import ConfigError, DataError
from ups.formats.mesh_files import read_mesh_file
from ups.solvers import finite_elements
from ups.solvers.point_sweep import generate_points
from ups.solvers.points import POINT_TASKS, SQUARE
from ups.solvers.problem import Draws
from ups.solvers.tasks import stokes2d
from ups.solvers.triangulate import along, ellipse, inside, triangulate


def orders(errors: list[float], spacings: list[float]) -> list[float]:
    pairs = itertools.pairwise(zip(errors, spacings, strict=True))
    return [float(np.log(a / b) / np.log(h / g)) for (a, h), (b, g) in pairs]


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def quarter_ring(cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Triangles between the radii 1 and 3 in the first quadrant."""
    r, t = np.meshgrid(np.linspace(1, 3, cells + 1), np.linspace(0, np.pi / 2, cells + 1), indexing="ij")
    points = np.stack([r * np.cos(t), r * np.sin(t)], axis=-1).reshape(-1, 2)
    points[np.abs(points) < 1e-12] = 0.0
    n = np.arange((cells + 1) ** 2).reshape(cells + 1, -1)
    a, b, c, d = (part.ravel() for part in (n[:-1, :-1], n[1:, :-1], n[1:, 1:], n[:-1, 1:]))
    return points, np.concatenate([np.stack([a, b, c], 1), np.stack([a, c, d], 1)])


def test_stress_around_a_hole_is_that_of_kirsch() -> None:
    def stress(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """An infinite plate with a hole of radius 1, pulled by 1 along x."""
        r, t = np.hypot(*x), np.arctan2(x[1], x[0])
        two, four = r**-2 * np.cos(2 * t), np.cos(4 * t)
        xx = 1 - r**-2 * (1.5 * np.cos(2 * t) + four) + 1.5 * r**-4 * four
        yy = -(r**-2) * (0.5 * np.cos(2 * t) - four) - 1.5 * r**-4 * four
        xy = -(r**-2) * (0.5 * np.sin(2 * t) + np.sin(4 * t)) + 1.5 * r**-4 * np.sin(4 * t)
        assert two.shape == xx.shape
        return xx, yy, xy

    def traction(x: np.ndarray, n: np.ndarray) -> np.ndarray:
        xx, yy, xy = stress(x)
        return np.stack([xx * n[0] + xy * n[1], xy * n[0] + yy * n[1]]) * (np.hypot(*x) > 2)

    errors = []
    for cells in (8, 16, 32):
        points, triangles = quarter_ring(cells)
        xx, yy, xy = stress(points.T)
        exact = np.sqrt(xx**2 - xx * yy + yy**2 + 3 * xy**2)
        errors.append(rms(finite_elements.plate_stress(points, triangles, traction) - exact) / rms(exact))
    assert errors[-1] < 0.01
    assert min(orders(errors, [4.0, 2.0, 1.0])) > 1.5


def test_potential_across_an_inclusion_is_exact_to_second_order() -> None:
    """A disc of radius 1/2 of conductivity 1 with an inclusion of radius 1/4 and conductivity 5."""
    errors, spacings = [], [0.1, 0.05, 0.025]
    for spacing in spacings:
        round_, hole = (ellipse(np.zeros(2), (r, r), 0.0, spacing) for r in (0.5, 0.25))
        mesh = triangulate([round_], spacing, [hole])
        middle = mesh.points[mesh.triangles].mean(axis=1)
        within = inside(middle, hole, np.roll(hole, -1, axis=0))
        u = finite_elements.poisson(mesh.points, mesh.triangles, np.where(within, 5.0, 1.0))
        r = np.minimum(np.hypot(*mesh.points.T), 0.5)
        exact = (0.25 - r**2) / 4
        exact = np.where(r < 0.25, (0.25 - 0.0625) / 4 + (0.0625 - r**2) / 20, exact)
        errors.append(rms(u - exact) / rms(exact))
    assert errors[-1] < 2e-3
    assert min(orders(errors, spacings)) > 1.7


def test_heat_decays_as_its_mode() -> None:
    """Cold at x = 0 and x = 1, insulated elsewhere: sin(pi x) decays by kappa pi^2."""
    errors, spacings, kappa = [], [0.2, 0.1, 0.05], 0.1
    for spacing, steps in zip(spacings, (1, 2, 4), strict=True):
        mesh = triangulate([along(SQUARE, spacing)], spacing)
        x = mesh.points[:, 0]
        frames = finite_elements.heat(
            *(mesh.points, mesh.triangles, lambda at: np.sin(np.pi * at[0]), kappa, 0.4, 3),
            (x < 1e-9) | (x > 1 - 1e-9),
            steps,
        )
        times = 0.4 * np.arange(1, 4)
        exact = np.exp(-kappa * np.pi**2 * times)[:, None] * np.sin(np.pi * x)
        errors.append(rms(frames - exact) / rms(exact))
    assert errors[-1] < 2e-3
    assert min(orders(errors, spacings)) > 1.8


def test_stokes_flow_is_exact_to_third_order() -> None:
    """v = (20 x y^3, 5 x^4 - 5 y^4), p = 60 x^2 y - 20 y^3: a solution without forces."""

    def velocity(x: np.ndarray) -> np.ndarray:
        return np.stack([20 * x[0] * x[1] ** 3, 5 * x[0] ** 4 - 5 * x[1] ** 4])

    c = (np.arange(12) + 0.5) / 12
    wanted = np.stack(np.meshgrid(c, c, indexing="ij")).reshape(2, -1)
    errors, spacings = {"velocity": [], "pressure": []}, [0.2, 0.1, 0.05]
    for spacing in spacings:
        mesh = triangulate([along(SQUARE, spacing)], spacing)
        values = finite_elements.stokes(mesh.points, mesh.triangles, velocity, None, wanted)
        exact = 60 * wanted[0] ** 2 * wanted[1] - 20 * wanted[1] ** 3  # 0 at the first point, a corner
        errors["velocity"].append(rms(values[:2] - velocity(wanted)))
        errors["pressure"].append(rms((values[2] - values[2].mean()) - (exact - exact.mean())))
    assert min(orders(errors["velocity"], spacings)) > 2.6
    assert min(orders(errors["pressure"], spacings)) > 1.6
    channel = triangulate([along(SQUARE, 0.2)], 0.2)
    flow = finite_elements.stokes(
        *(channel.points, channel.triangles, lambda x: np.stack([4 * x[1] * (1 - x[1]), 0 * x[0]])),
        lambda x: x[0] > 1 - 1e-9,
        wanted,
    )
    np.testing.assert_allclose(flow[0], 4 * wanted[1] * (1 - wanted[1]), atol=1e-9)
    np.testing.assert_allclose(flow[2], 8 * (1 - wanted[0]), atol=1e-8)  # no traction at the outflow


def test_loops_that_cross_are_refused() -> None:
    crossing = [ellipse(np.array([x, 0.5]), (0.1, 0.1), 0.0, 0.05) for x in (0.42, 0.58)]
    with pytest.raises(DataError, match="lost"):
        triangulate([along(SQUARE, 0.1), *crossing], 0.1)


@pytest.mark.parametrize("name", POINT_TASKS)
def test_a_drawn_trajectory_is_a_sound_mesh(name: str) -> None:
    solve, _ = POINT_TASKS[name]
    first, second = (solve(Draws(0, name, "train", (number,))) for number in (0, 1))
    again = solve(Draws(0, name, "train", (0,)))
    assert all(np.array_equal(values, again.fields[key]) for key, values in first.fields.items())
    for mesh in (first, second):
        assert 300 < len(mesh.points) <= 2000
        a, b, c = (mesh.points[(mesh.cells or [])[0][:, i]] for i in range(3))
        area = 0.5 * ((b - a)[:, 0] * (c - a)[:, 1] - (b - a)[:, 1] * (c - a)[:, 0])
        assert area.min() > 0
        assert mesh.boundary is not None
        assert 0 < (mesh.boundary > 0).mean() < 0.4
    assert first.points.shape != second.points.shape or not np.array_equal(first.points, second.points)
    field = list(first.fields.values())[-1]
    assert np.isfinite(field).all()
    if name != "plate2d":
        np.testing.assert_allclose(field[..., first.boundary == 1], 0, atol=1e-12)


def test_flow_past_obstacles_has_no_values_in_them() -> None:
    solution = stokes2d.solve(Draws(0, "stokes2d", "train", (0,)), 16, 0)
    holes = solution.static[0, 0] == 1
    assert 0 < holes.mean() < 0.4
    assert not solution.target[0][:, holes].any()
    flow = solution.target[0, 0].sum(axis=1) / 16  # through each column, as far as 16 cells resolve it
    np.testing.assert_allclose(flow, 2 / 3, rtol=0.1)


def test_files_are_made_once_and_continued(tmp_path: Path) -> None:
    facts = generate_points("inclusions2d", tmp_path, trajectories=(1, 1, 0))
    path = tmp_path / "inclusions2d"
    assert (path / "task.yaml").is_file()
    mesh = read_mesh_file(path / "train" / "000000.npz")
    assert set(mesh.fields) == {"conductivity", "u"}
    (path / "valid" / "000000.npz").unlink()
    assert not facts["kept"]
    content = (path / "train" / "000000.npz").read_bytes()
    generate_points("inclusions2d", tmp_path, trajectories=(1, 1, 0))
    assert (path / "valid" / "000000.npz").is_file()
    assert (path / "train" / "000000.npz").read_bytes() == content
    with pytest.raises(ConfigError, match="another data set"):
        generate_points("inclusions2d", tmp_path, trajectories=(2, 1, 0))
