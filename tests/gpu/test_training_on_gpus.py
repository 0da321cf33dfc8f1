"""What only CUDA and NCCL can show: parity, resume, precision, saves and faults on real devices. Never run so far: they
are skipped where there are none.

The same checks as on the CPU, with the same ranks and launcher; see docs/first-gpu-run.md for the order to run them in.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.mixture import MODELS, write_mixture
from tests.support.parity import LIMITS, distance, global_windows, run_variants
from tests.support.toy_training import train
from ups.config.schema import EngineConfig
from ups.distributed.runtime import Runtime
from ups.inference.simulator import Simulator
from ups.record.run_dir import RunDir
from ups.supervise.attempt import FLIGHT_PREFIX
from ups.supervise.fault import Fault
from ups.supervise.run_file import RunFile
from ups.supervise.why import explain
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


def lack_memory(arguments: dict[str, Any]) -> None:
    """A step of two ranks, before which the second one asks for more memory than there is."""
    with Runtime.start(EngineConfig(device="cuda", timeout_seconds=20)) as runtime:
        if runtime.rank == 1:
            torch.empty(2**50, dtype=torch.uint8, device=runtime.device)
        dist.all_reduce(torch.ones(4, device=runtime.device))
        torch.cuda.synchronize()


@two_gpus
def test_no_memory_on_one_gpu_ends_all_ranks(tmp_path: Path) -> None:
    with Launched(lack_memory, 2, {}) as launched:
        codes = launched.wait(90)
        assert all(codes), launched.logs()
        assert "OutOfMemoryError" in launched.logs()


def hang(arguments: dict[str, Any]) -> None:
    """Three collectives of two ranks; the second rank does not come to the third."""
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = arguments["prefix"]
    with Runtime.start(EngineConfig(device="cuda", timeout_seconds=10)) as runtime:
        numbers = torch.ones(4, device=runtime.device)
        for _ in range(3 - runtime.rank):
            dist.all_reduce(numbers)
        torch.cuda.synchronize()
        time.sleep(60)


@two_gpus
def test_a_hang_inside_nccl_is_dumped_and_explained(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    file = RunFile(run_dir)
    file.begin(ranks=2, max_restarts=0, box_root=tmp_path)
    fault = Fault(0, 1, 2, "h", 7, "sync", "stalled", log="logs/attempt_0/rank_00001.err")
    file.document["attempts"].append({"number": 0, "faults": [fault.document()]})
    folder = RunDir(run_dir).failures_of(0)
    folder.mkdir(parents=True)
    with Launched(hang, 2, {"prefix": str(folder / FLIGHT_PREFIX)}) as launched:
        codes = launched.wait(120)
        assert any(codes), launched.logs()
    text = explain(run_dir, file.document)
    assert "from 2 of 2 ranks" in text, (text, launched.logs())
    assert "did not begin collective 3: rank 1" in text


@one_gpu
@pytest.mark.parametrize("task", ["advection1d", "burgers1d", "ks1d", "ns2d", "euler1d", "swe2d", "darcy2d"])
def test_a_shipped_model_rolls_out_on_a_gpu_as_on_a_cpu(task: str) -> None:
    results = []
    for device in ("cpu", "cuda"):
        simulator = Simulator.load("ups-joint", device=device)
        spec, space = simulator.tasks[task], simulator._bundle.info.space(task)
        draw = np.random.default_rng(0)
        given: dict[str, Any] = {
            role: 1.0 + 0.1 * draw.standard_normal((spec.num_channels(role), *space)).astype(np.float32)
            for role in ("state", "static")
            if spec.num_channels(role) and not (spec.steady and role == "state")
        }
        numbers = {p.name: (p.minimum + p.maximum) / 2 for p in spec.parameters}
        results.append(
            simulator.rollout(
                steps=1 if spec.steady else 4, parameters=numbers, task=task, level=0.9, on_doubt="ignore", **given
            )
        )
    for name, variable in results[0].data_vars.items():
        if variable.dtype.kind == "f":
            np.testing.assert_allclose(results[1][name].values, variable.values, rtol=2e-3, atol=2e-3, err_msg=name)


@one_gpu
def test_gradients_flow_through_a_simulator_on_a_gpu() -> None:
    gradients = []
    for device in ("cpu", "cuda"):
        module = Simulator.load("ups-joint", device=device).module.double()
        points = torch.linspace(0, 2 * torch.pi, 128, dtype=torch.float64)
        state = torch.sin(points)[None, None].to(device).requires_grad_()
        module(state, {"nu": 0.01}, steps=3, task="burgers1d").square().sum().backward()
        assert state.grad is not None
        gradients.append(state.grad.cpu())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-8, atol=1e-8)
