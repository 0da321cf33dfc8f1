"""A gated rollout: the corrector acts where a signal is above its threshold, there alone, and every act is recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.models.test_flow import stepper_of
from ups.config.model import MultiscaleConfig
from ups.errors import ConfigError
from ups.models.build import build_model
from ups.models.ensemble import members_of, repeated
from ups.models.flow import FLOW
from ups.models.gate import Gated, available, reason_words
from ups.models.rollout import rollout
from ups.models.stepper import Stepper
from ups.spec.batch import Batch
from ups.testing.small_model import LINE, batch_of, statistics_of

HUGE = 1e30


def frames_of(predictor: Gated | Stepper, batch: Batch, steps: int = 3) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack(list(rollout(predictor, batch, steps)), dim=1)


def test_above_every_signal_it_is_the_operator_and_below_all_the_corrector_acts_everywhere() -> None:
    stepper, batch = stepper_of().double(), batch_of(LINE, 1, dtype=torch.float64)
    closed, opened = Gated(stepper, {"spread": HUGE}), Gated(stepper, {"spread": -1.0})
    torch.testing.assert_close(frames_of(closed, batch), frames_of(stepper, batch))
    assert closed.interventions == []
    assert (frames_of(opened, batch) - frames_of(stepper, batch)).abs().min(2)[0].min() > 0
    assert [(one.row, one.step) for one in opened.interventions] == [(r, s) for s in (1, 2, 3) for r in range(3)]
    assert {reason_words(one.reasons) for one in opened.interventions} == {"spread"}
    assert opened.rate(3) == 1.0


def test_it_acts_on_the_trajectories_that_are_above_alone() -> None:
    stepper, batch = stepper_of().double(), batch_of(LINE, 1, dtype=torch.float64)
    chosen = torch.tensor([[False, True, False], [False, False, False], [True, True, False]])
    gated = Gated(stepper, {}, chosen=chosen)
    found, plain = frames_of(gated, batch), frames_of(stepper, batch)
    assert [(one.row, one.step) for one in gated.interventions] == [(1, 1), (0, 3), (1, 3)]
    torch.testing.assert_close(found[2], plain[2])
    torch.testing.assert_close(found[0, :2], plain[0, :2])
    assert not torch.allclose(found[0, 2], plain[0, 2])


def test_a_drift_of_a_conserved_integral_is_seen_since_the_first_frame() -> None:
    task = replace(LINE, conserved=("u",))
    config = MultiscaleConfig(widths=[8, 8], blocks=[1, 1], num_heads=2, conserve=False)
    stepper = build_model({"operator": config, FLOW: config}, [task], {"line": statistics_of(task)}, 1)
    with torch.no_grad():
        stepper.networks["operator"].lower.bias.fill_(1.0)  # a change by 0.25 everywhere in each step
        stepper.networks[FLOW].scale.fill_(0.5)  # as if it had been measured
    assert available(stepper, task) == ["drift", "spread"]
    batch = batch_of(task, 1)
    batch = batch.with_state(torch.ones_like(batch.state))
    gated = Gated(stepper, {"drift": 0.4})
    frames_of(gated, batch)
    assert {one.step for one in gated.interventions} == {2, 3}  # 0.25, then 0.5, of a mean of 1
    assert {reason_words(one.reasons) for one in gated.interventions} == {"drift"}


def test_a_signal_that_is_no_number_is_above_every_threshold() -> None:
    stepper, batch = stepper_of(), batch_of(LINE, 1)
    state = batch.state.clone()
    state[1] = torch.nan
    gated = Gated(stepper, {"spread": HUGE})
    frames_of(gated, batch.with_state(state), 1)
    assert [one.row for one in gated.interventions] == [1]


def test_members_that_are_corrected_are_those_of_the_ensemble() -> None:
    stepper, batch = stepper_of().double(), repeated(batch_of(LINE, 1, dtype=torch.float64), 2)
    gated = Gated(stepper, {"spread": -1.0}, members=2, seed=4)
    with torch.no_grad():
        expected = members_of(stepper, LINE, 2, seed=4)(batch)
    torch.testing.assert_close(frames_of(gated, batch, 1)[:, 0], expected)


def test_a_model_without_a_corrector_cannot_be_gated() -> None:
    config = MultiscaleConfig(widths=[8, 8], blocks=[1, 1], num_heads=2)
    bare = build_model(config, [LINE], {"line": statistics_of(LINE)}, 1)
    with pytest.raises(ConfigError, match="no corrector"):
        Gated(bare, {"spread": 1.0})
