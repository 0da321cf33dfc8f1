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
    each backward pass and scatters reduced gradients once. The slower of link and network sets the pace of the ring.
    """
    if ranks == 1 or strategy == "single":
        return Traffic(0.0, 0.0, 0.0)
    part = (ranks - 1) / ranks
    hosts = -(-ranks // GPUS_PER_HOST)
    share = network_bandwidth / min(ranks, GPUS_PER_HOST)
    bandwidth = device.link_bandwidth if hosts == 1 else min(device.link_bandwidth, share)
    if strategy == "ddp":
        sent = 2 * part * gradient_bytes
        hidden = backward_seconds / max(passes, 1.0)
    else:
        sent = part * (2 * passes * parameter_bytes + gradient_bytes)
        hidden = forward_seconds + backward_seconds
    seconds = sent / bandwidth
    return Traffic(sent, seconds, max(0.0, seconds - hidden))
