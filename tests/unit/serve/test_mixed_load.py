"""Memory and queue stay flat under mixed load: 30 minutes in `.ci/long`, seconds else."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from tests.support.calibrated_bundle import calibrated_bundle
from tests.support.rollout_requests import LONG, REQUEST, metric
from tests.support.serving import Served, serving

pytestmark = pytest.mark.processes
MOST_GROWTH = 48 * 2**20


def work(server: Served, end: float, seed: int, statuses: list[int]) -> None:
    """Rollouts, jobs that are looked at and removed, wrong requests, and clients that leave."""
    draw = random.Random(seed)
    while time.monotonic() < end:
        kind = draw.random()
        if kind < 0.6:
            statuses.append(server.request("POST", "/rollout", REQUEST | {"steps": draw.randint(1, 60)})[0])
        elif kind < 0.8:
            job = server.json("POST", "/jobs", REQUEST | {"steps": draw.randint(1, 2000)})
            time.sleep(draw.uniform(0, 0.3))
            server.json("GET", job["store"] + "/zarr.json")
            statuses.append(server.request("DELETE", f"/jobs/{job['id']}")[0])
        elif kind < 0.95:
            statuses.append(server.request("POST", "/rollout", REQUEST | {"steps": "many"})[0])
        else:
            with pytest.raises(TimeoutError):
                server.request("POST", "/rollout", LONG | {"every": 1000}, timeout=0.3)


@pytest.mark.parametrize(
    ("warm_up", "seconds"), [(3, 6), pytest.param(120, 1800, marks=[pytest.mark.long, pytest.mark.timeout(2400)])]
)
def test_memory_and_queue_stay_flat(tmp_path: Path, warm_up: float, seconds: float) -> None:
    statuses: list[int] = []
    with serving(calibrated_bundle(tmp_path / "b"), tmp_path / "s") as server:
        sizes = []
        for number, duration in enumerate((warm_up, seconds)):
            end = time.monotonic() + duration
            threads = [threading.Thread(target=work, args=(server, end, 8 * number + n, statuses)) for n in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            sizes.append(server.resident())
        assert set(statuses) == {200, 204, 422}
        assert sizes[1] - sizes[0] < MOST_GROWTH
        deadline = time.monotonic() + 10
        while metric(server, "ups_waiting_rollouts"):
            assert time.monotonic() < deadline
        assert metric(server, "ups_held_bytes") == 0
        assert metric(server, "ups_jobs") == 0
