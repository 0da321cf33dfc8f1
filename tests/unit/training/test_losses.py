"""Errors of samples."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree

from ups.training.losses import Losses, mean_square, normalized_rmse, relative_l2


def test_a_relative_error_is_the_ratio_of_root_mean_squares_per_sample() -> None:
    reference = torch.tensor([[3.0, 4.0], [30.0, 40.0]])
    errors = relative_l2(0.1 * reference, reference, floor=1e-6)
    torch.testing.assert_close(errors, torch.tensor([0.1, 0.1]))


def test_a_sample_in_which_nothing_happens_counts_as_the_floor_and_has_a_finite_gradient() -> None:
    error = torch.zeros(2, 4, requires_grad=True)
    errors = relative_l2(error + torch.tensor([[0.0], [0.05]]), torch.zeros(2, 4), floor=0.1)
    torch.testing.assert_close(errors, torch.tensor([0.0, 0.5]), atol=1e-5, rtol=0)
    errors.sum().backward()
    assert error.grad is not None
    assert error.grad.isfinite().all()


def test_an_error_is_relative_to_each_field_and_not_to_its_change() -> None:
    fields = torch.stack([torch.full((1, 2, 8), 10.0), torch.full((1, 2, 8), 10.0)], dim=1)  # (B, T, C, X)
    fields[:, :, 1] = 0.0
    error = torch.full((1, 2, 8), 0.1)
    found = normalized_rmse(error, fields, torch.tensor([1e-6, 0.4]))
    assert found.item() == pytest.approx((0.01 + 0.25) / 2, rel=1e-5)


def test_a_mean_square_is_plain() -> None:
    assert mean_square(torch.full((1, 4), 2.0)).item() == 4.0


def test_wrappers_find_the_tensors_in_losses() -> None:
    losses = Losses(torch.ones(()), {"train/a/loss": torch.zeros(())})
    leaves, shape = _pytree.tree_flatten(losses)
    assert len(leaves) == 2
    assert _pytree.tree_unflatten(leaves, shape) == losses
