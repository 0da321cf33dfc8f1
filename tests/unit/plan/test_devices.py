"""The table of devices, and what is said about one that is not in it."""

from __future__ import annotations

import pytest

from ups.errors import ConfigError
from ups.plan.devices import gpu, known_devices, row_of
from ups.plan.operations import MOVE, PRODUCT, Operation


def test_every_row_names_its_source_and_makes_a_device() -> None:
    for name, row in known_devices().items():
        assert row["source"]
        assert gpu(name, "float32").memory_bytes > 1e10


def test_an_unknown_gpu_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no GPU is called 'h1000'") as caught:
        gpu("h1000", "float32")
    assert "did you mean h100" in caught.value.hint
    assert all(name in caught.value.hint for name in known_devices())
    with pytest.raises(ConfigError, match="has no bfloat16"):
        gpu("t4", "bfloat16")


def test_time_is_bound_by_arithmetic_by_bytes_or_by_launches() -> None:
    device = gpu("h100", "bfloat16")
    assert device.seconds([Operation(PRODUCT, 1e15, 1)]) == pytest.approx(1e15 / device.rates[PRODUCT])
    assert device.seconds([Operation(MOVE, 0.0, 10**12)]) == pytest.approx(1e12 / device.bandwidth)
    assert device.seconds([Operation(MOVE, 0.0, 8)] * 100) == pytest.approx(100 * device.launch_seconds)


def test_a_host_has_the_network_of_its_platform_unless_one_is_stated() -> None:
    """0.7 of the line rate, as of the link: 8 x 400 Gbit/s of a DGX H100 are 280 GB/s, 100 Gbit/s are 8.75 GB/s."""
    assert gpu("h100", "float32").network_bandwidth == pytest.approx(280e9)
    assert gpu("a100-80g", "float32").network_bandwidth == pytest.approx(140e9)
    assert gpu("h100", "float32", 100).network_bandwidth == pytest.approx(8.75e9)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla T4", "t4"),
        ("NVIDIA B200", None),
    ],
)
def test_a_device_is_found_by_the_name_that_its_driver_gives_it(name: str, row: str | None) -> None:
    assert row_of(name) == row
