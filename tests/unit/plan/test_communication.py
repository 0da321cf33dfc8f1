"""Times of rings and trees over hosts of 8 GPUs, against figures that were calculated by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ups.plan.devices import Device, Traffic, gpu, traffic

MB = 10**6


def device(network_gbit: float = 100) -> Device:
    """An H100: 315 GB/s inside a host; between hosts 8.75 GB/s with 100 Gbit/s."""
    return gpu("h100", "float32", network_gbit)


def sent(strategy: str, ranks: int, shards: int = 1, megabytes: float = 400, **changes: Any) -> Traffic:
    settings: dict[str, Any] = {
        "parameter_bytes": int(megabytes * MB),
        "gradient_bytes": int(megabytes * MB),
        "units": 10,
        "passes": 1.0,
        "forward_seconds": 0.0,
        "backward_seconds": 0.0,
    }
    return traffic(strategy, ranks, shards, changes.pop("device", device()), **(settings | changes))


@pytest.mark.parametrize(
    ("ranks", "by_hand"),
    [
        (8, 2 * 7 / 8 * 0.4 / 315 + 16 * 56e-6),  # 3.1 ms, on NVLink
        (64, 2 * 63 / 64 * 0.4 / 8.75 + 16 * 116e-6),  # 91.9 ms
        (1024, 0.0913 + 16 * 196e-6),  # 94.5 ms: the whole network of a host, and not an eighth of it
    ],
)
def test_an_all_reduce_has_the_whole_network_of_a_host(ranks: int, by_hand: float) -> None:
    assert sent("ddp", ranks).seconds == pytest.approx(by_hand, rel=0.01)


@pytest.mark.parametrize(
    ("ranks", "shards", "by_hand"),
    [
        # Inside a host: 3 x 7/8 x 400 MB at 315 GB/s, 30 times 7 hops.
        (8, 8, 3.33e-3 + 30 * 28e-6),
        # A ring over 8 hosts: 3 x 63/64 x 400 MB at 8.75 GB/s, 30 times 56 hops inside hosts and 7 between them.
        (64, 64, 135.0e-3 + 30 * (56 * 4e-6 + 7 * 10e-6)),
        (1024, 1024, 137.0e-3 + 30 * (896 * 4e-6 + 127 * 10e-6)),
        # A copy in each host, then 8 rings over the hosts that share the network: 2 x 7/8 x 50 MB at 8.75/8 GB/s.
        (64, 8, 3.33e-3 + 30 * 28e-6 + 80.0e-3 + 10 * 60e-6),
        (1024, 8, 3.33e-3 + 30 * 28e-6 + 90.7e-3 + 10 * 140e-6),
        # Two copies in each host, so that 4 rings share the network: 2 x 15/16 x 100 MB at 8.75/4 GB/s.
        (64, 4, 2.86e-3 + 30 * 12e-6 + 85.7e-3 + 10 * (2 * (4e-6 + 30e-6))),
        # A copy over two hosts has one ring that leaves each; 8 rings over the copies: 2 x 3/4 x 25 MB at 8.75/8 GB/s.
        (64, 16, 128.6e-3 + 30 * (14 * 4e-6 + 10e-6) + 34.3e-3 + 10 * 40e-6),
    ],
)
def test_shards_share_the_network_with_those_that_leave_the_same_host(ranks: int, shards: int, by_hand: float) -> None:
    assert sent("fsdp", ranks, shards).seconds == pytest.approx(by_hand, rel=0.01)


def test_copies_that_lie_across_hosts_share_the_network() -> None:
    """With 6 ranks to a copy the second host has two rings that leave it: ranks 6 to 11, and 12 to 17."""
    traffic = sent("fsdp", 24, 6, units=0)
    assert traffic.seconds == pytest.approx(3 * 5 / 6 * 0.4 / (8.75 / 2) + 2 * 3 / 4 * 0.4 / 6 / (8.75 / 6), rel=0.01)


@pytest.mark.parametrize("network_gbit", [100, 3200])
def test_strategies_are_ranked_as_by_hand(network_gbit: float) -> None:
    """400 MB on 1,024 GPUs: an all-reduce is fastest, then a copy in each host, then shards over all hosts."""
    arrangements: list[tuple[Any, ...]] = [("ddp", 1024), ("fsdp", 1024, 8), ("fsdp", 1024, 1024)]
    seconds = [sent(*one, device=device(network_gbit)).seconds for one in arrangements]
    assert seconds == sorted(seconds)


def test_hops_count_where_little_is_sent() -> None:
    assert sent("ddp", 1024, megabytes=0.001).seconds == pytest.approx(196e-6, rel=0.01)
    assert sent("ddp", 2, megabytes=0.001).seconds == pytest.approx(8e-6, rel=0.01)


def test_ranks_of_a_cpu_are_on_one_host() -> None:
    cpu = replace(device(), queues=False, network_bandwidth=0.0)
    assert sent("ddp", 16, device=cpu).seconds == pytest.approx(2 * 15 / 16 * 0.4 / 315 + 16 * 30 * 4e-6, rel=0.01)


def test_ranks_send_what_their_strategy_sends() -> None:
    few: dict[str, Any] = {"megabytes": 0.001, "passes": 2.0}
    assert sent("ddp", 4, **few).sent_bytes == 2 * 0.75 * 1000
    assert sent("fsdp", 4, 4, **few).sent_bytes == 0.75 * (2 * 2 * 1000 + 1000)
    assert sent("single", 1).seconds == 0
    whole, by_host = (sent("fsdp", 16, shards) for shards in (16, 8))
    assert by_host.seconds < whole.seconds
    assert by_host.sent_bytes == pytest.approx(whole.sent_bytes, rel=0.1)


def test_arithmetic_hides_what_is_sent_meanwhile() -> None:
    traffic = sent("ddp", 8, backward_seconds=1e-3)
    assert traffic.exposed_seconds == pytest.approx(traffic.seconds - 1e-3)
    assert sent("ddp", 8, backward_seconds=1.0).exposed_seconds == 0
