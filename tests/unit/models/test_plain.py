"""A plain module becomes a model in one line."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import ups
from tests.support.toy import toy_task
from ups.config.model import ModelConfig
from ups.errors import PluginError
from ups.models.build import build_model
from ups.registry import MODELS
from ups.spec.statistics import Statistics


class MyNet(nn.Module):
    """Two convolutions."""

    def __init__(self, channels: int, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(channels, width, 3, padding=1), nn.GELU(), nn.Conv1d(width, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found


@pytest.fixture
def registered() -> Iterator[None]:
    ups.model(MyNet)
    yield
    MODELS.unregister("mynet")


def test_a_plain_module_is_built_from_a_recipe_section(registered: None) -> None:
    config = ModelConfig.settings_of("mynet").model_validate({"width": 4})
    network = MODELS.factory("mynet")(config, [toy_task("line")], 2)
    assert network.module.net[0].weight.shape == (4, 2, 3), "two frames of one channel in, four channels inside"
    with pytest.raises(ValueError, match="widht"):
        ModelConfig.settings_of("mynet").model_validate({"widht": 4})


def test_a_stepper_trains_it(registered: None) -> None:
    task = toy_task("line")
    statistics = Statistics(state_mean=(0.0,), state_std=(1.0,), difference_mean=(0.0,), difference_std=(1.0,))
    stepper = build_model(ModelConfig.settings_of("mynet").model_validate({}), [task], {"line": statistics}, 1)
    assert stepper.shard_units() == [stepper.network.module]
    assert {name for name, _ in stepper.named_parameters()} == {
        f"networks.operator.module.net.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")
    }


def test_a_module_that_changes_the_shape_is_refused() -> None:
    class Wrong(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[..., 1:]

    ups.model(Wrong, name="wrong")
    try:
        network = MODELS.factory("wrong")(None, [toy_task("line")], 1)
        with pytest.raises(PluginError, match="returned"):
            network.forward(SimpleNamespace(fields=torch.zeros(2, 1, 12), parameters=torch.zeros(2, 0), outputs=["u0"]))
    finally:
        MODELS.unregister("wrong")


def test_an_argument_without_a_default_is_refused() -> None:
    class Needs(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()

    with pytest.raises(PluginError, match="needs the argument 'depth'"):
        ups.model(Needs)
