"""Collectives compared between ranks: the rank that left the pattern is named, also where there is no majority."""

import pytest

from ups.record.blackbox import Mark, Phase, Record
from ups.supervise.first_cause import CollectiveLog, Mismatch

PATTERN = ("reduce(gradients)", "all_reduce(status)")


def feed(
    world: int, steps: int, skip: tuple[int, int, int] | None = None, rename: tuple[int, int] | None = None
) -> Mismatch | None:
    """Ranks run in lockstep, with a third collective every five steps; `skip` is (rank, step, position)."""
    log = CollectiveLog()
    queues: list[list[tuple[int, str]]] = []
    for rank in range(world):
        queue = []
        for step in range(steps):
            for position, name in enumerate(PATTERN if step % 5 else (*PATTERN, "save")):
                if skip == (rank, step, position):
                    continue
                queue.append((step, f"{name}[5]" if rename == (rank, step) and position == 0 else name))
        queues.append(queue)
    for number in range(1, max(len(queue) for queue in queues) + 1):
        for rank, queue in enumerate(queues):
            if number <= len(queue):
                step, name = queue[number - 1]
                record = Record(number, number, Phase.SYNC, step, 0, number, 0, 1, 0.0, 0.0, 0, Mark.NONE)
                mismatch = log.add(rank, record, name)
                if mismatch is not None:
                    return mismatch
    return None


def test_ranks_in_step_are_never_accused() -> None:
    assert feed(4, 500) is None


def test_a_rank_that_skips_one_is_named_by_the_majority() -> None:
    mismatch = feed(4, 10, skip=(2, 6, 0))
    assert mismatch is not None
    assert (mismatch.rank, mismatch.record.step) == (2, 6)
    assert mismatch.expected == "reduce(gradients)"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", [11, 13, 14, 15, 16])
@pytest.mark.parametrize("position", [0, 1])
def test_of_two_ranks_the_one_that_left_the_habit_of_both_is_named(rank: int, step: int, position: int) -> None:
    mismatch = feed(2, 30, skip=(rank, step, position))
    assert mismatch is not None
    assert mismatch.rank == rank


def test_another_shape_is_another_operation() -> None:
    for rank in (0, 1):
        wrong = feed(2, 10, rename=(rank, 4))
        assert wrong is not None
        assert (wrong.rank, wrong.operation, wrong.expected) == (rank, "reduce(gradients)[5]", "reduce(gradients)")


def test_collectives_without_a_name_are_not_compared() -> None:
    log = CollectiveLog()
    for rank, step in ((0, 1), (1, 2)):
        record = Record(1, 1, Phase.SYNC, step, 0, 7, 0, 0, 0.0, 0.0, 0, Mark.NONE)
        assert log.add(rank, record, "") is None
