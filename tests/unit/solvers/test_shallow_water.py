"""The shallow-water solver against a standing wave, the 1D dam break, conservation and symmetry."""

from __future__ import annotations

import numpy as np
import pytest

from ups.solvers import finite_volume
from ups.solvers.problem import Draws
from ups.solvers.tasks import TASKS


def at_rest(depth):
    """(3, X, Y, 1) from a depth (X, Y)."""
    return np.stack([depth, np.zeros_like(depth), np.zeros_like(depth)])[..., None]


def standing_wave_error(cells, amplitude=1e-5, periods=0.5):
    """Relative error of a low wave cos(2 pi x) cos(pi y) between walls, whose frequency is sqrt(g h) k."""
    x = (np.arange(cells) + 0.5) / cells
    shape = np.cos(2 * np.pi * x)[:, None] * np.cos(np.pi * x)[None, :]
    frequency = np.pi * np.sqrt(5.0)
    time = periods * 2 * np.pi / frequency
    depth = finite_volume.evolve_water(at_rest(1 + amplitude * shape), 1 / cells, time, 2)[-1][0, :, :, 0]
    return np.abs((depth - 1) / amplitude - np.cos(frequency * time) * shape).mean()


def test_a_low_standing_wave_has_the_linear_frequency_and_converges_with_second_order():
    errors = [standing_wave_error(n) for n in (16, 32, 64)]
    assert errors[-1] < 0.01
    assert np.log2(np.array(errors[:-1]) / np.array(errors[1:])).min() > 1.7


@pytest.mark.parametrize("axis", [0, 1])
def test_a_plane_dam_break_has_the_exact_middle_state(axis):
    """Stoker: depths 2 and 1 give a middle state in which the rarefaction and the bore agree."""
    cells, time = 128, 0.15
    low, high = 1.0, 2.0
    for _ in range(100):
        middle = 0.5 * (low + high)
        behind_bore = (middle - 1.0) * np.sqrt(0.5 * (middle + 1.0) / middle)
        behind_fan = 2 * (np.sqrt(2.0) - np.sqrt(middle))
        low, high = (middle, high) if behind_bore < behind_fan else (low, middle)
    x = (np.arange(cells) + 0.5) / cells
    depth = np.repeat(np.where(x < 0.5, 2.0, 1.0)[:, None], 8, axis=1)
    u = at_rest(depth if axis == 0 else depth.T.copy())
    frame = finite_volume.evolve_water(u, 1 / cells, time, 2)[-1][..., 0]
    frame = frame if axis == 0 else np.swapaxes(frame, 1, 2)[[0, 2, 1]]
    between = int((0.5 + 0.5 * time * behind_fan) * cells)
    assert frame[0, between] == pytest.approx(middle, rel=0.003)
    assert frame[1, between] / frame[0, between] == pytest.approx(behind_fan, rel=0.01)
    assert np.abs(frame[2]).max() < 1e-12


def test_mass_is_kept_to_round_off_and_energy_never_rises():
    u = finite_volume.dam_break(Draws(0, "swe2d", "train", (0, 1, 2)), 32, 1.0)
    frames = np.stack(finite_volume.evolve_water(u, 1 / 32, 0.2, 6))
    mass = frames[:, 0].mean(axis=(1, 2))
    assert np.abs(mass - mass[0]).max() < 1e-13
    energy = (0.5 * (frames[:, 1] ** 2 + frames[:, 2] ** 2) / frames[:, 0] + 0.5 * frames[:, 0] ** 2).mean(axis=(1, 2))
    assert (np.diff(energy, axis=0) < 0).all()


def test_still_water_stays_still():
    u = at_rest(np.full((16, 16), 1.5))
    assert np.array_equal(finite_volume.evolve_water(u, 1 / 16, 0.5, 2)[-1], u)


def test_a_centerd_drop_stays_symmetric():
    x = (np.arange(32) + 0.5) / 32 - 0.5
    depth = 1 + (x[:, None] ** 2 + x[None, :] ** 2 < 0.04)
    depth, mx, my = finite_volume.evolve_water(at_rest(depth.astype(float)), 1 / 32, 0.4, 2)[-1][..., 0]
    assert np.abs(depth - depth.T).max() < 1e-12
    assert np.abs(depth - depth[::-1]).max() < 1e-12
    assert np.abs(mx - my.T).max() < 1e-12


def test_waves_reach_every_wall_within_the_stored_time():
    solution = TASKS["swe2d"].solve(Draws(0, "swe2d", "train", tuple(range(3))), 16, 21)
    height = solution.state[:, :, 0]
    walls = np.stack([height[:, :, 0], height[:, :, -1], height[:, :, :, 0], height[:, :, :, -1]])
    assert (np.abs(walls - 1).max(axis=(2, 3)) > 0.01).all()
    assert height.min() > 0
