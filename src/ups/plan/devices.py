"""What devices can do: the table of data sheets (devices.json), and this machine's CPU as a short measurement finds it;
what ranks send each other in a step, by strategy; how often to save, and what failures cost.

A data sheet says what a device can do at most. What eager torch gets of it is assumed here, in one place, and was never
measured on a GPU: every time that is made from it is an estimate. The CPU is measured on one thread, in CPU time:
neighbors who take the processor do not count.

Young (1974): save every sqrt(2 d M) seconds, for saves that cost d and failures every M seconds. Daly (2006): the
expected time of a run that saves so often and loses what came after the last save, with exponential failures. Ranks are
numbered host by host. In a ring over several hosts only one GPU of each sends to the next host, so the ring has the
whole network of a host; several rings that leave a host at the same time share it.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ups.errors import ConfigError
from ups.plan.operations import CONVOLUTION, DEPTHWISE, FOURIER, KINDS, MOVE, PRODUCT, Operation, OperationTrace

# Assumed of a GPU: parts of the peaks that eager kernels reach, and seconds to launch one from Python.
_OF_PEAK = {PRODUCT: 0.5, CONVOLUTION: 0.35, DEPTHWISE: 0.05, FOURIER: 0.1}
_OF_BANDWIDTH = 0.7
_LAUNCH_SECONDS = 8e-6
_OF_MEMORY = 0.92  # the rest: context, kernels, what the caching allocator cannot hand out
# Of memory that no GPU manages, and of what is free at the moment: the rest is what an allocator cannot hand out.
OF_FREE_MEMORY = 0.9
_OF_LINK = 0.7  # inside a host and between hosts
NEAR_BYTES = 2 << 20


@dataclass(frozen=True)
class Device:
    """Rates: FLOP/s by kind of operation, bytes/s; memory in bytes; `queues`: launches run ahead of the device."""

    name: str
    rates: Mapping[str, float]
    bandwidth: float
    launch_seconds: float
    memory_bytes: int
    link_bandwidth: float
    source: str
    queues: bool = True
    near_bandwidth: float = 0.0  # of operations whose bytes stay in the caches of a CPU; 0: as `bandwidth`
    network_bandwidth: float = 0.0  # of a host of GPUs; all ranks on a CPU are on one host

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * (_OF_MEMORY if self.queues else OF_FREE_MEMORY))

    def seconds(self, operations: Iterable[Operation]) -> float:
        """How long these operations take: each as long as its arithmetic or its bytes, whichever is longer."""
        work, launches = 0.0, 0.0
        for one in operations:
            arithmetic = one.flops / self.rates[one.kind] if one.kind != MOVE else 0.0
            near = self.near_bandwidth if one.num_bytes <= NEAR_BYTES else 0.0
            work += max(arithmetic, one.num_bytes / (near or self.bandwidth))
            launches += self.launch_seconds
        return max(work, launches) if self.queues else work + launches


def known_devices() -> dict[str, dict[str, Any]]:
    """The rows of devices.json by name."""
    text = resources.files("ups.plan").joinpath("devices.json").read_text()
    rows: dict[str, dict[str, Any]] = json.loads(text)["devices"]
    return rows


def gpu(name: str, precision: str, network_gbit: float | None = None) -> Device:
    """A device of the table in one precision; network_gbit: of a host, if it is not that of the table.

    Raises ConfigError that lists the known devices.
    """
    rows = known_devices()
    key = name.lower().replace("_", "-").replace(" ", "-")
    if key not in rows:
        close = difflib.get_close_matches(key, rows, n=1, cutoff=0.5)
        meant = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"no GPU is called '{name[:40]}'", hint=f"{meant}known: {', '.join(sorted(rows))}")
    row = rows[key]
    peak = row[precision]
    if peak is None:
        raise ConfigError(
            f"{key} has no {precision} arithmetic ({row['source']})", hint="--set engine.precision=float32"
        )
    plain = min(row["float32"], peak) * 1e12
    rates = {kind: part * (peak * 1e12 if kind in (PRODUCT, CONVOLUTION) else plain) for kind, part in _OF_PEAK.items()}
    return Device(
        key,
        rates,
        row["bandwidth"] * 1e9 * _OF_BANDWIDTH,
        _LAUNCH_SECONDS,
        int(row["memory"] * 1e9),
        row["link"] * 1e9 * _OF_LINK,
        str(row["source"]),
        network_bandwidth=(row["network"] if network_gbit is None else network_gbit) * 1e9 / 8 * _OF_LINK,
    )


def this_gpu() -> str | None:
    """The row of this machine's first GPU; None if it has none. Raises ConfigError for a GPU that is in no row."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0)
    row = row_of(name)
    if row is None:
        raise ConfigError(
            f"the table of devices has no {name}",
            hint=f"name the nearest one with --gpu: {', '.join(sorted(known_devices()))}",
        )
    return row


def row_of(device_name: str) -> str | None:
    """The row of the table that a device is, by the name that its driver gives it; None if it is none of them.

    All words of a row's name must be in that name; of several rows the one that says most.
    """
    name = device_name.lower().replace(" ", "").replace("-", "")
    fitting = [key for key in known_devices() if all(word in name for word in key.split("-"))]
    return max(fitting, key=len, default=None)


_SMALL_BYTES = 1 << 16
_REPEATS = 5


class _Pieces(nn.Module):
    """What the networks of this package are made of, in sizes that fit into caches and in sizes that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv2d(64, 64, 3, padding=1)
        self.along = nn.Conv2d(64, 64, 7, padding=3, groups=64)
        self.wide = nn.Linear(256, 768)
        self.narrow = nn.Linear(768, 256)
        self.norm = nn.LayerNorm(256)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, 64, N, N) -> a number."""
        x = x + functional.gelu(self.mix(x))
        x = x + self.along(x)
        x = x + torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:])
        tokens = x.reshape(x.shape[0], -1, 256)
        tokens = self.norm(tokens)
        tokens = tokens + self.narrow(functional.silu(self.wide(tokens)))
        weights = (tokens @ tokens.mT).softmax(-1)
        loss: Tensor = (weights @ tokens).square().mean()
        return loss


def this_cpu() -> Device:
    """The CPU of this machine as one rank with one thread sees it; takes a few seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            pieces, sizes = _Pieces(), [torch.randn(2, 64, 16, 16), torch.randn(8, 64, 32, 32)]
        watches = []
        for _ in range(_REPEATS + 1):
            with OperationTrace() as watch:
                for x in sizes:
                    pieces(x).backward()
            pieces.zero_grad(set_to_none=True)
            watches.append(watch)
    finally:
        torch.set_num_threads(threads)
    # The same operations in every pass: the median of each is its undisturbed time.
    times = [statistics.median(column) for column in zip(*(w.seconds for w in watches[1:]), strict=True)]
    done = list(zip(watches[1].operations, times, strict=True))
    launch = statistics.median([t for op, t in done if op.num_bytes < _SMALL_BYTES])
    moves = [(op.num_bytes, t) for op, t in done if op.kind == MOVE and op.num_bytes >= _SMALL_BYTES]
    far = [(size, t) for size, t in moves if size > NEAR_BYTES]
    near = [(size, max(t - launch, 1e-9)) for size, t in moves if size <= NEAR_BYTES]
    bandwidth, near_bandwidth = (sum(s for s, _ in part) / sum(t for _, t in part) for part in (far, near))
    rates = {}
    for kind in KINDS:
        of_kind = [(op.flops, t) for op, t in done if op.kind == kind and op.flops]
        if of_kind:
            rates[kind] = sum(f for f, _ in of_kind) / sum(t for _, t in of_kind)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device(
        "cpu", rates, bandwidth, launch, memory, bandwidth / 4, "measured here, one thread", False, near_bandwidth
    )


# Of one GPU: 419 unexpected interruptions of 16,384 H100 in 54 days ("The Llama 3 Herd of Models", 2024).
HOURS_BETWEEN_FAILURES = 16_384 * 54 * 24 / 419


@dataclass(frozen=True)
class Outlook:
    """interval_seconds of work between saves; effective: part of the time that is training that lasts."""

    failure_seconds: float
    interval_seconds: float
    effective: float


def outlook(
    num_devices: int, hours_between_failures: float, save_seconds: float, restart_seconds: float, interval: float = 0.0
) -> Outlook:
    """hours_between_failures: of one device. interval: seconds of work between saves; 0 takes Young's."""
    between = hours_between_failures * 3600 / num_devices
    interval = interval or young_interval(save_seconds, between)
    return Outlook(between, interval, effective_part(interval, save_seconds, restart_seconds, between))


def young_interval(save_seconds: float, failure_seconds: float) -> float:
    """Seconds of work between two saves that lose the least time."""
    return math.sqrt(2 * save_seconds * failure_seconds)


def effective_part(interval: float, save_seconds: float, restart_seconds: float, failure_seconds: float) -> float:
    """Part of the time that is work that lasts, by Daly's complete model."""
    exponent = (interval + save_seconds) / failure_seconds
    if exponent > 500:
        return 0.0
    expected = failure_seconds * math.exp(restart_seconds / failure_seconds) * math.expm1(exponent)
    return interval / expected


GPUS_PER_HOST = 8
# Of DistributedDataParallel: gradients are reduced in buckets of this size.
_BUCKET_BYTES = 25 * 2**20
# Assumed seconds of a hop inside a host and between hosts; NCCL's own cost model has 3.4 to 5.7 and 9.6 microseconds.
_LINK_SECONDS = 4e-6
_NETWORK_SECONDS = 10e-6


@dataclass(frozen=True)
class Traffic:
    """Of one rank and one step: bytes that it sends, seconds if nothing hides them, and what backward cannot hide."""

    sent_bytes: float
    seconds: float
    exposed_seconds: float


@dataclass(frozen=True)
class _Groups:
    """Groups of ranks that each communicate at the same time; all have the same size."""

    members: Sequence[range]
    per_host: int
    device: Device

    @property
    def hosts(self) -> int:
        """Of the group that is spread over most of them."""
        return max(len({rank // self.per_host for rank in group}) for group in self.members)

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a ring: the link of a host, or the network that all rings of a host share."""
        leaving = Counter(
            rank // self.per_host
            for group in self.members
            for rank, following in zip(group, (*group[1:], group[0]), strict=True)
            if rank // self.per_host != following // self.per_host
        )
        if not leaving:
            return self.device.link_bandwidth
        return min(self.device.link_bandwidth, self.device.network_bandwidth / max(leaving.values()))

    @property
    def ring_seconds(self) -> float:
        """Hops of an all-gather or a reduce-scatter, which go once around the ring."""
        return (len(self.members[0]) - self.hosts) * _LINK_SECONDS + (self.hosts - 1) * _NETWORK_SECONDS

    @property
    def tree_seconds(self) -> float:
        """Hops of an all-reduce, up a tree of hosts and down again: shorter than twice around the ring."""
        inside = math.ceil(len(self.members[0]) / self.hosts) - 1
        return 2 * (inside * _LINK_SECONDS + math.ceil(math.log2(self.hosts)) * _NETWORK_SECONDS)


def traffic(
    strategy: str,
    ranks: int,
    shards: int,
    device: Device,
    *,
    parameter_bytes: int,
    gradient_bytes: int,
    units: int,
    passes: float,
    forward_seconds: float,
    backward_seconds: float,
) -> Traffic:
    """parameter_bytes: of the whole model as it is gathered; units: what fsdp gathers at once; passes: micro-batches.

    ddp reduces all gradients once, while the last backward pass runs. fsdp gathers the weights for each forward and
    each backward pass and scatters reduced gradients once, over the `shards` ranks of a copy; several copies then
    reduce what each rank has of the gradients. Each of n ranks sends (n - 1) / n of an array once around a ring. All
    ranks of a CPU are on one host.
    """
    if ranks == 1 or strategy == "single":
        return Traffic(0.0, 0.0, 0.0)
    per_host = GPUS_PER_HOST if device.queues else ranks
    if strategy == "ddp":
        everyone = _Groups([range(ranks)], per_host, device)
        sent = 2 * (1 - 1 / ranks) * gradient_bytes
        seconds = sent / everyone.bandwidth + math.ceil(gradient_bytes / _BUCKET_BYTES) * everyone.tree_seconds
        return Traffic(sent, seconds, max(0.0, seconds - backward_seconds / max(passes, 1.0)))
    copy = _Groups([range(first, first + shards) for first in range(0, ranks, shards)], per_host, device)
    sent = (1 - 1 / shards) * (2 * passes * parameter_bytes + gradient_bytes)
    seconds = sent / copy.bandwidth + units * (2 * passes + 1) * copy.ring_seconds
    if shards < ranks:
        across = _Groups([range(first, ranks, shards) for first in range(shards)], per_host, device)
        between = 2 * (1 - shards / ranks) * gradient_bytes / shards
        sent += between
        seconds += between / across.bandwidth + units * across.tree_seconds
    return Traffic(sent, seconds, max(0.0, seconds - forward_seconds - backward_seconds))
