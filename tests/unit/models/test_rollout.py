"""The one loop of a rollout: what is fed back, how often a predictor is asked, and that gradients survive."""

from __future__ import annotations

import torch

from tests.support.small_model import LINE, STEADY, batch_of
from ups.models.stepper import linear_extrapolation, rollout
from ups.spec.batch import Batch


def test_predictions_push_out_the_oldest_frames() -> None:
    batch = batch_of(LINE, 2)
    seen: list[torch.Tensor] = []

    def watched(now: Batch) -> torch.Tensor:
        seen.append(now.state)
        return linear_extrapolation(now)

    frames = list(rollout(watched, batch, 3))
    everything = torch.cat([batch.state, torch.stack(frames, dim=1)], dim=1)
    for step, state in enumerate(seen):
        assert torch.equal(state, everything[:, step : step + 2])
    change = batch.state[:, 1] - batch.state[:, 0]
    torch.testing.assert_close(frames[2], batch.state[:, 1] + 3 * change)


def test_a_steady_task_is_asked_once() -> None:
    batch = batch_of(STEADY, 0)
    assert [torch.equal(frame, batch.static) for frame in rollout(lambda b: b.static, batch, 5)] == [True]


def test_nothing_is_computed_that_nobody_asks_for() -> None:
    calls: list[int] = []

    def counted(batch: Batch) -> torch.Tensor:
        calls.append(1)
        return batch.state[:, -1]

    frames = rollout(counted, batch_of(LINE, 1), 10**9)
    next(frames), next(frames)
    assert len(calls) == 2


def test_gradients_flow_through_all_steps() -> None:
    batch = batch_of(LINE, 1)
    state = batch.state.clone().requires_grad_()
    *_, last = rollout(lambda b: 2 * b.state[:, -1], batch.with_state(state), 5)
    last.sum().backward()
    assert state.grad is not None
    assert torch.equal(state.grad, torch.full_like(state, 32.0))
