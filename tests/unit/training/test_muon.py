"""Muon: torch's updates for matrices, AdamW's for the rest, with a state that is whole from the start."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ups.config.stage import OptimConfig
from ups.training.muon import MOMENTUM, orthogonalized
from ups.training.optim import build_optimizer, optimizer_tensors, set_learning_rate, trainable

DOUBLE = torch.float64


def newton_schulz(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """The usual form of the iteration, in the type of its argument."""
    a, b, c = coefficients
    x = matrix / matrix.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def config(**values: float) -> OptimConfig:
    return OptimConfig(type="muon", learning_rate=2e-3, weight_decay=0.1, **values)  # type: ignore[arg-type]


def train(network: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int = 4) -> None:
    dtype = next(network.parameters()).dtype
    for step in range(steps):
        torch.manual_seed(step)
        network.zero_grad()
        network(torch.randn(7, 6, dtype=dtype)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def two_layers(dtype: torch.dtype = DOUBLE) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 3)).to(dtype)


def weights(network: nn.Module) -> list[nn.Parameter]:
    return [p for p in network.parameters() if p.ndim == 2]


@pytest.mark.parametrize(("exact", "tolerance"), [(True, 1e-11), (False, 0.03)], ids=["float64", "as torch has it"])
def test_updates_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, exact: bool, tolerance: float) -> None:
    muon = pytest.importorskip("torch.optim._muon")
    if exact:  # torch iterates in bfloat16 always
        monkeypatch.setattr(muon, "_zeropower_via_newtonschulz", newton_schulz)
    ours = two_layers()
    theirs = copy.deepcopy(ours)
    start = [p.detach().clone() for p in ours.parameters()]
    train(ours, [build_optimizer(config(matrix_learning_rate=0.01), trainable(ours.named_parameters()), weights(ours))])
    biases = [p for p in theirs.parameters() if p.ndim == 1]
    train(
        theirs,
        [
            torch.optim.Muon(weights(theirs), lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(biases, lr=2e-3, betas=(0.9, 0.99), weight_decay=0.0),
        ],
    )
    for found, wanted, before in zip(ours.parameters(), theirs.parameters(), start, strict=True):
        moved = wanted - before
        assert (found - wanted).norm() <= tolerance * moved.norm()


@pytest.mark.parametrize("shape", [(8, 8), (4, 90), (90, 4), (1, 5)])
@pytest.mark.parametrize("decades", [0, 8])
def test_the_small_form_is_the_usual_iteration(shape: tuple[int, int], decades: int) -> None:
    torch.manual_seed(1)
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=DOUBLE), full_matrices=False)
    matrix = (u * torch.logspace(-3, -3 - decades, min(shape), dtype=DOUBLE)) @ v
    wanted = newton_schulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert (orthogonalized(matrix) - wanted).norm() <= 1e-11 * wanted.norm()
    assert (orthogonalized(matrix.float()) - wanted).norm() <= 5e-3 * wanted.norm()


def test_a_gradient_of_zero_moves_nothing() -> None:
    assert not orthogonalized(torch.zeros(3, 5)).any()


def test_a_kernel_is_a_matrix_of_its_first_dimension() -> None:
    conv, flat = nn.Conv2d(3, 4, 5, bias=False), nn.Linear(75, 4, bias=False)
    flat.weight.data.copy_(conv.weight.data.reshape(4, 75))
    gradient = torch.randn(4, 75)
    for layer in (conv, flat):
        layer.weight.grad = gradient.reshape(layer.weight.shape).clone()
        build_optimizer(config(), trainable(layer.named_parameters()), [layer.weight]).step()
    assert torch.equal(conv.weight.reshape(4, 75), flat.weight)


def test_the_length_of_an_update_does_not_depend_on_the_gradient() -> None:
    layer = nn.Linear(64, 32, bias=False)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.randn(32, 64) * 1e-4
    optimizer = build_optimizer(OptimConfig(type="muon", weight_decay=0.0), {"weight": layer.weight}, [layer.weight])
    set_learning_rate(optimizer, 1e-3)
    optimizer.step()
    assert (layer.weight - before).square().mean().sqrt().item() == pytest.approx(0.2 * 5e-3, rel=0.2)


def test_the_schedule_moves_both_rates() -> None:
    network = two_layers()
    optimizer = build_optimizer(
        config(matrix_learning_rate=0.01), trainable(network.named_parameters()), weights(network)
    )
    set_learning_rate(optimizer, 1e-3)  # half of the peak
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert [rates[id(p)] for p in network.parameters()] == pytest.approx([5e-3, 1e-3, 5e-3, 1e-3])


@pytest.mark.parametrize("named", [lambda n: weights(n), lambda n: [], lambda n: weights(n)[:1]])
def test_a_resumed_run_goes_on_bitwise(named: Callable[[nn.Module], list[nn.Parameter]]) -> None:
    network = two_layers(torch.float32)

    def optimizer_of(network: nn.Module) -> tuple[torch.optim.Optimizer, dict[str, Tensor]]:
        parameters = trainable(network.named_parameters())
        optimizer = build_optimizer(config(), parameters, named(network))
        return optimizer, optimizer_tensors(optimizer, parameters)

    optimizer, state = optimizer_of(network)
    names = set(state)
    train(network, [optimizer])
    resumed = copy.deepcopy(network)
    other, loaded = optimizer_of(resumed)
    assert loaded.keys() == optimizer_tensors(optimizer, trainable(network.named_parameters())).keys() == names
    for name, tensor in loaded.items():
        tensor.copy_(state[name])
    train(network, [optimizer])
    train(resumed, [other])
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), resumed.parameters(), strict=True))


def test_a_state_that_torch_loads_reaches_both_parts() -> None:
    """As other trainers resume: torch puts new groups and a new state into the optimizer."""
    network = two_layers()
    optimizer = build_optimizer(config(), trainable(network.named_parameters()), weights(network))
    train(network, [optimizer])
    resumed = copy.deepcopy(network)
    other = build_optimizer(config(), trainable(resumed.named_parameters()), weights(resumed))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for rate in (1e-3, 1e-4):
        for one, trained in ((optimizer, network), (other, resumed)):
            set_learning_rate(one, rate)
            train(trained, [one])
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), resumed.parameters(), strict=True))


def test_matrices_have_momentum_and_the_rest_has_moments() -> None:
    network = two_layers()
    network[0].weight.requires_grad_(False)
    parameters = trainable(network.named_parameters())
    optimizer = build_optimizer(config(), parameters, weights(network))
    moments = {"exp_avg", "exp_avg_sq", "step"}
    expected = {f"{n}/{e}" for n in ("0.bias", "2.bias") for e in moments} | {"2.weight/momentum_buffer"}
    assert set(optimizer_tensors(optimizer, parameters)) == expected
    network(torch.ones(1, 6, dtype=DOUBLE)).sum().backward()
    gradient = network[2].weight.grad
    optimizer.step()
    buffer = optimizer_tensors(optimizer, parameters)["2.weight/momentum_buffer"]
    torch.testing.assert_close(buffer, (1 - MOMENTUM) * gradient)


def test_a_matrix_that_a_step_does_not_use_stays_as_it_is() -> None:
    network = two_layers()
    first, last = weights(network)
    optimizer = build_optimizer(config(matrix_learning_rate=0.01), trainable(network.named_parameters()), [first, last])
    train(network, [optimizer])
    before = [p.detach().clone() for p in (first, last)]
    network(torch.randn(7, 6, dtype=DOUBLE)).square().mean().backward()
    assert first.grad is not None
    first.grad.zero_()
    optimizer.step()
    assert torch.equal(first, before[0]), "its momentum has a direction, and updates have one length"
    assert not torch.equal(last, before[1])
