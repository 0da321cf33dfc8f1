"""A draw depends on its key and its window, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ups.spec.keyed import key_of, keyed_uniform, mix

NUMBERS = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=30)


@given(key=st.integers(0, 2**64 - 1), numbers=NUMBERS, num_draws=st.integers(1, 5))
def test_a_window_draws_the_same_whatever_else_is_in_its_batch(key: int, numbers: list[int], num_draws: int) -> None:
    together = keyed_uniform(key, numbers, num_draws)
    assert together.shape == (len(numbers), num_draws)
    for row, number in zip(together, numbers, strict=True):
        assert np.array_equal(keyed_uniform(key, [number], num_draws)[0], row)
        assert np.array_equal(keyed_uniform(key, [number], num_draws + 3)[0, :num_draws], row)


def test_draws_are_uniform_and_unrelated() -> None:
    draws = keyed_uniform(key_of(0, "noise", 3), np.arange(50_000), 4)
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.apply_along_axis(lambda column: np.histogram(column, 20, (0, 1))[0], 0, draws)
    assert (np.abs(counts - 2500) < 6 * np.sqrt(2500)).all()
    between_columns = np.corrcoef(draws.T)
    between_rows = np.corrcoef(draws[:-1, 0], draws[1:, 0])
    assert np.abs(between_columns - np.eye(4)).max() < 0.03
    assert abs(between_rows[0, 1]) < 0.03


def test_consecutive_steps_are_unrelated() -> None:
    steps = np.array([keyed_uniform(key_of(0, "jitter", step), [7])[0, 0] for step in range(5000)])
    assert abs(np.corrcoef(steps[:-1], steps[1:])[0, 1]) < 0.06
    assert abs(steps.mean() - 0.5) < 0.03


def test_keys_are_stable_over_versions_and_machines() -> None:
    assert key_of(0, "window order", "burgers1d") == 13_324_368_201_070_126_168
    assert keyed_uniform(1, [0, 10**12], 2).tolist() == [
        [0.2558852031320078, 0.08832385701148338],
        [0.37111198796219425, 0.5451926168250275],
    ]


def test_every_part_of_a_key_counts() -> None:
    keys = {
        key_of(0),
        key_of(1),
        key_of(0, "a"),
        key_of(0, "b"),
        key_of(0, "a", 1),
        key_of(0, "a", 11),
        key_of(0, "a1"),
        key_of(0, "a", 1, 1),
    }
    assert len(keys) == 8


@given(words=st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=50, unique=True))
def test_mixing_loses_nothing(words: list[int]) -> None:
    assert len(np.unique(mix(np.array(words, np.uint64)))) == len(words)


def test_one_changed_bit_changes_half_of_the_result() -> None:
    words = np.arange(1, 2001, dtype=np.uint64)
    for bit in (0, 17, 40, 63):
        changed = mix(words) ^ mix(words ^ np.uint64(1 << bit))
        assert np.mean([int(c).bit_count() for c in changed]) == pytest.approx(32, abs=1)
