"""Which host this is, which ranks are its own, and over which interface they talk."""

from __future__ import annotations

from typing import Any

import pytest

from ups.errors import ConfigError
from ups.supervise.options import find_host_info, interface_towards


def test_ranks_are_spread_over_hosts_in_their_order() -> None:
    host = find_host_info(2, 6, 1, "127.0.0.1:29500", "")
    assert [list(host.ranks_of(number, 6)) for number in range(2)] == [[0, 1, 2], [3, 4, 5]]
    assert not host.is_head
    assert host.interface == "lo"


def test_the_scheduler_says_which_host_this_is() -> None:
    slurm = {"SLURM_NODEID": "3", "SLURMD_NODENAME": "gpu-17"}
    assert find_host_info(4, 4, None, "127.0.0.1:29500", "ib0", slurm).label == "3:gpu-17"
    assert find_host_info(4, 4, 1, "127.0.0.1:29500", "ib0", slurm).label == "1:gpu-17"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"number": None}, "number of this host"),
        ({"number": 2}, "does not exist"),
        ({"ranks": 3}, "spread evenly"),
        ({"address": "127.0.0.1"}, "not ADDRESS:PORT"),
        ({"address": "127.0.0.1:0"}, "not ADDRESS:PORT"),
        ({"address": "localhost:29500"}, "other hosts do not reach"),
        ({"address": "no-such-host.invalid:29500"}, "no IPv4 address"),
    ],
)
def test_a_place_that_cannot_be_is_refused(changed: dict[str, Any], words: str) -> None:
    options: dict[str, Any] = {"count": 2, "ranks": 2, "number": 0, "address": "127.0.0.1:29500", "interface": ""}
    with pytest.raises(ConfigError, match=words):
        find_host_info(**{**options, **changed}, environ={})


def test_the_interface_is_the_one_on_the_way_to_the_head() -> None:
    assert interface_towards("127.0.0.1", 29500) == "lo"
