"""Each well-known way to a score that is too good is planted, and the check that watches for it must fail.

The checks are the tests and guards themselves: a check that passes with the bug in place would be worth nothing.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.memory_reader import MemoryReader
from tests.unit.data import test_leakage as leakage_checks
from tests.unit.evaluation import test_rollout as rollout_checks
from ups.errors import DataError
from ups.evaluation import accumulate, rollout
from ups.evaluation.rollout import RolloutPlan, score_task
from ups.models.stepper import persistence

read_inputs = rollout.read_inputs


def test_without_a_bug_all_checks_pass(tmp_path: Path) -> None:
    rollout_checks.test_given_frames_are_never_scored()
    rollout_checks.test_an_exact_model_scores_zero_and_persistence_does_not()
    rollout_checks.test_a_steady_task_is_held_against_the_mean_of_the_train_split()
    for world_size in (2, 3):
        rollout_checks.test_every_trajectory_is_scored_once_over_the_ranks(world_size)
    leakage_checks.test_a_test_trajectory_that_is_in_train_is_named_with_its_twin(tmp_path)


def test_scoring_all_given_frames_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_context(reader, split, part, plan, device, dtype):
        batch, truth = read_inputs(reader, split, part, plan, device, dtype)
        return batch, torch.cat([batch.state, truth], dim=1)

    def copying(predictor, batch, num_steps):
        yield from batch.state.unbind(1)
        yield from original(predictor, batch, num_steps)

    original = rollout.rollout
    monkeypatch.setattr(rollout, "read_inputs", with_context)
    monkeypatch.setattr(rollout, "rollout", copying)
    with pytest.raises(DataError, match="scores expect"):
        rollout_checks.test_given_frames_are_never_scored()


def test_scoring_the_last_given_frame_in_place_of_the_last_predicted_one_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def one_early(reader, split, part, plan, device, dtype):
        batch, truth = read_inputs(reader, split, part, plan, device, dtype)
        return batch, torch.cat([batch.state[:, -1:], truth[:, :-1]], dim=1)

    monkeypatch.setattr(rollout, "read_inputs", one_early)
    with pytest.raises(AssertionError):
        rollout_checks.test_given_frames_are_never_scored()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_sample_that_two_ranks_score_is_refused(world_size: int) -> None:
    """Planted: ranks that believe in a smaller world, as with a stale environment."""
    reader, plan = MemoryReader(num_trajectories=7), RolloutPlan(1, 0, 3)
    ranks = [SimpleNamespace(rank=rank, world_size=world_size - 1) for rank in range(world_size)]
    parts = [score_task({"p": persistence}, reader, rank_info, plan)["p"] for rank_info in ranks]
    with pytest.raises(DataError, match="was scored twice"):
        parts[0].merge(parts[1:])


@pytest.mark.parametrize("world_size", [2, 3])
def test_padding_ranks_to_equal_shares_is_seen_even_without_the_guard(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: what torch's DistributedSampler does to 7 samples, and no one who looks for a sample seen twice."""

    def padded(*bounds: int) -> range | list[int]:
        if len(bounds) < 3 or bounds[1] != 7:
            return range(*bounds)
        rank, count, world = bounds
        return [number % count for number in range(rank, -(-count // world) * world, world)]

    monkeypatch.setattr(rollout, "range", padded, raising=False)
    with pytest.raises(DataError, match="was scored twice"):
        rollout_checks.test_every_trajectory_is_scored_once_over_the_ranks(world_size)
    monkeypatch.setattr(accumulate.Accumulator, "_check_new", lambda self, trajectories: None)
    with pytest.raises(AssertionError):
        rollout_checks.test_every_trajectory_is_scored_once_over_the_ranks(world_size)


def test_a_wrong_channel_order_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(reader, split, part, plan, device, dtype):
        batch, truth = read_inputs(reader, split, part, plan, device, dtype)
        return batch, truth.flip(2)

    monkeypatch.setattr(rollout, "read_inputs", swapped)
    with pytest.raises(AssertionError):
        rollout_checks.test_an_exact_model_scores_zero_and_persistence_does_not()


def test_scores_in_normalized_units_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: prediction and truth are both divided by a scale before they are scored, so that nRMSE hides it."""

    class Normalized(accumulate.Accumulator):
        def add(self, trajectories, prediction, truth, before=None, valid=None):
            before = None if before is None else before / 7.0
            super().add(trajectories, prediction / 7.0, truth / 7.0, before, valid)

    monkeypatch.setattr(rollout, "Accumulator", Normalized)
    with pytest.raises(AssertionError):
        rollout_checks.test_a_steady_task_is_held_against_the_mean_of_the_train_split()


def test_a_model_whose_output_stays_normalized_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def normalized(batch):
        frame = exact(batch)
        return (frame - frame.mean(dim=(0, 2), keepdim=True)) / frame.std(dim=(0, 2), keepdim=True)

    exact = rollout_checks.exact
    monkeypatch.setattr(rollout_checks, "exact", normalized)
    with pytest.raises(AssertionError):
        rollout_checks.test_an_exact_model_scores_zero_and_persistence_does_not()


def test_a_blind_search_for_test_trajectories_in_train_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ups.data.validate._digest", lambda windows: repr(id(windows[0])).encode())
    with pytest.raises(AssertionError):
        leakage_checks.test_a_test_trajectory_that_is_in_train_is_named_with_its_twin(tmp_path)


def test_test_trajectories_in_train_are_said_wherever_scores_are_shown(tmp_path: Path) -> None:
    from ups.data.validate import trajectories_in_train, validate_paths
    from ups.evaluation.report import write_report
    from ups.evaluation.results import task_result
    from ups.evaluation.rollout import references
    from ups.run.scoring import score_lines

    def shown(train: list[int], test: list[int], name: str) -> tuple[str, str]:
        reader = leakage_checks.store(tmp_path / name, train, test)
        plan = RolloutPlan.whole(reader, 1)
        predictors = {"model": persistence, **references(reader, plan)}
        scores = score_task(predictors, reader, rollout_checks.ALONE, plan)
        steps = score_task(predictors, reader, rollout_checks.ALONE, plan, kind="one_step")
        shared = trajectories_in_train(reader, "test")
        results = [task_result(reader, plan, "test", scores, "model", steps, shared)]
        page = write_report(results, {}, title="t", identity={}, config_text="")
        return score_lines(results), page

    for text in shown([1, 2, 3], [4, 2], "leaky.zarr"):
        assert "1 test trajectories of" in text
        assert "1 (train 1); scores on them say nothing" in text
    assert validate_paths(tmp_path / "leaky.zarr").counts.get("leakage") == 1
    for text in shown([1, 2, 3], [4, 5], "sound.zarr"):
        assert "say nothing" not in text
