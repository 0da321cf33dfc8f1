"""What ranks send each other in a step, by strategy, and how long rings and trees of NCCL take for it.

Ranks are numbered host by host. In a ring over several hosts only one GPU of each sends to the next host, so the ring
has the whole network of a host; several rings that leave a host at the same time share it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ups.plan.devices import Device

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
