"""The global batch is a function of (seed, step); ranks, micro-batches and restarts only cut it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ups.config.schema import DataConfig
from ups.data.sampler import Cut, Sampler, TaskStream, build_sampler
from ups.errors import DataError

SIZES = st.lists(st.integers(1, 10**12) | st.integers(1, 200), min_size=1, max_size=10)
STEPS = st.integers(0, 10**9) | st.integers(0, 50)


def sampler_of(sizes: list[int], batch_size: int, blocks_per_step: int, seed: int = 0, **values: object) -> Sampler:
    names = [f"t{i}" for i in range(len(sizes))]
    blocks = [batch_size] * len(sizes)
    return Sampler(names, sizes, seed=seed, batch_sizes=blocks, blocks_per_step=blocks_per_step, **values)  # type: ignore[arg-type]


def cut_of(sampler: Sampler, rank: int, world_size: int, micro_batch_size: int | None = None, **more: Any) -> Cut:
    costs = more.pop("costs", (1,) * len(sampler.batch_sizes))
    return Cut(rank, world_size, sampler.batch_sizes, costs, micro_batch_size, **more)


def global_batch(
    sampler: Sampler, world_size: int, step: int, micro_batch_size: int | None = None, **more: Any
) -> list[tuple[int, int]]:
    """(task, window) of every row, slot by slot, as the world of that size sees it."""
    slots: list[list[tuple[int, int]]] = [[] for _ in range(sampler.blocks_per_step)]
    for rank in range(world_size):
        cut = cut_of(sampler, rank, world_size, micro_batch_size, **more)
        for slot, parts in enumerate(cut.parts(sampler.tasks_of_step(step))):
            for rows in parts:
                block = sampler.block(step, slot, *rows)
                slots[slot] += [(block.task, int(n)) for n in block.numbers]
    return [row for slot in slots for row in slot]


@settings(max_examples=60, deadline=None)
@given(
    sizes=SIZES,
    world_size=st.integers(1, 64),
    batch_size=st.integers(1, 150),
    micro_batch_size=st.sampled_from([1, 2, 5, None]),
    costs=st.lists(st.sampled_from([1, 16, 100, 4096]), min_size=10, max_size=10),
    together=st.booleans(),
    slots=st.integers(1, 10),
    step=STEPS,
    seed=st.integers(0, 2**63 - 1),
)
def test_the_global_batch_is_the_same_for_every_world_size(
    sizes: list[int],
    world_size: int,
    batch_size: int,
    micro_batch_size: int | None,
    costs: list[int],
    together: bool,
    slots: int,
    step: int,
    seed: int,
) -> None:
    sampler = sampler_of(sizes, batch_size, slots, seed)
    alone = global_batch(sampler, 1, step)
    more = {"costs": tuple(costs[: len(sizes)]), "together": together}
    assert global_batch(sampler, world_size, step, micro_batch_size, **more) == alone
    assert len(alone) == slots * batch_size


@settings(max_examples=60, deadline=None)
@given(
    world_size=st.integers(1, 40),
    blocks=st.lists(st.tuples(st.integers(1, 90), st.sampled_from([1, 7, 64, 1000])), min_size=1, max_size=6),
)
def test_ranks_differ_by_no_more_than_the_cost_of_one_window(world_size: int, blocks: list[tuple[int, int]]) -> None:
    sizes, costs = (tuple(each) for each in zip(*blocks, strict=True))
    tasks = tuple(range(len(blocks)))
    work = [
        sum(cost * (stop - start) for cost, parts in zip(costs, cut.parts(tasks), strict=True) for start, stop in parts)
        for cut in (Cut(rank, world_size, sizes, costs) for rank in range(world_size))
    ]
    assert sum(work) == sum(size * cost for size, cost in blocks)
    assert max(work) - min(work) <= max(costs)
    shares = np.diff(Cut(0, world_size, sizes, costs, together=True).bounds(tasks))
    assert (shares.max(1) - shares.min(1) <= 1).all()


def test_costly_windows_go_first_and_cheap_ones_fill_up() -> None:
    cuts = [Cut(rank, 2, (8, 1), (1, 8)) for rank in range(2)]
    assert [cut.parts((0, 1)) for cut in cuts] == [((), ((0, 1),)), (((0, 8),), ())]


def test_a_rank_without_a_window_has_one_pass_that_counts_for_nothing() -> None:
    assert Cut(3, 4, (1, 2), (9, 4)).parts((0, 1)) == ((), ((0, 0),))
    together = [Cut(rank, 4, (1, 6), (9, 4), 1, together=True).parts((0, 1)) for rank in range(4)]
    assert [[len(parts) for parts in blocks] for blocks in together] == [[1, 2]] * 4
    assert together[3] == (((1, 1),), ((5, 5), (5, 6)))


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 300), batch_size=st.integers(1, 64), seed=st.integers(0, 2**63 - 1), first=st.integers(0, 9))
def test_each_pass_visits_each_window_exactly_once(size: int, batch_size: int, seed: int, first: int) -> None:
    sampler = sampler_of([size], batch_size, 1, seed)
    num_steps = -(-(first + 2) * size // batch_size)
    stream = np.concatenate([sampler.block(step, 0).numbers for step in range(num_steps)])
    for p in range(first, first + 2):
        assert np.array_equal(np.sort(stream[p * size : (p + 1) * size]), np.arange(size))


@settings(max_examples=40, deadline=None)
@given(size=st.integers(10**6, 10**12), pass_number=st.integers(1, 10**4), data=st.data())
def test_each_window_of_a_huge_task_has_one_place_in_each_pass(
    size: int, pass_number: int, data: st.DataObject
) -> None:
    number = data.draw(st.integers(0, size - 1))
    stream = TaskStream("huge", size, seed=5)
    (position,) = stream.next_positions(np.array([number]), pass_number * size - 1).tolist()
    assert position // size == pass_number
    assert stream.numbers(position, position + 1).tolist() == [number]


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, world_size=st.integers(1, 64), slots=st.integers(1, 4), step=STEPS)
def test_ranks_are_disjoint(sizes: list[int], world_size: int, slots: int, step: int) -> None:
    sampler = sampler_of(sizes, 2 * world_size, slots)
    seen: set[tuple[int, int, int]] = set()  # (task, pass, window): a task smaller than the batch is passed repeatedly
    for rank in range(world_size):
        parts = cut_of(sampler, rank, world_size).parts(sampler.tasks_of_step(step))
        for slot, ((start, stop),) in enumerate(parts):
            task, position = sampler.locate(step, slot)
            passes = [(position + row) // sizes[task] for row in range(start, stop)]
            windows = sampler.block(step, slot, start, stop).numbers.tolist()
            seen |= {(task, p, w) for p, w in zip(passes, windows, strict=True)}
    assert len(seen) == slots * sampler.batch_sizes[0]


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, start=STEPS, slots=st.integers(1, 5))
def test_a_run_resumed_at_a_step_continues_with_the_next_windows(sizes: list[int], start: int, slots: int) -> None:
    through = sampler_of(sizes, 8, slots, seed=3)
    before = [global_batch(through, 1, start + i) for i in range(4)]
    again = sampler_of(sizes, 8, slots, seed=3)
    assert [global_batch(again, 1, start + i) for i in (2, 3)] == before[2:]


@settings(max_examples=30, deadline=None)
@given(sizes=SIZES, slots=st.integers(1, 5), seed=st.integers(0, 2**63 - 1))
def test_a_run_may_go_from_two_to_four_to_one_rank(sizes: list[int], slots: int, seed: int) -> None:
    sampler = sampler_of(sizes, 8, slots, seed)
    elastic = [global_batch(sampler, world, step, 2) for step, world in enumerate([2, 2, 4, 4, 4, 1, 1])]
    assert elastic == [global_batch(sampler, 1, step) for step in range(7)]


@settings(max_examples=40, deadline=None)
@given(weights=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=10), slots=st.integers(1, 10))
def test_weights_are_respected(weights: list[float], slots: int) -> None:
    sampler = sampler_of([100] * len(weights), 4, slots, shares=weights)
    num_steps = 2000 // slots + 1
    counts = Counter(task for step in range(num_steps) for task in sampler.tasks_of_step(step))
    for task, weight in enumerate(weights):
        assert counts[task] == pytest.approx(
            num_steps * slots * weight / sum(weights), abs=1 + num_steps * slots * (1 + len(weights)) / 4096
        )


@pytest.mark.parametrize("num_tasks", [1, 2, 9, 10])
def test_equal_shares_and_a_slot_for_each_task_put_each_task_once_in_each_step(num_tasks: int) -> None:
    sampler = sampler_of([50] * num_tasks, 4, num_tasks)
    for step in (0, 1, 17, 10**9):
        assert sorted(sampler.tasks_of_step(step)) == list(range(num_tasks))


def test_each_pass_has_its_own_order_and_so_has_each_seed_and_task() -> None:
    orders = {
        TaskStream(name, 1000, seed).numbers(p * 1000, (p + 1) * 1000).tobytes()
        for name in ("a", "b")
        for seed in (0, 1)
        for p in (0, 1)
    }
    assert len(orders) == 8


def test_adding_a_task_leaves_the_order_within_the_others_as_it_was() -> None:
    one = Sampler(["a"], [500], seed=1, batch_sizes=[8], blocks_per_step=1)
    two = Sampler(["b", "a"], [90, 500], seed=1, batch_sizes=[8, 8], blocks_per_step=2)
    assert np.array_equal(one.block(5, 0).numbers, two.block(5, 1).numbers)


def test_a_block_may_be_many_times_larger_than_its_task() -> None:
    numbers = sampler_of([3], 100_000, 1).block(7, 0).numbers
    counts = np.bincount(numbers, minlength=3)
    assert counts.max() - counts.min() <= 2


def test_the_fingerprint_tells_another_order_from_the_same_one() -> None:
    base = sampler_of([10, 20], 10, 2).fingerprint
    assert sampler_of([10, 20], 10, 2).fingerprint == base
    others = [
        sampler_of([10, 21], 10, 2),
        sampler_of([10, 20], 20, 2),
        sampler_of([10, 20], 10, 1),
        sampler_of([10, 20], 10, 2, seed=1),
        sampler_of([10, 20], 10, 2, shares=[1, 2]),
    ]
    assert base not in {s.fingerprint for s in others}


def test_a_recipe_builds_its_sampler() -> None:
    tasks = [{"name": n, "path": f"{n}.zarr"} for n in "abcde"]
    data = DataConfig.model_validate({"tasks": tasks, "batch_size": 6})
    sampler = build_sampler(data, list("abcde"), [10] * 5, seed=0)
    assert (set(sampler.batch_sizes), sampler.blocks_per_step) == ({6}, 4)
    assert sampler.tasks_of_step(0) == (0, 1, 2, 3)
    assert sampler.tasks_of_step(1) == (4, 0, 1, 2)


@pytest.mark.parametrize(
    ("size", "ranks", "limit", "expected"),
    [(32, 2, 5, [4] * 4), (5, 1, 4, [1] * 5), (32, 8, 16, [4]), (7, 2, 3, [2, 2]), (7, 2, None, [4])],
)
def test_a_micro_batch_is_the_largest_part_of_the_share_that_is_allowed(
    size: int, ranks: int, limit: int | None, expected: list[int]
) -> None:
    (parts,) = Cut(0, ranks, (size,), (1,), limit).parts((0,))
    assert [stop - start for start, stop in parts] == expected


def test_each_task_has_blocks_of_its_own_size_and_misses_no_window() -> None:
    sampler = Sampler(["a", "b"], [12, 10], seed=1, batch_sizes=[4, 5], blocks_per_step=2)
    seen: list[list[int]] = [[], []]
    for step in range(6):
        for slot in range(2):
            block = sampler.block(step, slot)
            assert len(block.numbers) == sampler.batch_sizes[block.task]
            seen[block.task] += block.numbers.tolist()
    assert sorted(seen[0]) == sorted([*range(12)] * 2)
    assert sorted(seen[1]) == sorted([*range(10)] * 3)
    equal = Sampler(["a", "b"], [12, 10], seed=1, batch_sizes=[4, 4], blocks_per_step=2)
    assert sampler.fingerprint != equal.fingerprint


def test_an_empty_task_is_refused() -> None:
    with pytest.raises(DataError, match="'t1' has 0 windows"):
        sampler_of([5, 0], 4, 1)
