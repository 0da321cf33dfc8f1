"""The average follows the weights, forgets the start quickly, and gives the weights back bitwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ups.config.schema import EmaConfig
from ups.training.optim import Ema


def scalar(value: float) -> dict[str, nn.Parameter]:
    return {"w": nn.Parameter(torch.tensor([value]))}


def test_the_average_is_exponential_after_its_warm_up() -> None:
    named = scalar(0.0)
    ema = Ema(EmaConfig(decay=0.9), named)
    named["w"].data.fill_(1.0)
    ema.update(10_000)
    ema.update(10_001)
    assert ema.tensors["w"].item() == pytest.approx(1 - 0.9**2)


def test_early_updates_forget_the_initial_weights() -> None:
    named = scalar(100.0)
    ema = Ema(EmaConfig(decay=0.9999), named)
    named["w"].data.fill_(1.0)
    for number in range(1, 51):
        ema.update(number)
    assert abs(ema.tensors["w"].item() - 1.0) < 0.01


def test_weights_come_back_bitwise_also_after_an_error() -> None:
    named = scalar(0.1)
    ema = Ema(EmaConfig(), named)
    named["w"].data.fill_(0.3)
    kept = named["w"].detach().clone()

    def evaluate() -> None:
        with ema.in_place():
            assert named["w"].item() == pytest.approx(0.1)
            raise RuntimeError("evaluation")

    with pytest.raises(RuntimeError, match="evaluation"):
        evaluate()
    assert torch.equal(named["w"], kept)


def test_the_average_becomes_the_weights_and_starts_again_from_them() -> None:
    named = scalar(1.0)
    ema = Ema(EmaConfig(), named)
    named["w"].data.fill_(2.0)
    ema.become_weights()
    assert named["w"].item() == 1.0
    named["w"].data.fill_(3.0)
    ema.restart()
    assert ema.tensors["w"].item() == 3.0
