"""Schedules are functions of progress; optimizers have their whole state from the start."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ups.config.stage import OptimConfig
from ups.training.optim import build_optimizer, learning_rate, optimizer_tensors, trainable


def test_the_rate_rises_linearly_then_falls_to_its_final_fraction() -> None:
    config = OptimConfig(learning_rate=1.0, warmup_fraction=0.1, final_fraction=0.01)
    assert learning_rate(config, 0.05) == pytest.approx(0.5)
    assert learning_rate(config, 0.1) == pytest.approx(1.0)
    assert learning_rate(config, 1.0) == pytest.approx(0.01)
    falling = [learning_rate(config, 0.1 + 0.9 * i / 50) for i in range(51)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize("warmup", [0.0, 1.0])
def test_a_stage_of_only_decay_or_only_warm_up_has_finite_rates(warmup: float) -> None:
    config = OptimConfig(learning_rate=1.0, warmup_fraction=warmup)
    assert all(0 <= learning_rate(config, d) <= 1 for d in (-1.0, 0.0, 0.5, 1.0, 2.0))


def test_weight_decay_touches_matrices_only() -> None:
    layer = nn.Linear(3, 2)
    optimizer = build_optimizer(OptimConfig(weight_decay=0.5), trainable(layer.named_parameters()))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {id(layer.weight): 0.5, id(layer.bias): 0.0}


def test_with_muon_tables_do_not_decay() -> None:
    layer, table = nn.Linear(3, 2), nn.Parameter(torch.ones(4, 3))
    parameters = {**trainable(layer.named_parameters()), "table": table}
    optimizer = build_optimizer(OptimConfig(type="muon", weight_decay=0.5), parameters, [layer.weight])
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {id(layer.weight): 0.5, id(layer.bias): 0.0, id(table): 0.0}


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_state_made_early_gives_the_same_steps_as_state_made_late(kind: str) -> None:
    config = OptimConfig(type=kind, learning_rate=0.1, weight_decay=0.01)  # type: ignore[arg-type]
    ours, plain = nn.Linear(4, 3), nn.Linear(4, 3)
    plain.load_state_dict(ours.state_dict())
    early = build_optimizer(config, trainable(ours.named_parameters()))
    late = build_optimizer(config, trainable(plain.named_parameters()))
    late.state.clear()
    for step in range(3):
        for model, optimizer in ((ours, early), (plain, late)):
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))


def test_the_entries_of_the_state_do_not_change_with_the_first_step() -> None:
    layer = nn.Linear(3, 2)
    named = trainable(layer.named_parameters())
    optimizer = build_optimizer(OptimConfig(), named)
    before = set(optimizer_tensors(optimizer, named))
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert set(optimizer_tensors(optimizer, named)) == before
    assert "weight/exp_avg_sq" in before


def test_frozen_parameters_are_not_trained() -> None:
    layer = nn.Linear(3, 2)
    layer.bias.requires_grad_(False)
    assert set(trainable(layer.named_parameters())) == {"weight"}
