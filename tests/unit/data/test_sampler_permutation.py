"""A keyed permutation is a bijection for every size, needs no memory, can be inverted, and looks random."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ups.data.permutation import MAX_SIZE, Permutation

KEYS = st.integers(0, 2**64 - 1)
PASSES = st.integers(0, 2**40)

PINNED_LARGE = [597515167597, 311516876719, 59810384334, 828351480883]
PINNED_SMALL = [1, 9, 7, 2, 3, 5, 4, 0, 8, 6]


@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 3000), key=KEYS, pass_number=PASSES)
def test_every_number_of_a_small_range_appears_exactly_once(size: int, key: int, pass_number: int) -> None:
    numbers = Permutation(size, key).forward(np.arange(size), pass_number)
    assert np.array_equal(np.sort(numbers), np.arange(size))


def test_every_size_up_to_300_is_a_bijection() -> None:
    for size in range(1, 301):
        numbers = Permutation(size, 7).forward(np.arange(size))
        assert np.array_equal(np.sort(numbers), np.arange(size)), size


@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, MAX_SIZE) | st.integers(1, 10**12), key=KEYS, pass_number=PASSES, data=st.data())
def test_a_large_range_is_a_bijection_because_it_has_an_inverse(
    size: int, key: int, pass_number: int, data: st.DataObject
) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50)), np.int64)
    permutation = Permutation(size, key)
    numbers = permutation.forward(positions, pass_number)
    assert (numbers >= 0).all()
    assert (numbers < size).all()
    assert np.array_equal(permutation.inverse(numbers, pass_number), positions)
    assert np.array_equal(permutation.forward(permutation.inverse(positions, pass_number), pass_number), positions)


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 500), key=KEYS, first=st.integers(0, 1000))
def test_numbers_of_several_passes_at_once_are_those_of_each_pass_alone(size: int, key: int, first: int) -> None:
    permutation = Permutation(size, key)
    positions = np.arange(3 * size)
    together = permutation.forward(positions % size, first + positions // size)
    alone = [permutation.forward(np.arange(size), first + p) for p in range(3)]
    assert np.array_equal(together, np.concatenate(alone))
    assert np.array_equal(permutation.inverse(together, first + positions // size), positions % size)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_of_a_tiny_range_are_equally_likely(size: int) -> None:
    num_passes = 24_000
    numbers = Permutation(size, 1234).forward(
        np.tile(np.arange(size), num_passes), np.repeat(np.arange(num_passes), size)
    )
    counts = Counter(map(tuple, numbers.reshape(num_passes, size).tolist()))
    orders = math.factorial(size)
    assert len(counts) == orders
    expected = num_passes / orders
    chi_square = sum((n - expected) ** 2 for n in counts.values()) / expected
    # Six standard deviations of a chi-square variable: a fixed key, so this never flickers.
    assert chi_square < (orders - 1) + 6 * math.sqrt(2 * (orders - 1))


@pytest.mark.parametrize("size", [512, 1024, 20_480, 10**6])
def test_neighbors_in_the_order_are_unrelated(size: int) -> None:
    steps = []
    for pass_number in range(20):
        numbers = Permutation(size, 99).forward(np.arange(min(size, 20_000)), pass_number).astype(np.float64)
        steps.append(np.corrcoef(numbers[:-1], numbers[1:])[0, 1] * math.sqrt(len(numbers)))
    assert abs(np.mean(steps)) < 1.5
    assert 0.4 < np.std(steps) < 1.8


def test_keys_and_passes_give_different_orders() -> None:
    positions = np.arange(1000)
    orders = [Permutation(1000, key).forward(positions, p) for key in (0, 1, 2**64 - 1) for p in (0, 1, 2**63)]
    assert len({o.tobytes() for o in orders}) == len(orders)


def test_the_order_never_changes_between_versions() -> None:
    assert Permutation(10**12, 42).forward(np.arange(4), 3).tolist() == PINNED_LARGE
    assert Permutation(10, 42).forward(np.arange(10), 3).tolist() == PINNED_SMALL


@pytest.mark.parametrize("size", [0, -1, MAX_SIZE + 1])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="size from 1"):
        Permutation(size, 0)


@pytest.mark.parametrize("position", [-1, 10])
def test_places_outside_the_range_are_refused(position: int) -> None:
    with pytest.raises(ValueError, match="must be in"):
        Permutation(10, 0).forward([position])
