"""The runtime never replaces what was asked for by something slower, and leaves the process as it found it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

from ups.config.schema import EngineConfig
from ups.distributed import runtime as runtime_module
from ups.distributed.environment import RankEnvironment
from ups.distributed.runtime import Runtime, choose_backend, choose_device, choose_strategy, make_mesh, processors_near
from ups.distributed.strategies import compile_unit
from ups.errors import DiskFullError, DistributedError, MachineError

ALONE = RankEnvironment()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_that_is_not_there_is_an_error_and_not_a_slow_run() -> None:
    with pytest.raises(MachineError, match="torch finds no CUDA device"):
        choose_device("cuda", ALONE)
    assert choose_device("auto", ALONE) == torch.device("cpu")


def test_single_on_two_ranks_is_refused_because_they_would_train_apart() -> None:
    two = RankEnvironment(0, 2, 0, 2, launched=True)
    with pytest.raises(DistributedError, match="they would train apart"):
        choose_strategy("single", two)
    assert choose_strategy("auto", two) == "ddp"
    assert choose_strategy("auto", ALONE) == "single"


def test_a_copy_must_be_spread_over_a_number_that_divides_the_ranks() -> None:
    with pytest.raises(DistributedError, match="shard_ranks is 3, which does not divide 4 ranks"):
        make_mesh("cpu", 4, 3)


def test_gloo_may_be_asked_for_and_nccl_only_on_cuda() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert choose_backend(EngineConfig(), cpu) == "gloo"
    assert choose_backend(EngineConfig(backend="gloo"), cuda) == "gloo"
    offloaded = EngineConfig(backend="gloo", strategy="fsdp", offload=True)
    assert choose_backend(offloaded, cuda) == "cpu:gloo,cuda:gloo"
    assert choose_backend(offloaded, cpu) == "gloo"
    with pytest.raises(MachineError, match="works on the CPU"):
        choose_backend(EngineConfig(backend="nccl"), cpu)


@pytest.mark.parametrize("settings", [{"shard_ranks": 2}, {"offload": True}])
def test_settings_of_shards_need_shards(settings: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="strategy is 'ddp'"):
        EngineConfig.model_validate({"strategy": "ddp", **settings})


def test_one_rank_needs_no_process_group() -> None:
    with Runtime.start(EngineConfig(device="cpu"), ALONE) as runtime:
        assert (runtime.rank, runtime.world_size, runtime.strategy) == (0, 1, "single")
        assert not dist.is_initialized()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_other_strategies_work_on_one_rank_without_a_launcher(strategy: str) -> None:
    with Runtime.start(EngineConfig(device="cpu", strategy=strategy), ALONE) as runtime:  # type: ignore[arg-type]
        assert runtime.mesh is not None
        assert dist.get_world_size(runtime.control_group) == 1
    assert not dist.is_initialized()


def test_threads_and_kernels_are_put_back() -> None:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with Runtime.start(EngineConfig(device="cpu", threads=1), ALONE):
        assert torch.get_num_threads() == 1
        assert torch.are_deterministic_algorithms_enabled()
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def test_numbers_too_small_for_full_precision_are_zero_inside() -> None:
    """Each of them costs a hundred times as much as another number, and trained networks are full of them."""

    def product() -> float:
        return float(torch.full((1,), 1e-40) * 1.0)

    assert product() > 0.0
    with Runtime.start(EngineConfig(device="cpu", threads=1), ALONE):
        assert product() == 0.0
        products: list[float] = []
        thread = threading.Thread(target=lambda: products.append(product()))
        thread.start()
        thread.join()
        assert products == [0.0]
    assert product() > 0.0


def test_who_has_made_them_zero_before_keeps_that() -> None:
    torch.set_flush_denormal(True)
    try:
        with Runtime.start(EngineConfig(device="cpu", threads=1), ALONE):
            pass
        assert float(torch.full((1,), 1e-40) * 1.0) == 0.0
    finally:
        torch.set_flush_denormal(False)


def test_a_wedged_teardown_is_left_behind(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    monkeypatch.setattr(dist, "is_initialized", lambda: release.wait(30))
    started = time.monotonic()
    runtime_module._destroy_within(0.2)
    assert time.monotonic() - started < 5
    assert "did not close within" in caplog.text
    release.set()


def test_ranks_that_have_no_space_to_meet_in_name_the_full_disk() -> None:
    full = RankEnvironment(0, 2, 0, 2, launched=True, rendezvous="file:///dev/full")
    with (
        pytest.raises(DiskFullError, match="ranks cannot meet: No space left on device") as caught,
        Runtime.start(EngineConfig(device="cpu"), full),
    ):
        pass
    assert "file:///dev/full" in caught.value.hint


def test_a_teardown_without_memory_for_a_thread_hides_no_error() -> None:
    program = """
import resource
from pathlib import Path
from ups.distributed.runtime import _destroy_within
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), -1))
_destroy_within(5.0)
print("left")
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "left", done.stderr


def test_a_rank_stays_on_the_processors_next_to_its_gpu(tmp_path: Path) -> None:
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    assert processors_near(gpu, tmp_path) == set()
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text("0-3,8,10-11\n")
    assert processors_near(gpu, tmp_path) == {0, 1, 2, 3, 8, 10, 11}
    (folder / "local_cpulist").write_text("\n")
    assert processors_near(gpu, tmp_path) == set()
    assert processors_near(SimpleNamespace(), tmp_path) == set()


def test_every_unit_and_shape_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_it = [], torch.compile

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda f, dynamic: compile_it(f, dynamic=dynamic, backend=backend))
    units = [torch.nn.Linear(4 + n, 3) for n in range(12)]
    for n, unit in enumerate(units):
        compile_unit(unit)
        unit(torch.ones(2, 4 + n))
    assert len(compiled) == len(units)
