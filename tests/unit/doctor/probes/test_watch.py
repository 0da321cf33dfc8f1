"""The first module that makes a bad number is named, in the forward and in the backward pass; so is one that raises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ups.doctor.probes.rehearse import ModuleWatch, Place
from ups.doctor.trials import read_places


class Root(nn.Module):
    """Square root of a linear map, divided by what a second module gives."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


class Divides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x - x)


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no")


class Outer(nn.Module):
    """Divides by zero itself after its children were well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y / torch.zeros(())


def watched(model: nn.Module, folder: Path) -> ModuleWatch:
    return ModuleWatch(model, [], Place(folder / "place_0.json"), inside_units=True)


def test_the_innermost_module_with_finite_inputs_and_bad_output_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), Divides()), nn.Linear(2, 2))
    watch = watched(model, tmp_path)
    model(torch.ones(3, 2))
    assert (watch.fault["module"], watch.fault["pass"], watch.fault["inputs_finite"]) == ("1.1", "forward", True)


def test_arithmetic_outside_of_every_child_is_that_of_the_parent(tmp_path: Path) -> None:
    model = nn.Sequential(Outer())
    watch = watched(model, tmp_path)
    model(torch.ones(3, 2))
    assert watch.fault["module"] == "0"


def test_weights_that_are_not_finite_are_said_to_be_the_reason(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        model[1].weight[0, 0] = float("inf")
    watch = watched(model, tmp_path)
    model(torch.ones(3, 2))
    assert (watch.fault["module"], watch.fault["bad_parameters"]) == ("1", ["weight"])


def test_a_gradient_that_is_not_finite_is_pinned_to_the_backward_pass_of_its_module(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), Root()), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()  # the root of 0 is finite, its slope is not
    watch = watched(model, tmp_path)
    model(torch.ones(3, 2)).sum().backward()
    assert not watch.fault
    culprit = watch.backward_culprit()
    assert (culprit["module"], culprit["pass"]) == ("1.1", "backward")


def test_after_an_exception_the_innermost_module_is_known_also_from_outside(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), Raises()))
    watch = watched(model, tmp_path)
    with pytest.raises(ValueError, match="no"):
        model(torch.ones(3, 2))
    assert watch.innermost() == "1.1"
    assert read_places(tmp_path)[0]["module"] == "1.1", "who looks at a rank that is gone finds it there"
