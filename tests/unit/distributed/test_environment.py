"""A rank believes its launcher only if what it says is whole and consistent."""

from __future__ import annotations

import pytest

from ups.distributed.environment import RankEnvironment
from ups.errors import DistributedError


def test_a_plain_process_is_the_only_rank() -> None:
    assert RankEnvironment.read({}) == RankEnvironment(0, 1, 0, 1, 0, launched=False)


def test_torchrun_variables_give_the_position() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "UPS_ATTEMPT": "2"}
    assert RankEnvironment.read(env) == RankEnvironment(5, 8, 1, 4, 2, launched=True)
    assert not RankEnvironment.read(env).one_host


@pytest.mark.parametrize("address", ["file:///dev/shm/x/store", "tcp://127.0.0.1:29400"])
def test_the_meeting_place_is_read_from_one_variable(address: str) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "UPS_RENDEZVOUS": address}
    assert RankEnvironment.read(env).rendezvous == address


@pytest.mark.parametrize(
    ("env", "reported"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, LOCAL_RANK not set"),
        ({"WORLD_SIZE": "2"}, "RANK, LOCAL_RANK not set"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "contradict"),
        ({"RANK": "-1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "contradict"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, "contradict"),
        ({"RANK": "one", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='one' is not a whole number"),
        ({"RANK": "", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='' is not a whole number"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "UPS_RENDEZVOUS": "tcp://[::]:0/x"},
            "neither file:///PATH nor tcp",
        ),
    ],
)
def test_half_an_environment_is_refused(env: dict[str, str], reported: str) -> None:
    with pytest.raises(DistributedError, match=reported):
        RankEnvironment.read(env)
