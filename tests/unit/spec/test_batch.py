"""A batch moves, is cut and is pickled as one thing; numbers stay on the host."""

from __future__ import annotations

import pickle

import pytest
import torch

from ups.spec.batch import Batch, RankInfo
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

TASK = TaskSpec("t", (FieldSpec("u"), FieldSpec("v", tensor_rank=1)), (AxisSpec("x"), AxisSpec("y")), dt=0.1)


def batch_of(size: int = 6) -> Batch:
    return Batch(
        task=TASK,
        state=torch.arange(size * 2 * 3 * 4 * 5, dtype=torch.float32).reshape(size, 2, 3, 4, 5),
        static=torch.zeros(size, 0, 4, 5),
        target=torch.zeros(size, 0, 4, 5),
        parameters=torch.arange(size, dtype=torch.float32)[:, None],
        dt=torch.full((size,), 0.1),
        coordinates=(torch.arange(4.0, dtype=torch.float64), torch.arange(5.0, dtype=torch.float64)),
        numbers=torch.arange(size) * 10,
        stage_step=3,
    )


def test_cuts_put_together_are_the_whole() -> None:
    batch = batch_of()
    parts = [batch.cut(i, i + 2) for i in (0, 2, 4)]
    for name in ("state", "static", "parameters", "dt", "numbers"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(batch, name))
    assert all(p.num_samples == 2 and p.stage_step == 3 and p.space == (4, 5) for p in parts)


def test_moving_changes_the_floating_point_type_and_leaves_numbers_alone() -> None:
    moved = batch_of().to(torch.device("cpu"), torch.float64)
    assert {moved.state.dtype, moved.parameters.dtype, moved.dt.dtype} == {torch.float64}
    assert moved.numbers.dtype == torch.int64
    away = batch_of().to(torch.device("meta"))
    assert away.state.device.type == "meta"
    assert away.numbers.device.type == "cpu"


def test_a_batch_survives_pickling() -> None:
    again = pickle.loads(pickle.dumps(batch_of()))
    assert again.task == TASK
    assert torch.equal(again.state, batch_of().state)


@pytest.mark.parametrize(("rank", "world_size"), [(1, 1), (-1, 2), (0, 0)])
def test_a_rank_outside_its_world_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="is not in a world"):
        RankInfo(rank, world_size)


def test_a_local_rank_outside_its_host_is_refused() -> None:
    with pytest.raises(ValueError, match="local"):
        RankInfo(0, 4, local_rank=2, local_world_size=2)
