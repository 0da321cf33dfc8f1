"""What ranks read together is the global batch, once; orders differ by pass; draws belong to windows."""

import numpy as np
import pytest

from ups.config.recipe import resolve
from ups.config.schema import Recipe
from ups.data.sampler import Sampler
from ups.doctor.probes.data import workers_to_try
from ups.doctor.probes.parity import check_once, check_scores, same_rates
from ups.doctor.probes.ranks import check_batch, check_draws, draws, same_in_every_pass
from ups.run.preflight import CheckFailed
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

RING = TaskSpec("ring", (FieldSpec("u"),), (AxisSpec("x"),), dt=0.1, symmetries=("translation",))
BOX = TaskSpec("box", (FieldSpec("u"),), (AxisSpec("x", boundary="wall"),), dt=0.1)


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return resolve("recipes/tiny.yaml", ["data.batch_size=8"]).recipe


def seen(numbers: list[int], drawn: list[int] | None = None) -> dict:
    return {(0, 0): (0, numbers, drawn if drawn is not None else [7 * n for n in numbers])}


def test_a_fair_cut_is_accepted(recipe: Recipe) -> None:
    check_batch(recipe.data.batch_sizes, [seen([0, 1, 2, 3]), seen([4, 5, 6, 7])], seen(list(range(8))))
    check_batch(recipe.data.batch_sizes, [seen([0, 1, 2]), seen([3, 4, 5, 6, 7]), {}], seen(list(range(8))))


def test_ranks_may_read_the_same_windows_if_there_are_no_others(recipe: Recipe) -> None:
    check_batch(recipe.data.batch_sizes, [seen([0, 0, 0, 0]), seen([0, 0, 0, 0])], seen([0] * 8))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([[0, 1, 2, 3], [0, 1, 2, 3]], "same windows"),
        ([[0, 1, 2, 3], [3, 5, 6, 7]], "3] too often, [4] missing"),
        ([[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]], "16 windows over 2 ranks"),
    ],
)
def test_an_unfair_cut_is_refused(recipe: Recipe, ranks: list[list[int]], words: str) -> None:
    with pytest.raises(CheckFailed) as caught:
        check_batch(recipe.data.batch_sizes, [seen(r) for r in ranks], seen(list(range(8))))
    assert words in caught.value.message


def test_draws_that_depend_on_the_place_in_a_batch_are_refused() -> None:
    reference = seen([0, 1, 2, 3, 4, 5, 6, 7], [11, 12, 13, 14, 15, 16, 17, 18])
    check_draws([seen([0, 1, 2, 3], [11, 12, 13, 14]), seen([4, 5, 6, 7], [15, 16, 17, 18])], reference)
    with pytest.raises(CheckFailed, match="ranks 0 and 1 draw the same"):
        check_draws([seen([0, 1, 2, 3], [11, 12, 13, 14]), seen([4, 5, 6, 7], [11, 12, 13, 14])], reference)
    with pytest.raises(CheckFailed, match="window 4 of step 0 has another random draw on rank 1"):
        check_draws([seen([0, 1, 2, 3], [11, 12, 13, 14]), seen([4, 5, 6, 7], [99, 16, 17, 18])], reference)


@pytest.mark.parametrize("task", [RING, BOX])
def test_draws_are_read_as_training_draws_them(task: TaskSpec) -> None:
    whole = draws(task, np.arange(40), step=3, seed=1)
    assert whole[10:20] == draws(task, np.arange(10, 20), step=3, seed=1)
    assert len(set(whole)) > 30
    assert whole != draws(task, np.arange(40), step=4, seed=1)


def test_every_pass_has_an_order_of_its_own() -> None:
    sampler = Sampler(["a", "b"], [1000, 37], seed=5, batch_sizes=[8, 8], blocks_per_step=2, shares=[3.0, 1.0])
    for task, size in ((0, 1000), (1, 37)):
        assert sorted(sampler.windows(task, 2 * size, 3 * size)) == list(range(size))
        assert not same_in_every_pass(sampler, task, size)


def test_scores_that_count_a_sample_twice_or_never_are_refused() -> None:
    check_once("wave", [[0, 2, 4], [1, 3]], 5)
    with pytest.raises(CheckFailed, match="and 6 were"):
        check_once("wave", [[0, 2, 4], [0, 1, 3]], 5)
    with pytest.raises(CheckFailed, match=r"\[4\] never"):
        check_once("wave", [[0, 2], [1, 3]], 5)


def test_scores_of_ranks_must_be_those_of_one() -> None:
    check_scores([{"nrmse": 0.5}, {"nrmse": 0.5}], {"nrmse": 0.5 + 1e-9})
    with pytest.raises(CheckFailed, match="on rank 1 of 2"):
        check_scores([{"nrmse": 0.5}, {"nrmse": 0.6}], {"nrmse": 0.5})
    with pytest.raises(CheckFailed):
        check_scores([{"nrmse": float("nan")}], {"nrmse": 0.5})


def test_learning_rates_are_compared_step_by_step() -> None:
    assert same_rates([[1e-3, 1e-3], [9e-4, 9e-4]], [[1e-3, 1e-3], [9e-4, 9e-4]])
    assert not same_rates([[1e-3], [2e-3]], [[1e-3], [1e-3]])


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
@pytest.mark.parametrize("wanted", [0, 2, 16])
def test_every_worker_reads_from_every_task(blocks: int, wanted: int) -> None:
    workers = workers_to_try(wanted, blocks)
    assert 2 <= workers <= 7
    assert {(n % workers, n % blocks) for n in range(workers * blocks)} == {
        (w, b) for w in range(workers) for b in range(blocks)
    }
