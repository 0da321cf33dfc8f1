"""What ranks send each other in a step, by strategy, and how long a ring takes for it."""

from __future__ import annotations

from dataclasses import dataclass

from ups.plan.devices import Device

GPUS_PER_HOST = 8


@dataclass(frozen=True)
class Traffic:
    """Of one rank and one step: bytes that it sends, seconds if nothing hides them, and what backward cannot hide."""

    sent_bytes: float
    seconds: float
    exposed_seconds: float


def traffic(
    strategy: str,
    ranks: int,
    shards: int,
    device: Device,
    network_bandwidth: float,
    *,
    parameter_bytes: int,
    gradient_bytes: int,
    passes: float,
    forward_seconds: float,
    backward_seconds: float,
) -> Traffic:
    """parameter_bytes: of the whole model as it is gathered; passes: micro-batches of a step.

    ddp reduces all gradients once, while the last backward pass runs. fsdp gathers the weights for each forward and
    each backward pass and scatters reduced gradients once, over the `shards` ranks of a copy; several copies then
    reduce what each rank has of the gradients. The slower of link and network sets the pace of a ring.
    """
    if ranks == 1 or strategy == "single":
        return Traffic(0.0, 0.0, 0.0)
    if strategy == "ddp":
        sent = 2 * _ring(ranks) * gradient_bytes
        seconds = sent / _bandwidth(ranks, ranks, device, network_bandwidth)
        hidden = backward_seconds / max(passes, 1.0)
    else:
        inside = _ring(shards) * (2 * passes * parameter_bytes + gradient_bytes)
        between = 2 * _ring(ranks // shards) * gradient_bytes / shards
        sent = inside + between
        seconds = inside / _bandwidth(shards, ranks, device, network_bandwidth)
        seconds += between / _bandwidth(ranks, ranks, device, network_bandwidth)
        hidden = forward_seconds + backward_seconds
    return Traffic(sent, seconds, max(0.0, seconds - hidden))


def _ring(size: int) -> float:
    """Which part of an array each member sends when it is gathered or scattered around a ring."""
    return (size - 1) / size


def _bandwidth(members: int, ranks: int, device: Device, network: float) -> float:
    """Bytes per second of a ring of neighbors: a host's link, or its part of the network, whichever is slower."""
    if ranks <= GPUS_PER_HOST or GPUS_PER_HOST % members == 0:
        return device.link_bandwidth
    return min(device.link_bandwidth, network / min(ranks, GPUS_PER_HOST))
