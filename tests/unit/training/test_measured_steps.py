"""What a stage wants to see before its first step: so many steps, without gradients, and nothing after them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ups.training.stages import pass_measured


class Measuring(nn.Module):
    """Remembers what it is told, in order."""

    def __init__(self, measured_steps: int) -> None:
        super().__init__()
        self.measured_steps = measured_steps
        self.seen: list[object] = []
        self.enough_after = 0

    def measured_enough(self) -> bool:
        return sum(isinstance(one, tuple) for one in self.seen) >= self.enough_after

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


def test_a_stage_that_has_not_seen_enough_gets_more_steps_and_not_without_end() -> None:
    stage = Measuring(2)
    stage.enough_after = 5
    assert pass_measured(stage, ([(str(number),)] for number in range(100)), stage)  # type: ignore[misc]
    assert len(stage.seen) == 1 + 6
    never = Measuring(2)
    never.enough_after = 1000
    assert pass_measured(never, ([(str(number),)] for number in range(100)), never)  # type: ignore[misc]
    assert len(never.seen) == 1 + 32
