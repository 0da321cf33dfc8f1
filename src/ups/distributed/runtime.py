"""The runtime of a rank: device, process groups, mesh, time-outs, fault handler, and the `RankInfo` that loaders need.

`with Runtime.start(config) as runtime:` is the only way to a rank, a device or a mesh. Which launcher started the
process is left to `environment.py`; how a model is spread over ranks to `strategies.py`; decisions to `agreement.py`.

Three groups, always apart: the default one (device tensors), a gloo group for control flags, and a gloo group for
checkpoints, which a background thread uses while training continues. A group shared with training would race.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import faulthandler
import logging
import os
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ups.config.schema import EngineConfig
from ups.distributed.environment import RankEnvironment
from ups.errors import DiskFullError, DistributedError, MachineError
from ups.spec.batch import DeviceKind, RankInfo

logger = logging.getLogger(__name__)

TEARDOWN_SECONDS = 10.0
# Name of the dimension of the mesh along which fsdp cuts.
SHARD = "shard"


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a started rank has. Groups and mesh are None on a single rank that needs none."""

    place: RankInfo
    device: torch.device
    strategy: str
    attempt: int
    control_group: dist.ProcessGroup | None
    checkpoint_group: dist.ProcessGroup | None
    mesh: DeviceMesh | None

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world_size(self) -> int:
        return self.place.world_size

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes what is written once."""
        return self.place.rank == 0

    @staticmethod
    @contextlib.contextmanager
    def start(config: EngineConfig, environment: RankEnvironment | None = None) -> Iterator[Runtime]:
        """Join the world described by the environment, and leave it within a deadline. Collective: all ranks.

        Raises MachineError for a device that is not there: CUDA is never silently replaced by the CPU, nor NCCL by
        gloo.
        """
        env = environment or RankEnvironment.read()
        with contextlib.ExitStack() as stack:
            if not faulthandler.is_enabled():  # else the rank's failure recorder has given it a file already
                faulthandler.enable(all_threads=True)
            device = choose_device(config.device, env)
            strategy = choose_strategy(config.strategy, env)
            _fix_arithmetic(stack, config, env, device)
            if device.type == "cuda" and env.launched:
                near = processors_near(torch.cuda.get_device_properties(device))
                os.sched_setaffinity(0, near & os.sched_getaffinity(0) or os.sched_getaffinity(0))
            kind: DeviceKind = "cuda" if device.type == "cuda" else "cpu"
            place = RankInfo(env.rank, env.world_size, env.local_rank, env.local_world_size, kind)
            if strategy == "single":
                yield Runtime(place, device, strategy, env.attempt, None, None, None)
                return
            stack.callback(_destroy_within, TEARDOWN_SECONDS)
            control, checkpoint = _make_groups(config, env, device)
            mesh = make_mesh(device.type, env.world_size, config.shard_ranks)
            yield Runtime(place, device, strategy, env.attempt, control, checkpoint, mesh)


def choose_device(wanted: str, env: RankEnvironment) -> torch.device:
    """The device of this rank: CUDA by local rank, or the CPU. Raises MachineError rather than fall back."""
    available = torch.cuda.is_available()
    if wanted == "cpu" or (wanted == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise MachineError(
            "engine.device is 'cuda', but torch finds no CUDA device",
            hint="check the driver with nvidia-smi, or set engine.device=cpu",
        )
    if env.local_rank >= torch.cuda.device_count():
        raise MachineError(
            f"local rank {env.local_rank} has no GPU: this host shows {torch.cuda.device_count()}",
            hint="start at most one rank per GPU (--ranks), or check CUDA_VISIBLE_DEVICES",
        )
    device = torch.device("cuda", env.local_rank)
    torch.cuda.set_device(device)
    return device


def processors_near(gpu: Any, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Numbers of the processors next to a GPU (its properties, of torch); none if Linux names none."""
    try:
        name = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        spans = [span.split("-") for span in (devices / name / "local_cpulist").read_text().strip().split(",")]
        return {number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)}
    except (OSError, ValueError, AttributeError):
        return set()


def choose_strategy(wanted: str, env: RankEnvironment) -> str:
    """The strategy by name; 'auto' is single on one rank, else ddp."""
    if wanted == "auto":
        return "single" if env.world_size == 1 else "ddp"
    if wanted == "single" and env.world_size > 1:
        raise DistributedError(
            f"engine.strategy is 'single', but there are {env.world_size} ranks: they would train apart",
            hint="use --ranks 1, or engine.strategy=ddp",
        )
    return wanted


def choose_backend(config: EngineConfig, device: torch.device) -> str:
    """What sends tensors of the device between ranks, as torch names it. Raises MachineError for NCCL without CUDA."""
    on_cuda = device.type == "cuda"
    backend = config.backend if config.backend != "auto" else "nccl" if on_cuda else "gloo"
    if backend == "nccl" and not on_cuda:
        raise MachineError(
            "engine.backend is 'nccl', which sends tensors of CUDA devices only, and this rank works on the CPU",
            hint="leave engine.backend out, or set engine.device=cuda on a machine with GPUs",
        )
    if backend == "nccl" and not dist.is_nccl_available():
        raise MachineError(
            "this torch has no NCCL, which CUDA ranks need", hint="install a CUDA build of torch for Linux"
        )
    # Offloaded shards live in CPU memory, and some of them are gathered there.
    return f"cpu:gloo,cuda:{backend}" if on_cuda and config.offload else backend


def make_mesh(device_type: str, world_size: int, shard_ranks: int | None) -> DeviceMesh:
    """All ranks in a row that shares one copy of the model, or rows of `shard_ranks`, each with a copy of its own.

    Neighbors in rank are in one row: with as many as a host has, gathering weights stays inside the host.
    """
    shard = shard_ranks or world_size
    if world_size % shard:
        raise DistributedError(
            f"engine.shard_ranks is {shard}, which does not divide {world_size} ranks",
            hint="use a number that divides the number of ranks, such as the ranks of one host",
        )
    if shard == world_size:
        return init_device_mesh(device_type, (shard,), mesh_dim_names=(SHARD,))
    return init_device_mesh(device_type, (world_size // shard, shard), mesh_dim_names=("replicate", SHARD))


def _fix_arithmetic(
    stack: contextlib.ExitStack, config: EngineConfig, env: RankEnvironment, device: torch.device
) -> None:
    """Thread count and kernels that give the same bits in every run of the same world size; undone at the end."""
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
    threads = config.threads or (1 if env.local_world_size > 1 else None)
    if threads is not None:
        torch.set_num_threads(threads)
    # Derivatives of GELU far from zero are numbers below 1e-38, which a processor handles in microcode: a step of a
    # trained network took twice as long as one of a fresh network until they count as zero.
    if not _denormals_are_zero() and torch.set_flush_denormal(True):
        stack.callback(torch.set_flush_denormal, False)
    if device.type == "cuda":
        # cuBLAS reads this when it is first used, which is after this line.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    # As `use_deterministic_algorithms(True, warn_only=True)`, which also imports the compiler for its setting.
    torch.set_deterministic_debug_mode("warn")
    # Filling every fresh tensor costs time and hides nothing here: no kernel of ours reads memory it did not write.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _denormals_are_zero() -> bool:
    """Whether this thread works so already; torch has no way to ask."""
    return float(torch.full((1,), 1e-40) * 1.0) == 0.0


def _make_groups(
    config: EngineConfig, env: RankEnvironment, device: torch.device
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    timeout = datetime.timedelta(seconds=config.timeout_seconds)
    if env.one_host:
        # Rendezvous has no authentication: on one host nothing listens beyond the loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    backend = choose_backend(config, device)
    try:
        dist.init_process_group(
            backend,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
            **meeting_place(env, timeout),
        )
        control = dist.new_group(backend="gloo", timeout=timeout)
        checkpoint = dist.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, ValueError, OSError) as error:
        if os.strerror(errno.ENOSPC) in str(error):  # of the file in which the ranks of a host meet
            raise DiskFullError(f"ranks cannot meet: {error}", hint=f"free some space at {env.rendezvous}") from error
        raise DistributedError(
            f"rank {env.rank} of {env.world_size} could not join the process group ({backend}): {error}",
            hint="see the other ranks' logs; `ups doctor` tries each step of the start alone",
        ) from error
    if control is None or checkpoint is None:
        raise DistributedError(f"rank {env.rank} is outside its own process groups")
    return control, checkpoint


def meeting_place(env: RankEnvironment, timeout: datetime.timedelta) -> dict[str, Any]:
    """Where ranks meet, as arguments of `init_process_group`; none for ranks of torchrun, which torch finds by itself.

    A store is made here rather than by torch's `init_method`, because torch's TCP store listens on all interfaces
    unless it is given a socket. No store is ever asked for a pickle.
    """
    if env.launched and not env.rendezvous:
        return {}
    return {"store": _make_store(env, timeout), "rank": env.rank, "world_size": env.world_size}


def _make_store(env: RankEnvironment, timeout: datetime.timedelta) -> Store:
    if not env.launched:
        return HashStore()
    place = urllib.parse.urlsplit(env.rendezvous)
    if place.scheme == "file":
        store = FileStore(place.path, env.world_size)
        store.set_timeout(timeout)
        return store
    host, port = str(place.hostname), int(place.port or 0)
    if env.rank:
        return TCPStore(host, port, env.world_size, is_master=False, timeout=timeout)
    listening = socket.create_server((host, port), backlog=max(128, env.world_size))
    # The store owns the descriptor from here on.
    own = listening.detach()
    return TCPStore(host, port, env.world_size, is_master=True, timeout=timeout, master_listen_fd=own)


def _destroy_within(seconds: float) -> None:
    """Leave the groups, but never wait forever: a wedged teardown must not keep the host busy."""

    def destroy() -> None:
        # The peers may be gone already, and this rank is leaving whatever happens.
        with contextlib.suppress(RuntimeError, ValueError, AssertionError):
            if dist.is_initialized():
                dist.destroy_process_group()

    thread = threading.Thread(target=destroy, name="ups-teardown", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return  # no memory for a thread: this error would hide the one that is on its way
    thread.join(seconds)
    if thread.is_alive():
        logger.warning("process groups did not close within %.0f s; leaving them", seconds)
