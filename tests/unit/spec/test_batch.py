"""A batch moves, is cut and is pickled as one thing; numbers stay on the host."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from ups.spec.batch import Batch, RankInfo
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

TASK = TaskSpec("t", (FieldSpec("u"), FieldSpec("v", tensor_rank=1)), (AxisSpec("x"), AxisSpec("y")), dt=0.1)


def batch_of(size: int = 6) -> Batch:
    return Batch.of(
        TASK,
        state=torch.arange(size * 2 * 3 * 4 * 5, dtype=torch.float32).reshape(size, 2, 3, 4, 5),
        parameters=torch.arange(size, dtype=torch.float32)[:, None],
        dt=0.1,
        coordinates=(np.arange(4.0), np.arange(5.0)),
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


def whole_batch() -> Batch:
    """With a tensor of every kind."""
    return replace(batch_of(), noise=torch.randn(6, 2), extra={"latents": torch.randn(6, 3)})


def tensors_of(batch: Batch) -> dict[str, torch.Tensor]:
    """Every tensor with a row for each sample, looked for in the fields of the class."""
    values = {f.name: getattr(batch, f.name) for f in fields(Batch)}
    return {name: x for name, x in {**values, **batch.extra}.items() if isinstance(x, torch.Tensor)}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: b.cut(2, 5), lambda x: x[2:5]),
        (lambda b: b.repeated(3), lambda x: x.repeat_interleave(3, dim=0)),
        (lambda b: b.to(torch.device("cpu"), torch.float64), lambda x: x.double() if x.is_floating_point() else x),
    ],
    ids=["cut", "repeated", "to"],
)
def test_no_tensor_of_a_batch_is_forgotten(
    change: Callable[[Batch], Batch], expected: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    before, after = tensors_of(whole_batch()), tensors_of(change(whole_batch()))
    assert before.keys() == after.keys() >= {"noise", "latents", "numbers", "state", "target"}
    torch.manual_seed(0)
    batch = whole_batch()
    for name, tensor in tensors_of(batch).items():
        assert torch.equal(tensors_of(change(batch))[name], expected(tensor)), name


def test_every_floating_point_tensor_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: (pinned.append(x), x)[1])  # no accelerator is needed
    batch = whole_batch()
    batch.pin_memory()
    wanted = [x for x in tensors_of(batch).values() if x.is_floating_point()] + list(batch.coordinates)
    assert {id(x) for x in pinned} == {id(x) for x in wanted}


def test_roles_that_are_left_out_have_no_channels() -> None:
    steady = replace(TASK, fields=(FieldSpec("a", role="static"), FieldSpec("u", role="target")), steady=True, dt=0.0)
    static = np.zeros((2, 1, 4, 5), np.float32)
    static.flags.writeable = False  # as coordinates of a reader
    batch = Batch.of(steady, static=static, dt=0.0, coordinates=(np.arange(4.0), np.arange(5.0)))
    assert batch.state.shape == (2, 0, 0, 4, 5)
    assert batch.target.shape == (2, 0, 4, 5)
    assert batch.parameters.shape == (2, 0)
    assert batch.numbers.tolist() == [0, 1]
    assert batch.dt.shape == (2,)


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
