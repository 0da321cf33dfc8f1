"""A mixture gives every task its share, evenly spread, from any position without counting."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ups.config.schema import DataConfig
from ups.data.sampler import Mixture, shares_of
from ups.errors import ConfigError

SHARES = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=10)


def data_config(num_tasks: int, **values: object) -> DataConfig:
    weights = values.pop("weights", [1.0] * num_tasks)
    tasks = [{"name": f"t{i}", "path": f"t{i}.zarr", "weight": w} for i, w in enumerate(weights)]  # type: ignore[arg-type]
    return DataConfig.model_validate({"tasks": tasks, **values})


def shares_in(mixture: Mixture) -> np.ndarray:  # type: ignore[type-arg]
    """The shares that the cycle really has."""
    return np.array(mixture.quotas) / mixture.cycle


@settings(max_examples=25, deadline=None)
@given(shares=SHARES)
def test_no_prefix_is_a_whole_block_away_from_its_share(shares: list[float]) -> None:
    mixture = Mixture(shares)
    tasks = np.array([mixture.locate(b)[0] for b in range(mixture.cycle)])
    positions = np.arange(1, mixture.cycle + 1)
    for task, share in enumerate(shares_in(mixture)):
        assert np.abs(np.cumsum(tasks == task) - positions * share).max() < 1


@settings(max_examples=25, deadline=None)
@given(shares=SHARES, block=st.integers(0, 20_000), far=st.integers(0, 10**15))
def test_earlier_blocks_are_known_without_counting(shares: list[float], block: int, far: int) -> None:
    mixture = Mixture(shares)
    task, earlier = mixture.locate(block)
    assert earlier == sum(mixture.locate(b)[0] == task for b in range(block))
    far_task, far_earlier = mixture.locate(far + mixture.cycle)
    assert mixture.locate(far) == (far_task, far_earlier - mixture.quotas[far_task])


@settings(max_examples=25, deadline=None)
@given(shares=SHARES)
def test_shares_are_respected_and_nobody_is_left_out(shares: list[float]) -> None:
    mixture = Mixture(shares)
    wanted = np.array(shares) / sum(shares)
    assert min(mixture.quotas) >= 1
    assert mixture.cycle <= 4096
    # One block for rounding, and one for each task that was lifted to its first block.
    assert np.abs(shares_in(mixture) - wanted).max() <= (1 + len(shares)) / mixture.cycle


def test_equal_shares_are_a_round_robin() -> None:
    for num_tasks in (1, 2, 7, 100, 1000):
        mixture = Mixture([1.0] * num_tasks)
        assert [mixture.locate(b)[0] for b in range(2 * num_tasks)] == [*range(num_tasks)] * 2


def test_simple_weights_are_exact() -> None:
    mixture = Mixture([1, 2, 1])
    assert mixture.quotas == (1, 2, 1)
    assert Counter(mixture.locate(b)[0] for b in range(400)) == {0: 100, 1: 200, 2: 100}


def test_a_thousand_tasks_keep_their_shares_within_two_percent_of_the_average_share() -> None:
    rng = np.random.default_rng(0)
    wanted = rng.uniform(0.5, 1.5, 1000)
    wanted /= wanted.sum()
    mixture = Mixture(wanted)
    assert np.abs(shares_in(mixture) - wanted).max() * 1000 < 0.02


def test_a_dominant_task_does_not_bunch() -> None:
    mixture = Mixture([0.5] + [0.5 / 99] * 99)
    tasks = [mixture.locate(b)[0] for b in range(mixture.cycle)]
    assert all(0 in pair for pair in zip(tasks[::2], tasks[1::2], strict=True))


def test_each_mixture_of_a_recipe_gives_its_shares() -> None:
    sizes = [100, 400, 1600]
    assert shares_of(data_config(3), sizes) == pytest.approx([1 / 3] * 3)
    assert shares_of(data_config(3, mixture="proportional"), sizes) == pytest.approx([1 / 21, 4 / 21, 16 / 21])
    assert shares_of(data_config(3, mixture="temperature", temperature=2.0), sizes) == pytest.approx(
        [1 / 7, 2 / 7, 4 / 7]
    )
    assert shares_of(data_config(3, mixture="weights", weights=[3.0, 1.0, 1.0]), sizes) == pytest.approx(
        [0.6, 0.2, 0.2]
    )


def test_a_vanishing_task_still_appears() -> None:
    mixture = Mixture(shares_of(data_config(2, mixture="proportional"), [1, 10**12]))
    assert mixture.quotas[0] == 1


@pytest.mark.parametrize("shares", [[], [0.0], [-1.0, 2.0], [float("nan")], [float("inf"), 1.0], [1.0] * 1001])
def test_impossible_shares_are_refused(shares: list[float]) -> None:
    with pytest.raises(ConfigError):
        Mixture(shares)
