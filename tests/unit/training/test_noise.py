"""Noise is a function of seed, step and window, has the sizes that were asked for, and leaves some samples clean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.small_model import CUBE, LINE, PLANE, batch_of, small_model
from ups.models.normalization import keyed_normal
from ups.spec.batch import Batch
from ups.spec.keyed import keyed_uniform
from ups.training.augment import noisy

NORMALIZATION = small_model().normalization


def added(batch: Batch, seed: int = 1, largest: float = 0.1, clean: float = 0.5) -> torch.Tensor:
    frames = batch.state[:, :1]
    return noisy(batch, frames, NORMALIZATION, seed, largest=largest, clean=clean) - frames


@pytest.mark.parametrize("task", [LINE, PLANE, CUBE])
def test_noise_is_a_function_of_seed_step_and_window(task) -> None:  # type: ignore[no-untyped-def]
    batch = batch_of(task, 2, samples=16, dtype=torch.float64)
    noise = added(batch)
    one_by_one = torch.cat([added(batch.cut(i, i + 1)) for i in range(16)])
    torch.testing.assert_close(one_by_one, noise, rtol=1e-12, atol=1e-14)
    assert not torch.equal(noise, added(batch, seed=2))
    assert not torch.equal(noise, added(replace(batch, stage_step=8)))


def test_sizes_are_log_uniform_over_two_decades_and_a_share_is_clean() -> None:
    batch = batch_of(LINE, 2, samples=2000, dtype=torch.float64)
    batch = replace(batch, state=batch.state / 100)  # far below the deviation of the task
    sizes = (added(batch) / batch.state[:, :1].std(-1, correction=0, keepdim=True)).square().mean((1, 2, 3)).sqrt()
    assert (sizes == 0).double().mean().item() == pytest.approx(0.5, abs=0.04)
    logs = sizes[sizes > 0].log10()
    assert logs.min() > -3.3
    assert logs.max() < -0.7
    assert logs.mean().item() == pytest.approx(-2.0, abs=0.06)
    assert logs.std().item() == pytest.approx(2 / 12**0.5, abs=0.04)


def test_the_size_is_relative_to_each_frame_and_channel_and_at_most_to_the_task() -> None:
    batch = batch_of(PLANE, 2, samples=8, dtype=torch.float64)
    small = replace(batch, state=batch.state * torch.tensor([1e-3, 1e-2, 1e-1], dtype=torch.float64)[:, None, None])
    torch.testing.assert_close(
        added(small) / small.state[:, :1].std((-2, -1), correction=0, keepdim=True),
        added(batch) / batch.state[:, :1].std((-2, -1), correction=0, keepdim=True),
    )
    large = replace(batch, state=batch.state * 1e4)
    bound = NORMALIZATION.state_scale(PLANE, batch.state)
    assert ((added(large, clean=0.0) / bound).square().mean((-2, -1)).sqrt() < 0.15).all()


def test_without_noise_frames_are_what_they_were() -> None:
    batch = batch_of(LINE, 2)
    assert noisy(batch, batch.state, NORMALIZATION, 1, largest=0.0, clean=0.5) is batch.state
    assert noisy(batch, batch.state, NORMALIZATION, 1, largest=0.1, clean=1.0) is batch.state
    constant = replace(batch, state=torch.ones_like(batch.state))
    assert not added(constant, clean=0.0).any()


def test_draws_are_normal_and_white() -> None:
    z = keyed_normal(12345, np.arange(300), 4001, torch.zeros((), dtype=torch.float64))
    assert z.shape == (300, 4001)
    assert abs(z.mean()) < 0.004
    assert z.std().item() == pytest.approx(1.0, abs=0.003)
    assert z.pow(4).mean().item() == pytest.approx(3.0, abs=0.03)
    assert 4.5 < z.abs().max() < 6.0
    for a, b in ((z[:, 1:], z[:, :-1]), (z[1:], z[:-1]), (z[:, :2000], z[:, 2001:])):
        assert abs((a * b).mean()) < 0.004
        assert abs((a.abs() * b.abs()).mean() - 2 / np.pi) < 0.006


def test_the_words_are_those_of_the_keyed_draws() -> None:
    key, numbers = 2**64 - 7, np.array([0, 5, 10**12])
    count = 3
    uniform = keyed_uniform(key, numbers, count)
    first = np.floor(uniform * 2**24)
    radius = np.sqrt(-2 * np.log((first + 0.5) / 2**24))
    found = keyed_normal(key, numbers, 2 * count, torch.zeros((), dtype=torch.float64))
    np.testing.assert_allclose(found[:, :count].square() + found[:, count:].square(), radius**2, rtol=1e-9)
