"""The spectral solvers against analysis: exact waves, Cole-Hopf, growth rates, a traveling front, Taylor-Green."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ups.solvers import spectral
from ups.solvers.problem import Draws, average_periodic_1d, truncate_periodic_1d, truncate_periodic_2d
from ups.solvers.tasks import TASKS

pytest.importorskip("exponax")


def values(coefficients, points):
    return np.fft.irfft(coefficients, n=points)


def observed_order(errors):
    """Orders between neighbors of a sequence of errors whose step is halved each time."""
    return [np.log2(a / b) for a, b in pairwise(errors)]


class TestAdvection:
    def test_a_frame_is_the_first_one_moved_by_beta_t(self):
        spec = TASKS["advection1d"].spec
        # beta dt = 0.05 * 2.5 = 16 cells of 128: the shift is a whole number of cells.
        draws = Draws(0, "advection1d", "train", (0, 1, 2), {"beta": 2.5})
        state = TASKS["advection1d"].solve(draws, 128, 5).state[:, :, 0]
        for frame in range(5):
            assert np.allclose(state[:, frame], np.roll(state[:, 0], 16 * frame, axis=-1), atol=1e-6)
        assert spec.dt == 0.05

    def test_the_integral_does_not_change(self):
        state = TASKS["advection1d"].solve(Draws(0, "advection1d", "train", (0, 1)), 64, 11).state
        assert np.abs(state.mean(axis=-1)).max() < 1e-7

    def test_amplitudes_and_wave_numbers_are_in_the_stated_ranges(self):
        amplitude, mode, phase = spectral.two_sines(Draws(0, "advection1d", "train", tuple(range(2000))))
        assert amplitude.min() >= 0
        assert amplitude.max() < 1
        assert set(np.unique(mode)) == set(range(1, 9))
        assert phase.max() > 6


def cole_hopf(potential, x, t, viscosity):
    """u(x, t) from the potential of u0 (its integral), by quadrature of positive terms; exact up to the quadrature."""
    y = np.linspace(-2, 3, 20001)
    out = []
    for point in x:
        exponent = -(potential(y) + (point - y) ** 2 / (2 * t)) / (2 * viscosity)
        weight = np.exp(exponent - exponent.max())
        out.append(((point - y) / t * weight).sum() / weight.sum())
    return np.array(out)


class TestBurgers:
    @pytest.mark.parametrize("nu", [0.01, 0.1])
    def test_agrees_with_cole_hopf_before_and_after_the_front_forms(self, nu):
        points = 1024
        x = np.arange(points) / points
        start = np.sin(2 * np.pi * x) + 0.5 * np.sin(4 * np.pi * x + 1.0)

        def potential(y):
            return -np.cos(2 * np.pi * y) / (2 * np.pi) - 0.5 * np.cos(4 * np.pi * y + 1.0) / (4 * np.pi)

        u = values(spectral.burgers(start[None], np.array([nu / np.pi]), 0.05, 11), points)[0]
        for frame in (2, 10):
            exact = cole_hopf(potential, x[::32], 0.05 * frame, nu / np.pi)
            assert np.abs(u[frame, ::32] - exact).max() < 2e-5

    def test_fourth_order_in_time(self):
        points = 64
        start = np.sin(2 * np.pi * np.arange(points) / points)[None]
        nu = np.array([0.02])
        exact = spectral.burgers(start, nu, 0.4, 2, substeps=640)[:, -1]
        errors = [
            np.abs(values(spectral.burgers(start, nu, 0.4, 2, substeps=n)[:, -1] - exact, points)).max()
            for n in (20, 40, 80)
        ]
        assert min(observed_order(errors)) > 3.5

    def test_the_stored_mean_is_kept_and_the_energy_falls(self):
        state = TASKS["burgers1d"].solve(Draws(0, "burgers1d", "train", (0, 1)), 64, 5).state[:, :, 0].astype(float)
        assert np.abs(state.mean(axis=-1) - state[:, :1].mean(axis=-1)).max() < 1e-7
        assert (np.diff((state**2).mean(axis=-1), axis=1) < 0).all()


class TestKuramotoSivashinsky:
    EXTENT, POINTS = 64.0, 128

    def test_small_waves_grow_at_the_rate_of_the_linear_equation(self):
        x = np.arange(self.POINTS) * self.EXTENT / self.POINTS
        modes = np.array([3, 7, 12])
        start = 1e-7 * np.cos(2 * np.pi * modes[:, None] * x / self.EXTENT)
        coefficients = spectral.kuramoto_sivashinsky(start, self.EXTENT, 1.0, 3)
        q = 2 * np.pi * modes / self.EXTENT
        growth = np.abs(coefficients[np.arange(3), 2, modes]) / np.abs(coefficients[np.arange(3), 0, modes])
        assert np.allclose(growth, np.exp(2.0 * (q**2 - q**4)), rtol=1e-6)

    def test_a_moving_frame_gives_the_same_solution_moved(self):
        # u + c solves the equation in a frame that moves with c only if the nonlinear term is exactly u u_x.
        x = np.arange(self.POINTS) * self.EXTENT / self.POINTS
        start = np.cos(2 * np.pi * 2 * x / self.EXTENT) + 0.7 * np.sin(2 * np.pi * 5 * x / self.EXTENT)
        speed = 4 * self.EXTENT / self.POINTS
        both = spectral.kuramoto_sivashinsky(np.stack([start, start + speed]), self.EXTENT, 1.0, 6, substeps=80)
        still, moving = values(both, self.POINTS)
        for frame in range(6):
            assert np.abs(moving[frame] - speed - np.roll(still[frame], 4 * frame)).max() < 1e-6

    def test_agrees_with_a_refined_solution_and_is_fourth_order(self):
        def run(points, substeps):
            x = np.arange(points) * self.EXTENT / points
            start = np.cos(2 * np.pi * 3 * x / self.EXTENT) + np.sin(2 * np.pi * 4 * x / self.EXTENT + 1)
            coefficients = spectral.kuramoto_sivashinsky(start[None], self.EXTENT, 10.0, 2, substeps=substeps)
            return truncate_periodic_1d(coefficients, points, 64)[0, -1]

        fine = run(384, 1600)
        errors = [np.abs(run(256, n) - fine).max() for n in (100, 200, 400)]
        assert errors[1] < 2e-5  # the step of the stored task, 0.05
        assert min(observed_order(errors)) > 3.3

    def test_the_stored_flow_is_on_the_attractor_and_keeps_its_mean(self):
        state = TASKS["ks1d"].solve(Draws(0, "ks1d", "train", tuple(range(4))), 128, 11).state.astype(float)
        assert 1.0 < np.sqrt((state**2).mean()) < 1.6
        assert np.abs(state.mean(axis=-1)).max() < 1e-6


class TestFisher:
    def test_a_traveling_front_keeps_its_exact_shape_and_speed(self):
        # Ablowitz and Zeppetella: u = (1 + exp(sqrt(rho / 6 nu) x))^-2 moves with 5 sqrt(nu rho / 6).
        nu, rho, extent, points = 2e-3, 2.0, 4.0, 1024
        steep, speed = np.sqrt(rho / (6 * nu)), 5 * np.sqrt(nu * rho / 6)
        x = np.arange(points) * extent / points

        def pair(half_width):
            with np.errstate(over="ignore"):
                return (1 + np.exp(steep * (np.abs(x - extent / 2) - half_width))) ** -2.0

        coefficients = spectral.fisher_kpp(pair(1.0)[None], np.array([[nu, rho]]), extent, 1.0, 4)
        for frame in range(4):
            # The corner where the two halves meet in the saturated middle costs some 1e-6.
            assert np.abs(values(coefficients[0, frame], points) - pair(1.0 + speed * frame)).max() < 1e-5

    def test_a_front_out_of_a_bump_approaches_the_minimal_speed(self):
        nu, rho, extent, points = 1e-3, 4.0, 4.0, 1024
        x = np.arange(points) * extent / points
        start = np.exp(-(((x - extent / 2) / 0.05) ** 2))[None]
        coefficients = spectral.fisher_kpp(start, np.array([[nu, rho]]), extent, 1.0, 8)
        u = values(coefficients[0], points)
        fronts = [np.interp(-0.5, -f[points // 2 :], x[points // 2 :]) for f in u]
        speed = fronts[7] - fronts[6]
        minimal = 2 * np.sqrt(nu * rho)
        # Bramson: the speed at time t is the minimal one less 3 sqrt(nu / rho) / (2 t).
        assert speed == pytest.approx(minimal - 1.5 * np.sqrt(nu / rho) / 6.5, rel=0.02)

    def test_uniform_states_follow_the_logistic_curve(self):
        start = np.full((1, 32), 0.1)
        u = values(spectral.fisher_kpp(start, np.array([[1e-3, 3.0]]), 1.0, 0.1, 11), 32)[0, :, 0]
        t = 0.1 * np.arange(11)
        assert np.allclose(u, 1 / (1 + 9 * np.exp(-3 * t)), atol=1e-9)

    def test_fronts_cross_the_domain_and_values_stay_between_0_and_1(self):
        state = TASKS["reacdiff1d"].solve(Draws(0, "reacdiff1d", "train", tuple(range(32))), 64, 41).state
        assert state.min() > -1e-6
        assert state.max() < 1 + 1e-6
        assert np.median(state[:, -1].min(axis=-1)) > 0.1
        assert state[:, 0].min(axis=-1).max() < 0.2


class TestNavierStokes:
    def test_taylor_green_decays_at_the_exact_rate(self):
        points, viscosity = 32, 0.05
        x = np.arange(points) * 2 * np.pi / points
        start = (np.sin(2 * x)[:, None] * np.sin(2 * x)[None, :])[None]
        coefficients = spectral.navier_stokes(start, 2 * np.pi, viscosity, 0.0, 0.0, 1.0, 3)
        decay = np.exp(-viscosity * 8 * np.arange(3))
        exact = np.fft.rfft2(start[0])[None] * decay[:, None, None]
        assert np.abs(coefficients[0] - exact).max() < 1e-9 * points**2

    def test_the_vorticity_is_the_curl_of_the_velocity_that_carries_it(self):
        # w_t = -v . grad w with v from w by hand (Biot-Savart in Fourier space), no viscosity, drag or forcing.
        points, dt = 32, 1e-3
        w = spectral.random_vorticity(Draws(0, "ns2d", "train", (0,)), points)
        k = np.fft.fftfreq(points, 1 / points)
        kx, ky = k[:, None], k[None, : points // 2 + 1].copy()
        ky[0, -1] = points // 2
        square = np.where(kx**2 + ky**2 == 0, 1, kx**2 + ky**2)
        w_hat = np.fft.rfft2(w[0])
        stream = w_hat / square
        velocity_x, velocity_y = np.fft.irfft2(1j * ky * stream), np.fft.irfft2(-1j * kx * stream)
        curl = np.fft.irfft2(1j * kx * np.fft.rfft2(velocity_y) - 1j * ky * np.fft.rfft2(velocity_x))
        assert np.allclose(curl, w[0])
        rate = -(velocity_x * np.fft.irfft2(1j * kx * w_hat) + velocity_y * np.fft.irfft2(1j * ky * w_hat))
        coefficients = spectral.navier_stokes(w, 2 * np.pi, 0.0, 0.0, 0.0, dt, 3)[0]
        change = (np.fft.irfft2(coefficients[1]) - w[0]) / dt

        def low(field):
            return np.fft.rfft2(field)[:8, :8]

        assert np.abs(low(change) - low(rate)).max() < 0.02 * np.abs(low(rate)).max()

    def test_forcing_and_drag_balance_in_the_laminar_flow(self):
        # w = A cos(4 y) is steady: (16 viscosity + drag) A = -4.
        points, viscosity, drag = 32, 1.0, 0.1
        y = np.arange(points) * 2 * np.pi / points
        amplitude = -4.0 / (16 * viscosity + drag)
        start = np.broadcast_to(amplitude * np.cos(4 * y), (1, points, points)).copy()
        coefficients = spectral.navier_stokes(start, 2 * np.pi, viscosity, drag, 1.0, 1.0, 3)
        assert np.abs(np.fft.irfft2(coefficients[0, -1]) - start[0]).max() < 1e-12

    def test_fourth_order_in_time_and_mean_vorticity_zero(self):
        w = spectral.random_vorticity(Draws(0, "ns2d", "train", (0,)), 32)

        def run(substeps):
            return spectral.navier_stokes(w, 2 * np.pi, 0.05, 0.1, 1.0, 0.4, 3, substeps=substeps)[0, 1]

        exact = run(320)
        errors = [np.abs(run(n) - exact).max() for n in (10, 20, 40)]
        assert min(observed_order(errors)) > 3.7
        assert abs(exact[0, 0]) < 1e-9

    def test_the_stored_forcing_is_the_curl_of_the_body_force(self):
        solution = TASKS["ns2d"].solve(Draws(0, "ns2d", "train", (0, 1)), 16, 2)
        y = (np.arange(16) + 0.5) * 2 * np.pi / 16
        assert np.allclose(solution.static[0, 0], np.broadcast_to(-4 * np.cos(4 * y), (16, 16)), atol=1e-6)


class TestReduction:
    def test_truncation_gives_exact_values_of_a_band_limited_field_at_cell_centers(self):
        fine, coarse = 96, 32
        x, centers = np.arange(fine) / fine, (np.arange(coarse) + 0.5) / coarse

        def f(x):
            return 1 + np.sin(2 * np.pi * 3 * x + 0.3) - 0.5 * np.cos(2 * np.pi * 15 * x)

        assert np.allclose(truncate_periodic_1d(np.fft.rfft(f(x)), fine, coarse), f(centers))

        def g(x, y):
            return f(x) * np.cos(2 * np.pi * 7 * y + 1) + np.sin(2 * np.pi * (3 * x - 5 * y))

        field = np.fft.rfft2(g(x[:, None], x[None, :]))
        assert np.allclose(truncate_periodic_2d(field, fine, coarse), g(centers[:, None], centers[None, :]))

    def test_modes_that_do_not_fit_are_dropped_not_folded(self):
        x = np.arange(128) / 128
        assert np.allclose(truncate_periodic_1d(np.fft.rfft(np.sin(2 * np.pi * 40 * x)), 128, 32), 0, atol=1e-12)

    def test_cell_averages_are_the_exact_integrals(self):
        fine, coarse = 256, 16
        x = np.arange(fine) / fine
        edges = np.arange(coarse + 1) / coarse
        k = 5
        exact = np.diff(-np.cos(2 * np.pi * k * edges) / (2 * np.pi * k)) * coarse
        averages = average_periodic_1d(np.fft.rfft(np.sin(2 * np.pi * k * x)), fine, coarse)
        assert np.allclose(averages, exact)
