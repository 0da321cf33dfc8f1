"""Every sample counts exactly once, whatever ranks saw it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ups.errors import DataError
from ups.evaluation.accumulate import Accumulator

CHANNELS = ("u", "v")


def data(num_samples: int = 7, num_steps: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (num_samples, num_steps, 2, 16)
    truth = torch.randn(shape, generator=generator, dtype=torch.float64)
    prediction = truth + 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return prediction, truth, torch.randn(num_samples, 1, 2, 16, generator=generator, dtype=torch.float64)


def scored(samples: list[int], batch_size: int) -> Accumulator:
    prediction, truth, start = data()
    result = Accumulator(3, CHANNELS)
    for first in range(0, len(samples), batch_size):
        part = samples[first : first + batch_size]
        result.add(part, prediction[part], truth[part], start[part])
    return result


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_ranks_and_batches_do_not_change_a_score(world_size, batch_size):
    whole = scored(list(range(7)), 7).summary()
    parts = [scored(list(range(rank, 7, world_size)), batch_size) for rank in range(world_size)]
    merged = parts[0].merge(parts[1:]).summary()
    assert merged.keys() == whole.keys()
    for name, value in whole.items():
        assert merged[name] == pytest.approx(value, rel=1e-12, abs=1e-15), name


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_spectra_are_means_over_samples_whatever_ranks_saw_them(world_size):
    prediction, truth, _ = data()
    parts = [scored(list(range(rank, 7, world_size)), 2) for rank in range(world_size)]
    merged = parts[0].merge(parts[1:])
    assert merged.spectrum_steps == (1, 3)
    for of, frames in (("prediction", prediction), ("truth", truth)):
        energy = np.abs(np.fft.fft(frames[:, [0, 2]].numpy())) ** 2 / 16**2
        folded = energy[..., :9].copy()
        folded[..., 1:8] += energy[..., :8:-1]
        np.testing.assert_allclose(merged.spectra(of).numpy(), folded.mean(axis=0), rtol=1e-12)


def test_a_blow_up_makes_the_spectrum_of_its_step_and_channel_infinite():
    prediction, truth, start = data()
    prediction[4, 2, 1, 3] = math.nan
    result = Accumulator(3, CHANNELS)
    result.add(list(range(7)), prediction, truth, start)
    assert torch.isinf(result.spectra()[1, 1]).all()
    assert torch.isfinite(result.spectra()[0]).all()
    assert torch.isfinite(result.spectra("truth")).all()


def test_summary_is_the_formula_of_the_protocol():
    prediction, truth, _ = data()
    p, y = prediction.numpy(), truth.numpy()
    error = np.sqrt(np.mean((p - y) ** 2, axis=3))
    summary = scored(list(range(7)), 7).summary()
    assert summary["rmse"] == pytest.approx(error.mean(), rel=1e-12)
    assert summary["nrmse"] == pytest.approx((error / np.sqrt(np.mean(y**2, axis=3))).mean(), rel=1e-12)
    assert summary["crmse"] == pytest.approx(
        np.sqrt(np.mean((p.sum(axis=3) - y.sum(axis=3)) ** 2, axis=0)).mean() / 16, rel=1e-12
    )
    assert summary["max_error"] == pytest.approx(np.abs(p - y).max(axis=(0, 3)).mean(), rel=1e-12)
    assert summary["num_samples"] == 7


def test_a_sample_scored_twice_is_refused_within_a_rank_and_across_ranks():
    with pytest.raises(DataError, match="trajectory 2 was scored twice"):
        scored([0, 2, 2], 1)
    with pytest.raises(DataError, match="trajectory 1 was scored twice"):
        scored([0, 1], 2).merge([scored([1, 2], 2)])


def test_a_blow_up_makes_the_mean_infinite_and_is_the_worst():
    prediction, truth, start = data()
    prediction[4, 2, 1] = math.nan
    result = Accumulator(3, CHANNELS)
    result.add(list(range(7)), prediction, truth, start)
    summary = result.summary()
    assert summary["nrmse"] == math.inf
    assert math.isfinite(summary["nrmse_median"])
    assert summary["num_blown_up"] == 1
    assert result.worst(5)[0] == 4
    assert summary["num_samples"] == 7


def test_errors_of_many_times_the_fields_are_a_blow_up_before_numbers_end():
    prediction, truth, start = data()
    prediction[4, 2] += 1e4
    prediction[5, 2, 1] += 1e4  # one field of two: it may be one that has no size
    result = Accumulator(3, CHANNELS)
    result.add(list(range(7)), prediction, truth, start)
    assert {trajectory for trajectory, row in result.rows.items() if row["blew_up"]} == {4}
    assert math.isfinite(result.summary()["nrmse"])


def test_shapes_that_would_score_context_frames_or_drop_channels_are_refused():
    prediction, truth, _ = data()
    with pytest.raises(DataError, match="3 steps"):
        Accumulator(3, CHANNELS).add(list(range(7)), prediction[:, :2], truth[:, :2])
    with pytest.raises(DataError, match="differ in shape"):
        Accumulator(3, CHANNELS).add(list(range(7)), prediction[:, :, :1], truth)


def test_blow_up_and_divergence_are_two_criteria() -> None:
    from ups.spec.descriptors import DivergenceLimits

    limits = DivergenceLimits(torch.zeros(1).double(), torch.full((1,), 10.0).double(), torch.full((1,), 10.0).double())
    truth = torch.ones(4, 2, 1, 8)
    truth[1] = 0.01
    prediction = truth.clone()
    prediction[1, 1] = 5.0  # 500 times this trajectory, and no more than other trajectories have
    prediction[2, 1] = 10.5  # beyond everything in training, and 9.5 times off
    prediction[3, 1] = torch.nan
    parts = []
    for rank in range(2):
        scores = Accumulator(2, ("u",), limits=limits)
        scores.add([2 * rank, 2 * rank + 1], prediction[2 * rank :][:2], truth[2 * rank :][:2])
        parts.append(scores)
    merged = parts[0].merge(parts[1:])
    assert [merged.rows[n]["blew_up"] for n in range(4)] == [False, True, False, True]
    assert [merged.rows[n]["diverged"] for n in range(4)] == [False, False, True, True]
    assert (merged.summary()["num_blown_up"], merged.summary()["num_diverged"]) == (2, 2)
    assert merged.limits is limits
