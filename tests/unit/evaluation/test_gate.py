"""The gate of a rollout: chosen on some trajectories, judged on others, next to as many interventions by chance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ups.config.model import MultiscaleConfig
from ups.evaluation.gate import _random_places, find_gate, score_gate
from ups.evaluation.rollout import RolloutPlan
from ups.models.build import build_model
from ups.models.flow import FLOW, flow_of
from ups.models.stepper import Stepper
from ups.testing.memory_reader import ADVECTION, MemoryReader
from ups.testing.small_model import statistics_of

CONFIG = MultiscaleConfig(widths=[8, 8], blocks=[1, 1], num_heads=2)


class Valid(MemoryReader):
    """With a valid split; remembers which of its trajectories were read."""

    def __init__(self, num_trajectories: int) -> None:
        super().__init__(num_trajectories)
        self._splits = {"train": 1, "valid": num_trajectories, "test": 2}
        self.read_of: list[int] = []

    def _frames(self, split: str, trajectory: int, start: int, stop: int, step: int) -> Any:
        self.read_of.append(trajectory)
        return super()._frames(split, trajectory, start, stop, step)


def stepper_of() -> Stepper:
    """Small weights everywhere, as if they had been trained."""
    statistics = {"advection": statistics_of(ADVECTION)}
    made = build_model(dict.fromkeys(("operator", FLOW), CONFIG), [ADVECTION], statistics, 1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        flow_of(made, FLOW).scale.fill_(0.3)
    return made


def test_random_places_are_exactly_so_many() -> None:
    places = [_random_places(draw, 0, 7, (5, 4)) for draw in range(3)]
    assert [int(one.sum()) for one in places] == [7, 7, 7]
    assert not torch.equal(places[0], places[1])
    assert not bool(_random_places(0, 0, 0, (5, 4)).any())


def test_a_gate_is_chosen_on_one_half_of_the_trajectories_and_judged_on_the_other() -> None:
    stepper, reader = stepper_of(), Valid(5)
    found = find_gate(stepper, reader, 1)
    assert found is not None
    assert found["num_trajectories"] == 5
    first_odd = next(number for number, one in enumerate(reader.read_of) if one % 2)
    assert set(reader.read_of[:first_odd]) == {0, 2, 4}  # nothing of the other half before the choice
    assert set(reader.read_of[first_odd:]) == {1, 3}
    assert found["earned"] == (found["error"] < found["error_never"])
    assert 0 <= found["rate"] <= 1
    again = find_gate(stepper, Valid(5), 1)
    assert again == found


@pytest.mark.parametrize("trajectories", [0, 1])
def test_too_little_to_choose_and_to_judge_by_is_no_gate(trajectories: int) -> None:
    assert find_gate(stepper_of(), Valid(trajectories), 1) is None


def test_trajectories_without_a_step_are_no_gate() -> None:
    reader = Valid(4)
    reader._frames_of = {"valid": np.array([6, 1, 6, 1])}
    assert find_gate(stepper_of(), reader, 1) is None


def test_scores_stand_next_to_as_many_interventions_at_random() -> None:
    stepper, reader = stepper_of(), Valid(5)
    gate = find_gate(stepper, reader, 1)
    assert gate is not None
    plan = RolloutPlan.whole(reader, 1, split="test")
    found = score_gate(stepper, reader, plan, gate, split="test", max_trajectories=None)
    low, high = found["error_random_range"]
    assert low <= found["error_random"] <= high
    assert len(found["interventions"]) == round(found["rate"] * 2 * plan.num_steps)
    assert {one["trajectory"] for one in found["interventions"]} <= {0, 1}
