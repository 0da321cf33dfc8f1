"""Metrics against closed forms and against an independent numpy implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ups.evaluation import metrics

SPACES = [(16,), (8, 6), (4, 6, 5)]


def sample(space: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = np.random.default_rng(seed)
    shape = (3, 4, 2, *space)
    return torch.tensor(generator.normal(size=shape)), torch.tensor(generator.normal(1.0, size=shape))


def loop_over_slices(function, prediction: torch.Tensor, truth: torch.Tensor) -> np.ndarray:
    p, y = prediction.numpy(), truth.numpy()
    return np.array([[[function(p[b, t, c], y[b, t, c]) for c in range(2)] for t in range(4)] for b in range(3)])


@pytest.mark.parametrize("space", SPACES)
def test_pointwise_metrics_equal_an_independent_implementation(space):
    prediction, truth = sample(space)

    def on_boundary(shape):
        inside = np.zeros(shape, dtype=bool)
        inside[tuple(slice(1, -1) for _ in shape)] = True
        return ~inside

    cases = {
        metrics.rmse: lambda p, y: math.sqrt(np.mean((p - y) ** 2)),
        metrics.nrmse: lambda p, y: math.sqrt(np.mean((p - y) ** 2)) / math.sqrt(np.mean(y**2)),
        metrics.vrmse: lambda p, y: math.sqrt(np.mean((p - y) ** 2) / (np.var(y, ddof=1) + 1e-7)),
        metrics.boundary_rmse: lambda p, y: math.sqrt(np.mean((p - y)[on_boundary(y.shape)] ** 2)),
        metrics.integral_error: lambda p, y: np.sum(p - y) / y.size,
        metrics.max_error: lambda p, y: np.max(np.abs(p - y)),
    }
    for function, reference in cases.items():
        np.testing.assert_allclose(
            function(prediction, truth).numpy(), loop_over_slices(reference, prediction, truth), rtol=1e-12
        )


@pytest.mark.parametrize("space", SPACES)
def test_bands_equal_an_independent_implementation_and_obey_parseval(space):
    prediction, truth = sample(space)

    def bands(p, y):
        energy = np.abs(np.fft.fftn(p - y)) ** 2 / y.size**2
        totals = [0.0, 0.0, 0.0]
        for index in np.ndindex(*y.shape):
            k = [i if i <= (n - 1) // 2 else i - n for i, n in zip(index, y.shape, strict=True)]
            shell = math.isqrt(sum(a * a for a in k))
            totals[0 if shell < 4 else 1 if shell < 12 else 2] += energy[index]
        return np.sqrt(totals)

    ours = metrics.band_rmse(prediction, truth).numpy()
    np.testing.assert_allclose(ours, loop_over_slices(bands, prediction, truth), rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose((ours**2).sum(axis=3), metrics.rmse(prediction, truth).numpy() ** 2, rtol=1e-12)


def test_the_scale_of_a_trajectory_is_the_same_for_all_its_steps():
    truth = torch.tensor([3.0, 4.0]).reshape(1, 2, 1, 1).expand(1, 2, 1, 8)
    error = metrics.trmse(truth + 0.5, truth, metrics.trajectory_rms(truth))
    torch.testing.assert_close(error, torch.full((1, 2, 1), 0.5 / math.sqrt(12.5), dtype=torch.float64))


def test_a_single_wave_lands_in_its_own_band():
    x = torch.arange(64, dtype=torch.float64) / 64
    for wave, band in ((3, 0), (4, 1), (11, 1), (12, 2)):
        error = torch.sin(2 * math.pi * wave * x)[None, None, None]
        values = metrics.band_rmse(error, torch.zeros_like(error))[0, 0, 0]
        assert values[band] == pytest.approx(math.sqrt(0.5), rel=1e-12)
        assert values.sum() == pytest.approx(float(values[band]), rel=1e-9)


def test_closed_forms():
    truth = torch.full((1, 1, 1, 8), 2.0)
    prediction = truth + 0.5
    assert metrics.rmse(prediction, truth).item() == 0.5
    assert metrics.nrmse(prediction, truth).item() == 0.25
    # a constant field has no variance: VRMSE divides by sqrt(1e-7)
    assert metrics.vrmse(prediction, truth).item() == pytest.approx(0.5 / math.sqrt(1e-7))
    assert metrics.conservation_drift(prediction, truth[:, 0]).item() == pytest.approx(0.25)


def test_correlation_is_that_of_each_channel():
    """Fields of very different means are correlated by these alone; a constant one says nothing."""
    wave = torch.sin(torch.arange(64) / 5.0)
    truth = torch.stack([290 + wave, 1 + 0.1 * wave, torch.full((64,), 1e5)])[None, None]
    wrong = torch.stack([290 + wave.roll(31), 1 + 0.1 * wave, torch.full((64,), 1e5)])[None, None]
    expected = (float(torch.corrcoef(torch.stack([wave, wave.roll(31)]))[0, 1]) + 1) / 2
    assert metrics.correlation(wrong, truth).tolist() == [[pytest.approx(expected, abs=1e-4)]]
    assert metrics.correlation(truth, truth).tolist() == [[pytest.approx(1)]]


def test_correlation_time_is_the_first_step_below_the_limit():
    truth = torch.randn(1, 5, 1, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    prediction = truth.clone()
    assert metrics.correlation_time(prediction, truth).tolist() == [6.0]
    prediction[:, 2] *= -1
    assert metrics.correlation_time(prediction, truth).tolist() == [3.0]
    prediction[:, 1] = torch.nan
    assert metrics.correlation_time(prediction, truth).tolist() == [2.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_blow_up_is_infinite_and_stays_in_its_own_slice(bad):
    prediction, truth = sample((16,))
    prediction[1, 2, 0, 3] = bad
    for function in (metrics.rmse, metrics.nrmse, metrics.vrmse, metrics.max_error, metrics.boundary_rmse):
        values = function(prediction, truth)
        assert values[1, 2, 0] == math.inf
        assert torch.isfinite(values).sum() == values.numel() - 1


@settings(max_examples=25, deadline=None)
@given(scale=st.floats(1e-3, 1e3), shift=st.integers(0, 15), offset=st.floats(-10, 10), seed=st.integers(0, 100))
def test_invariances(scale, shift, offset, seed):
    prediction, truth = sample((16,), seed)
    both = {"nrmse": metrics.nrmse, "correlation": metrics.correlation}
    for function in both.values():
        torch.testing.assert_close(function(prediction * scale, truth * scale), function(prediction, truth))
    for function in (metrics.rmse, metrics.nrmse, metrics.vrmse, metrics.band_rmse, metrics.max_error):
        rolled = function(prediction.roll(shift, -1), truth.roll(shift, -1))
        torch.testing.assert_close(rolled, function(prediction, truth), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        metrics.vrmse(prediction + offset, truth + offset), metrics.vrmse(prediction, truth), rtol=1e-9, atol=1e-12
    )
    assert bool((metrics.nrmse(truth, truth) == 0).all())
