"""Muon on sharded matrices is Muon on whole ones; its checkpoints load under another strategy, and resume bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.toy import ToyStage
from tests.support.toy_training import Trial, engine_config, train
from ups.config.stage import OptimConfig
from ups.distributed.runtime import SHARD, Runtime
from ups.distributed.strategies import local, spread
from ups.testing.ranks import Launched, launch
from ups.training.optim import build_optimizer, set_learning_rate, trainable

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

# Rows of the second layer do not divide by two ranks.
WIDTH = 5


def updates(arguments: dict[str, Any]) -> list[list[float]]:
    """Movement of every parameter in three steps with given gradients."""
    config = engine_config(Trial(precision="float64", strategy=arguments["strategy"]))
    config = config.model_copy(update=arguments.get("engine", {}))
    with Runtime.start(config) as runtime:
        stage = ToyStage(width=WIDTH)
        gradients = _gradients(stage)
        spread(stage, runtime, config)
        parameters = trainable(stage.named_parameters())
        before = {name: _whole(p) for name, p in parameters.items()}
        optimizer = build_optimizer(OptimConfig(type="muon"), parameters, stage.matrices())
        for step in range(3):
            set_learning_rate(optimizer, 1e-3)
            for name, parameter in parameters.items():
                given = gradients[name][step]
                grad = torch.zeros_like(parameter)
                local(grad).copy_(_mine(given, parameter))
                parameter.grad = grad
            optimizer.step()
        return [(_whole(p) - before[name]).flatten().tolist() for name, p in parameters.items()]


def _gradients(stage: ToyStage) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        n: torch.randn((3, *p.shape), generator=generator, dtype=torch.float64) for n, p in stage.named_parameters()
    }


def _whole(tensor: Tensor) -> Tensor:
    found = tensor.detach()
    return (found.full_tensor() if hasattr(found, "full_tensor") else found).clone()


def _mine(whole: Tensor, like: Tensor) -> Tensor:
    if not hasattr(like, "placements"):
        return whole
    mesh = like.device_mesh if like.device_mesh.ndim == 1 else like.device_mesh[SHARD]
    rank, ranks = mesh.get_local_rank(), mesh.size()
    parts = whole.chunk(ranks)
    return parts[rank] if rank < len(parts) else whole[:0]


@pytest.mark.parametrize(("ranks", "engine"), [(2, {}), (4, {"shard_ranks": 2})], ids=["shards", "copies of shards"])
def test_a_sharded_matrix_moves_as_the_whole_one_does(ranks: int, engine: dict[str, Any]) -> None:
    alone = launch(updates, 1, arguments={"strategy": "single"})[0]
    for found in launch(updates, ranks, arguments={"strategy": "fsdp", "engine": engine}):
        for mine, wanted in zip(found, alone, strict=True):
            a, b = torch.tensor(mine, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64)
            assert (a - b).norm() <= 1e-10 * b.norm()


def test_many_ranks_train_like_one() -> None:
    base = {"optimizer": "muon", "precision": "float64", "steps": 4, "learning_rate": 1e-3, "width": 6}
    alone = launch(train, 1, arguments=base | {"strategy": "single"})[0]
    for strategy in ("ddp", "fsdp"):
        for result in launch(train, 2, arguments=base | {"strategy": strategy, "micro_batch_size": 2}):
            assert result["parameters"] == pytest.approx(alone["parameters"], rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2)])
def test_a_killed_run_resumes_bitwise(strategy: str, ranks: int, tmp_path: Path) -> None:
    base = {"optimizer": "muon", "strategy": strategy, "steps": 7, "learning_rate": 1e-3, "width": 6}
    whole = launch(train, ranks, arguments=base | {"run_dir": str(tmp_path / "whole")})
    run_dir = str(tmp_path / "killed")
    with Launched(train, ranks, base | {"run_dir": run_dir, "kill_at": 5}) as launched:
        launched.processes[0].join(300)
    resumed = launch(train, ranks, arguments=base | {"run_dir": run_dir})
    assert all(0 < r["resumed"] <= 5 for r in resumed)
    assert [r["hash"] for r in resumed] == [r["hash"] for r in whole]


def test_a_checkpoint_of_ddp_goes_on_under_fsdp(tmp_path: Path) -> None:
    base = {"optimizer": "muon", "precision": "float64", "steps": 6, "learning_rate": 1e-3, "width": 6}
    straight = launch(train, 1, arguments=base | {"strategy": "single"})[0]
    stored = base | {"run_dir": str(tmp_path), "asynchronous": False}
    launch(train, 2, arguments=stored | {"strategy": "ddp", "terminate_at": 3})
    results = launch(train, 2, arguments=stored | {"strategy": "fsdp"})
    assert results[0]["resumed"] in (3, 4)
    assert results[0]["parameters"] == pytest.approx(straight["parameters"], rel=1e-6, abs=1e-8)
