"""Scores of ensembles against numbers computed by hand, and against what is known of Gaussian ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.support.memory_reader import MemoryReader
from ups.evaluation.ensemble import EnsembleScores, score_ensemble
from ups.evaluation.metrics import (
    fair_crps,
    gaussian_crps,
    mean_square_of_mean,
    rank_counts,
    shell_energy,
    spread_skill,
    spread_square,
)
from ups.evaluation.rollout import RolloutPlan
from ups.formats.base import Array
from ups.spec.batch import Batch, RankInfo


def ensemble(*values: float) -> torch.Tensor:
    """One sample of one channel at one point: (1, M, 1, 1)."""
    return torch.tensor(values).reshape(1, -1, 1, 1)


def truth(value: float) -> torch.Tensor:
    return torch.full((1, 1, 1), value)


def test_the_score_of_three_members_by_hand() -> None:
    # |1 - 2| + |4 - 2| + |2.5 - 2| = 3.5; pairs 3 + 1.5 + 1.5 = 6: 3.5 / 3 - 6 / 6
    assert fair_crps(ensemble(1.0, 4.0, 2.5), truth(2.0)).item() == pytest.approx(3.5 / 3 - 1.0)
    assert fair_crps(ensemble(3.0, 3.0), truth(2.0)).item() == pytest.approx(1.0)


def test_spread_and_error_of_the_mean_by_hand() -> None:
    members = ensemble(1.0, 4.0, 2.5)
    assert spread_square(members).item() == pytest.approx(2.25)
    assert mean_square_of_mean(members, truth(2.0)).item() == pytest.approx(0.25)
    ratio = spread_skill(torch.tensor(2.25), torch.tensor(0.25), 3)
    assert ratio.item() == pytest.approx(3.0 * math.sqrt(4 / 3))


def test_ranks_by_hand_and_equal_values_share_a_point() -> None:
    members = torch.tensor([[0.0, 0.0, 5.0], [1.0, 2.0, 5.0]]).reshape(1, 2, 1, 3)
    wanted = torch.tensor([0.5, 3.0, 5.0]).reshape(1, 1, 3)
    # above one, above both, equal to both: a third of a point for each of the three ranks
    torch.testing.assert_close(rank_counts(members, wanted), torch.tensor([1 / 3, 4 / 3, 4 / 3], dtype=torch.float64))


def test_the_score_of_a_gaussian_is_that_of_many_draws_and_of_a_point_the_absolute_error() -> None:
    assert gaussian_crps(truth(0.0), truth(0.0), torch.ones(1, 1)).item() == pytest.approx(
        (math.sqrt(2) - 1) / math.sqrt(math.pi)
    )
    assert gaussian_crps(truth(1.5), truth(0.0), torch.full((1, 1), 1e-9)).item() == pytest.approx(1.5)
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(1, 4000, 1, 1, generator=generator) * 2.0 + 1.0
    crps = gaussian_crps(truth(1.0), truth(0.3), torch.full((1, 1), 2.0)).item()
    assert fair_crps(draws, truth(0.3)).item() == pytest.approx(crps, rel=0.05)


def test_members_and_truth_that_are_alike_have_ratio_one_and_flat_ranks() -> None:
    generator = torch.Generator().manual_seed(1)
    draws = torch.randn(1, 5, 1, 200_000, generator=generator)
    members, wanted = draws[:, :4], draws[:, 4]
    ratio = spread_skill(spread_square(members), mean_square_of_mean(members, wanted), 4)
    assert ratio.item() == pytest.approx(1.0, rel=0.02)
    shares = rank_counts(members, wanted) / 200_000
    torch.testing.assert_close(shares, torch.full((5,), 0.2, dtype=torch.float64), atol=0.01, rtol=0)


def test_points_count_by_their_weights() -> None:
    members = torch.tensor([[0.0, 1.0], [0.0, 3.0]]).reshape(1, 2, 1, 2)
    wanted = torch.tensor([0.0, 4.0]).reshape(1, 1, 2)
    # 0 at the first point; |1 - 4| and |3 - 4| less half of 2 at the second
    weights = torch.tensor([0.5, 1.5])
    assert fair_crps(members, wanted).item() == pytest.approx(0.5)
    assert fair_crps(members, wanted, weights).item() == pytest.approx(0.75)


def test_scores_are_relative_to_the_trajectory_and_means_over_samples_and_steps() -> None:
    scores = EnsembleScores(2, 7, 2, ("u",), None)
    center, wanted, scale = torch.zeros(2, 1, 1), torch.full((2, 1, 1), 4.0), torch.full((2, 1), 2.0)
    # in units of the trajectory the truth is 2: members 1 and 4 first, then 2 and 2
    for step, values in enumerate(([2.0, 8.0], [4.0, 4.0])):
        members = torch.tensor(values).reshape(1, 2, 1, 1).expand(2, 2, 1, 1)
        for name, by_sample in scores.add(step, members, center, wanted, scale).items():
            for sample in range(2):
                scores.means[name][sample] = scores.means[name].get(sample, 0.0) + float(by_sample[sample]) / 2
    result = scores.result()
    summary = result["summary"]
    assert summary["crps"] == pytest.approx(((1 + 2) / 2 - 3 / 2) / 2)
    assert summary["absolute_error"] == pytest.approx(2.0)
    assert summary["mean_rmse"] == pytest.approx((0.5 + 0.0) / 2)
    assert result["curves"]["spread"] == pytest.approx([math.sqrt(4.5), 0.0])
    assert summary["spread_skill"] == pytest.approx(math.sqrt(1.5) * math.sqrt(4.5 / 0.25))
    # between both members, then equal to both
    assert result["ranks"] == pytest.approx([1 / 6, 4 / 6, 1 / 6])


def test_a_member_that_blew_up_is_not_left_out() -> None:
    members = ensemble(1.0, float("nan"))
    assert math.isinf(fair_crps(members, truth(0.0)).item())
    assert math.isinf(spread_square(members).item())


class Constant(MemoryReader):
    """Trajectory n is n + 1 everywhere: one of 2 frames, one of 10."""

    def __init__(self) -> None:
        super().__init__(2, 10)
        self._frames_of = {"test": np.array([2, 10])}

    def _frames(self, split: str, trajectory: int, start: int, stop: int, step: int) -> Array:
        return np.full((stop - start, 2, self.points), trajectory + 1.0, np.float32)


class Wrong:
    """Two members like the central one, wrong by all of the first trajectory and by a tenth of the second."""

    members, seed = 2, 0

    def __call__(self, batch: Batch) -> torch.Tensor:
        last = batch.state[:, -1]
        return torch.where(last < 1.5, 2.0, 1.1) * last

    @property
    def stepper(self) -> Wrong:
        return self


def test_trajectories_of_unequal_length_count_alike_in_every_score() -> None:
    reader = Constant()
    plan = RolloutPlan.whole(reader, 1, split="test")
    result = score_ensemble(Wrong(), reader, RankInfo(0, 1), plan, kind="one_step").result()  # type: ignore[arg-type]
    for name in ("crps", "absolute_error", "gaussian", "mean_rmse"):
        assert result["summary"][name] == pytest.approx((1 + 0.1) / 2), name
    # The last step is of the long one alone.
    truth_there = shell_energy(torch.full((1, 1, 2, 16), 2.0))[0, 0]
    torch.testing.assert_close(torch.tensor(result["spectra"]["truth"]), truth_there, check_dtype=False)
