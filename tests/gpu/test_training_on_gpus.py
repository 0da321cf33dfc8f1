"""What only CUDA and NCCL can show: parity, resume, precision and saves on real devices. Skipped where there are none.

The same checks as on the CPU, with the same ranks and launcher; see docs/first-gpu-run.md for the order to run them in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.mixture import MODELS, write_mixture
from tests.support.parity import LIMITS, distance, global_windows, run_variants
from tests.support.toy_training import train
from ups.testing.ranks import Launched, launch

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
one_gpu = pytest.mark.skipif(NUM_GPUS < 1, reason="needs a CUDA device")
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices")
pytestmark = [pytest.mark.gpu, pytest.mark.processes, pytest.mark.timeout(600)]

STEPS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def tasks(folder: Path) -> list[dict[str, Any]]:
    return write_mixture(folder)


def run(
    folder: Path,
    tasks: list[dict[str, Any]],
    ranks: int,
    strategy: str,
    label: str,
    engine: dict[str, Any] | None = None,
    **variant: Any,
) -> list[Any]:
    settings = {"precision": "float64", "optimizer": "adamw", "micro_batch_size": None, "device": "cuda"} | variant
    arguments = {"tasks": tasks, "folder": str(folder), "strategy": strategy, "steps": STEPS, "engine": engine or {}}
    return launch(run_variants, ranks, deadline=300, arguments=arguments | {"label": label, "variants": [settings]})


KINDS: dict[str, dict[str, Any]] = {
    **{model: {"model": model} for model in MODELS},
    "joint": {"joint": True},
    "joint without balance": {"joint": True, "settings": {"balance": 0.0}},
    "ensemble": {"joint": True, "stage": "corrector", "settings": {"kind": "ensemble"}},
    "flow": {"joint": True, "stage": "corrector", "settings": {"kind": "flow"}},
    "distill": {"joint": True, "stage": "distill"},
    "steady": {"joint": True, "stage": "steady"},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@one_gpu
@each_kind
def test_a_gpu_trains_like_a_cpu(folder: Path, tasks: list[dict[str, Any]], kind: str) -> None:
    cpu = run(folder, tasks, 1, "single", "cpu", device="cpu", **KINDS[kind])
    gpu = run(folder, tasks, 1, "single", "gpu", **KINDS[kind])
    assert distance(cpu[0][0]["weights"], gpu[0][0]["weights"]) <= 1e-8


@two_gpus
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("micro_batch_size", [4, 2])
@each_kind
def test_two_gpus_train_like_one(
    folder: Path, tasks: list[dict[str, Any]], strategy: str, micro_batch_size: int, kind: str
) -> None:
    one = run(folder, tasks, 1, "single", "one", **KINDS[kind])
    two = run(folder, tasks, 2, strategy, f"two_{strategy}", micro_batch_size=micro_batch_size, **KINDS[kind])
    assert global_windows(one, 0, STEPS) == global_windows(two, 0, STEPS)
    assert distance(one[0][0]["weights"], two[0][0]["weights"]) <= LIMITS["float64", "adamw"]


@two_gpus
@pytest.mark.parametrize(
    ("strategy", "engine"), [("fsdp", {"offload": True}), ("ddp", {"backend": "gloo"})], ids=["offload", "gloo"]
)
def test_other_ways_to_spread_a_model_change_nothing(
    folder: Path, tasks: list[dict[str, Any]], strategy: str, engine: dict[str, Any]
) -> None:
    one = run(folder, tasks, 1, "single", "one", joint=True)
    two = run(folder, tasks, 2, strategy, "other", engine, joint=True)
    assert distance(one[0][0]["weights"], two[0][0]["weights"]) <= LIMITS["float64", "adamw"]


@two_gpus
def test_muon_works_on_weights_that_are_kept_on_the_host() -> None:
    base = {"device": "cuda", "optimizer": "muon", "precision": "float64", "steps": 4, "learning_rate": 1e-3}
    one = launch(train, 1, deadline=120, arguments=base | {"strategy": "single"})
    two = launch(train, 2, deadline=120, arguments=base | {"strategy": "fsdp", "offload": True})
    assert two[0]["parameters"] == pytest.approx(one[0]["parameters"], rel=1e-6, abs=1e-8)


@pytest.mark.skipif(NUM_GPUS < 4, reason="needs four CUDA devices")
def test_two_copies_of_two_shards_train_like_one(folder: Path, tasks: list[dict[str, Any]]) -> None:
    one = run(folder, tasks, 1, "single", "one", joint=True)
    four = run(folder, tasks, 4, "fsdp", "copies", {"shard_ranks": 2}, joint=True)
    assert distance(one[0][0]["weights"], four[0][0]["weights"]) <= LIMITS["float64", "adamw"]


@one_gpu
def test_the_same_run_twice_on_a_gpu_is_bitwise_equal() -> None:
    trial = {"device": "cuda", "strategy": "single", "steps": 10}
    first, second = (launch(train, 1, deadline=120, arguments=trial) for _ in range(2))
    assert first[0]["hash"] == second[0]["hash"]


@two_gpus
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_run_on_gpus_resumes_bitwise(tmp_path: Path, strategy: str) -> None:
    base = {"device": "cuda", "strategy": strategy, "steps": 9, "interval": 2}
    whole = launch(train, 2, deadline=120, arguments=base | {"run_dir": str(tmp_path / "whole")})
    broken = base | {"run_dir": str(tmp_path / "killed"), "kill_at": 5, "kill_rank": 1}
    with Launched(train, 2, broken) as launched:
        launched.processes[1].join(120)
        assert launched.processes[1].exitcode == -9, launched.logs()
    resumed = launch(train, 2, deadline=120, arguments=base | {"run_dir": str(tmp_path / "killed")})
    assert [r["hash"] for r in resumed] == [r["hash"] for r in whole]


@one_gpu
def test_a_checkpoint_of_a_gpu_run_continues_on_the_cpu(tmp_path: Path) -> None:
    base = {"strategy": "single", "steps": 8, "precision": "float64", "run_dir": str(tmp_path)}
    launch(train, 1, deadline=120, arguments=base | {"device": "cuda", "terminate_at": 3})
    on_cpu = launch(train, 1, deadline=120, arguments=base)
    straight = launch(train, 1, deadline=120, arguments=base | {"run_dir": ""})
    assert on_cpu[0]["losses"] == pytest.approx(straight[0]["losses"][on_cpu[0]["resumed"] :], rel=1e-6)


@two_gpus
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_nan_on_one_gpu_makes_all_ranks_skip_the_step(strategy: str) -> None:
    trial = {"device": "cuda", "strategy": strategy, "nan_at": [2], "nan_rank": 1}
    results = launch(train, 2, deadline=120, arguments=trial)
    assert [r["progress"]["skipped"] for r in results] == [1, 1]


@one_gpu
@pytest.mark.parametrize("option", ["compile", "activation_checkpointing"])
@each_kind
def test_compiled_and_recomputed_blocks_train_alike(
    folder: Path, tasks: list[dict[str, Any]], option: str, kind: str
) -> None:
    plain = run(folder, tasks, 1, "single", "plain", precision="float32", **KINDS[kind])
    other = run(folder, tasks, 1, "single", option, precision="float32", **KINDS[kind], **{option: True})
    assert distance(plain[0][0]["weights"], other[0][0]["weights"]) <= 1e-3


@two_gpus
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_bfloat16_learns_on_gpus(strategy: str) -> None:
    trial = {"device": "cuda", "strategy": strategy, "precision": "bfloat16", "steps": 30}
    losses = launch(train, 2, deadline=120, arguments=trial)[0]["losses"]
    assert losses[-1] < 0.5 * losses[0]
