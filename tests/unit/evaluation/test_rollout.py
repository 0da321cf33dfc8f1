"""What is scored, against what, and how often."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from tests.support.memory_reader import MemoryReader
from ups.errors import DataError
from ups.evaluation.rollout import RolloutPlan, mean_field, references, score_task
from ups.models.stepper import persistence
from ups.spec.batch import RankInfo

ALONE = RankInfo(rank=0, world_size=1)


def exact(batch):
    return batch.state[:, -1].roll(1, -1)


def summaries(reader, predictors, plan, **options):
    return {k: a.summary() for k, a in score_task(predictors, reader, ALONE, plan, **options).items()}


def test_an_exact_model_scores_zero_and_persistence_does_not():
    reader = MemoryReader()
    plan = RolloutPlan.whole(reader, context_frames=2)
    assert plan.num_steps == 4
    scores = summaries(reader, {"exact": exact, "persistence": persistence}, plan)
    assert scores["exact"]["nrmse"] < 1e-6
    assert scores["persistence"]["nrmse"] > 0.1


def test_one_step_scores_predict_each_frame_from_the_true_one_before_it():
    reader = MemoryReader()
    plan = RolloutPlan.whole(reader, context_frames=1)

    def lagging(batch):
        return 0.9 * exact(batch)

    predictors = {"exact": exact, "lagging": lagging, "persistence": persistence}
    step, whole = (summaries(reader, predictors, plan, kind=kind) for kind in ("one_step", "rollout"))
    assert step["exact"]["trmse"] < 1e-6
    assert step["lagging"]["nrmse"] == pytest.approx(0.1, rel=1e-4)
    assert whole["lagging"]["nrmse"] > 2 * step["lagging"]["nrmse"]
    assert whole["persistence"]["trmse"] > step["persistence"]["trmse"] > 0.1


def test_given_frames_are_never_scored():
    """A model that only copies scores the same whether it was given one frame or four: context does not dilute it."""
    reader = MemoryReader(num_frames=8)
    one_step = [
        summaries(reader, {"p": persistence}, RolloutPlan(context, 4, 1))["p"]["nrmse"] for context in (1, 2, 4)
    ]
    assert one_step[0] == one_step[1] == one_step[2] > 0


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_trajectory_is_scored_once_over_the_ranks(world_size):
    reader = MemoryReader(num_trajectories=7)
    plan = RolloutPlan.whole(reader, 1)
    whole = summaries(reader, {"p": persistence}, plan)["p"]
    parts = [score_task({"p": persistence}, reader, RankInfo(r, world_size), plan)["p"] for r in range(world_size)]
    merged = parts[0].merge(parts[1:]).summary()
    assert merged["num_samples"] == 7
    for name, value in whole.items():
        assert merged[name] == pytest.approx(value, rel=1e-12)


def test_swapped_channels_and_normalized_units_are_seen():
    reader = MemoryReader()
    plan = RolloutPlan.whole(reader, 1)

    def swapped(batch):
        return exact(batch).flip(1)

    def normalized(batch):
        frame = exact(batch)
        return (frame - frame.mean()) / frame.std()

    scores = summaries(reader, {"exact": exact, "swapped": swapped, "normalized": normalized}, plan)
    assert scores["exact"]["nrmse"] < 1e-6
    assert scores["swapped"]["nrmse"] > 0.5
    assert scores["normalized"]["nrmse"] > 0.2


def test_a_blow_up_counts_as_failure_and_is_not_dropped():
    def bursting(batch):
        frame = exact(batch)
        frame[0] = math.nan
        return frame

    scores = summaries(MemoryReader(), {"b": bursting}, RolloutPlan(1, 0, 3), batch_size=2)["b"]
    assert scores["num_samples"] == 5
    assert scores["num_blown_up"] == 3
    assert scores["nrmse"] == math.inf


def test_a_steady_task_is_held_against_the_mean_of_the_train_split():
    reader = MemoryReader(num_trajectories=3, points=4, steady=True)
    plan = RolloutPlan.whole(reader, 1)
    torch.testing.assert_close(mean_field(reader), torch.full((1, 4, 4), 2.0, dtype=torch.float64))
    known = references(reader, plan)
    assert list(known) == ["training mean"]
    assert summaries(reader, known, plan)["training mean"]["rmse"] == pytest.approx(2 / 3)


def test_a_start_frame_that_leaves_nothing_is_refused():
    with pytest.raises(DataError, match="leaves nothing to predict"):
        RolloutPlan.whole(MemoryReader(num_frames=3), context_frames=3)


GROWTH = """
from pathlib import Path
from tests.support.memory_reader import MemoryReader
from ups.evaluation.rollout import RolloutPlan, score_task
from ups.models.stepper import persistence
from ups.spec.batch import RankInfo

def peak(num_trajectories):
    reader = MemoryReader(num_trajectories, num_frames=3, points=1024)
    score_task({"p": persistence}, reader, RankInfo(0, 1), RolloutPlan(1, 0, 2), batch_size=50)
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))

peak(100)
few = peak(500)
print(peak(10_000) - few)
"""


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.long
def test_ten_thousand_trajectories_need_no_more_memory_than_a_few_batches():
    fields = 10_000 * 3 * 2 * 1024 * 4
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, timeout=150, check=True)
    assert int(done.stdout) < fields / 5, "what stays of a trajectory is one short row"


def test_no_predictor_is_shown_what_it_is_asked_for():
    for steady in (False, True):
        seen = []

        def curious(batch, seen=seen):
            seen.append(batch)
            return batch.static if batch.task.steady else batch.state[:, -1]

        reader = MemoryReader(num_trajectories=3, steady=steady)
        score_task({"c": curious}, reader, ALONE, RolloutPlan.whole(reader, 1))
        assert all(batch.target.numel() == 0 for batch in seen)
        assert all(batch.state.shape[1] == (0 if steady else 1) for batch in seen)
