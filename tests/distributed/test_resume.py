"""A killed run continues as if nothing had happened: bitwise with as many ranks, with the next windows on others."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.toy_training import train
from ups.testing.ranks import Launched, launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

# One of the two kills comes at a drawn step on a drawn rank; the seed is printed when it fails.
SEED = int(os.environ.get("UPS_TEST_SEED") or time.time_ns() % 1_000_000)
SETUPS = [("single", 1), ("ddp", 2), ("ddp", 3), ("fsdp", 2)]


def windows(results: list[Any]) -> dict[int, list[tuple[str, int]]]:
    """Step -> windows of the global batch, over all ranks."""
    found: dict[int, list[tuple[str, int]]] = {}
    for result in results:
        for step, task, numbers in result["windows"]:
            found.setdefault(step, []).extend((task, n) for n in numbers)
    return {step: sorted(block) for step, block in found.items()}


@pytest.mark.parametrize(("strategy", "ranks"), SETUPS)
def test_a_run_killed_with_sigkill_resumes_bitwise(strategy: str, ranks: int, tmp_path: Path) -> None:
    base = {"strategy": strategy, "steps": 9, "batch_size": 12, "interval": 2, "asynchronous": True}
    whole = launch(train, ranks, arguments=base | {"run_dir": str(tmp_path / "whole")})
    dice = random.Random(f"{SEED}/{strategy}/{ranks}")
    drawn = (dice.randint(1, 8), dice.randrange(ranks))
    print(f"UPS_TEST_SEED={SEED}: kill at step {drawn[0]}, rank {drawn[1]}")
    for number, (kill_at, victim) in enumerate(((3, 0), drawn)):
        run_dir = tmp_path / f"killed_{number}"
        broken = base | {"run_dir": str(run_dir), "kill_at": kill_at, "kill_rank": victim}
        with Launched(train, ranks, broken) as launched:
            launched.processes[victim].join(300)
            assert launched.processes[victim].exitcode == -9, launched.logs()
        resumed = launch(train, ranks, arguments=base | {"run_dir": str(run_dir)})
        assert all(0 <= r["resumed"] <= kill_at for r in resumed)
        assert [r["hash"] for r in resumed] == [r["hash"] for r in whole]
        start = resumed[0]["resumed"]
        assert windows(resumed) == {s: w for s, w in windows(whole).items() if s >= start}


def test_another_number_of_ranks_continues_with_exactly_the_next_windows(tmp_path: Path) -> None:
    base = {"precision": "float64", "batch_size": 8, "asynchronous": False, "interval": 100}
    straight = launch(train, 1, arguments=base | {"steps": 9, "strategy": "single"})
    seen: dict[int, list[tuple[str, int]]] = {}
    losses: list[float] = []
    # The length of the stage is part of the schedule, so each part is cut off by a stop, not by another length.
    for ranks, strategy, stop in ((2, "fsdp", 3), (4, "fsdp", 6), (1, "single", 0)):
        arguments = base | {"steps": 9, "strategy": strategy, "run_dir": str(tmp_path), "terminate_at": stop}
        results = launch(train, ranks, arguments=arguments)
        done = {s: w for s, w in windows(results).items() if s < results[0]["progress"]["step"]}
        assert not done.keys() & seen.keys()
        seen |= done
        losses += results[0]["losses"]
    assert seen == {s: w for s, w in windows(straight).items() if s < 9}
    assert losses == pytest.approx(straight[0]["losses"], rel=1e-5)


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2)])
def test_a_run_that_ends_in_float32_resumes_bitwise(strategy: str, ranks: int, tmp_path: Path) -> None:
    base = {"strategy": strategy, "steps": 8, "precision": "bfloat16", "float32_fraction": 0.4, "asynchronous": False}
    whole = launch(train, ranks, arguments=base | {"run_dir": str(tmp_path / "whole")})
    assert whole[0]["hash"] != launch(train, ranks, arguments=base | {"float32_fraction": 0.0})[0]["hash"]
    for stop in (3, 6):
        run_dir = str(tmp_path / f"stopped_{stop}")
        launch(train, ranks, arguments=base | {"run_dir": run_dir, "terminate_at": stop})
        resumed = launch(train, ranks, arguments=base | {"run_dir": run_dir})
        assert [r["hash"] for r in resumed] == [r["hash"] for r in whole]
