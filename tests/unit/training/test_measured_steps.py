"""What a stage wants to see before its first step: so many steps, without gradients, and nothing after them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ups.training.measured_steps import pass_measured


class Measuring(nn.Module):
    """Remembers what it is told, in order."""

    def __init__(self, measured_steps: int) -> None:
        super().__init__()
        self.measured_steps = measured_steps
        self.seen: list[object] = []

    def measure(self, on: bool) -> None:
        self.seen.append(on)

    def forward(self, batches: tuple[object, ...]) -> None:
        assert not torch.is_grad_enabled()
        self.seen.append(batches)


@pytest.mark.parametrize("steps", [0, 2])
def test_the_batches_of_so_many_steps_are_passed_and_no_other_is_read(steps: int) -> None:
    read = 0

    def without_end() -> Iterator[list[tuple[str, ...]]]:
        nonlocal read
        while True:
            read += 1
            yield [(f"{read}a",), (f"{read}b",)]

    stage = Measuring(steps)
    assert pass_measured(stage, without_end(), stage) is bool(steps)  # type: ignore[arg-type]
    expected = [True, ("1a",), ("1b",), ("2a",), ("2b",)] if steps else []
    assert (stage.seen, read) == (expected, steps)
    assert torch.is_grad_enabled()
