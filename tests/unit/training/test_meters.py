"""Means are weighted by samples, and begin again with each row."""

from __future__ import annotations

import pytest
import torch

from ups.training.averages import Meters


def test_means_are_over_samples_not_over_batches() -> None:
    meters = Meters(torch.device("cpu"), distributed=False)
    meters.add({"loss": torch.tensor([1.0, 1.0]), "train/a/loss": torch.tensor([1.0, 1.0])})
    meters.add({"loss": torch.tensor([12.0, 3.0]), "train/b/loss": torch.tensor([12.0, 3.0])})
    assert meters.reduce() == {
        "loss": pytest.approx(3.25),
        "train/a/loss": pytest.approx(1.0),
        "train/b/loss": pytest.approx(4.0),
    }
    assert meters.reduce() == {}


def test_counting_leaves_no_graph_behind() -> None:
    meters = Meters(torch.device("cpu"), distributed=False)
    weight = torch.ones((), requires_grad=True)
    for _ in range(2):
        meters.add({"loss": torch.stack([weight * 2, weight])})
    assert not meters._sums["loss"].requires_grad


def test_counting_leaves_what_it_counts_alone() -> None:
    meters = Meters(torch.device("cpu"), distributed=False)
    first = torch.tensor([1.0, 1.0], dtype=torch.float64)
    for _ in range(3):
        meters.add({"loss": first})
    assert first.tolist() == [1.0, 1.0]
