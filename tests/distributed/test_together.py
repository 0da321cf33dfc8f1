"""Decisions that all ranks take together: a planted NaN, a request to stop, and more skipped steps than allowed."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.toy_training import Trial, engine_config, train, train_on
from ups.distributed.runtime import Runtime
from ups.record.checkpoints import latest_verified, read_progress
from ups.testing.ranks import Launched, launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]


def train_with_many_seeds(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """The same ranks train once per seed: a NaN on a random rank at random steps."""
    outcomes = []
    with Runtime.start(engine_config(Trial(strategy=arguments["strategy"]))) as runtime:
        for seed in range(arguments["seeds"]):
            draw = random.Random(seed)
            planted = sorted(draw.sample(range(6), draw.choice([1, 2])))
            trial = Trial(strategy=arguments["strategy"], steps=6, nan_at=planted, nan_rank=draw.randrange(2))
            result = train_on(runtime, trial)
            finite = [math.isfinite(loss) for loss in result["losses"]]
            outcomes.append({"planted": planted, "skipped": result["progress"]["skipped"], "finite": finite})
    return outcomes


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_nan_on_one_rank_makes_all_ranks_skip_the_same_step(strategy: str) -> None:
    first, second = launch(train_with_many_seeds, 2, deadline=400, arguments={"strategy": strategy, "seeds": 8})
    assert first == second
    for outcome in first:
        assert outcome["skipped"] == len(outcome["planted"])
        assert outcome["finite"] == [step not in outcome["planted"] for step in range(6)]


def test_a_skipped_step_leaves_the_weights_alone() -> None:
    with_nan = launch(train, 2, arguments={"strategy": "ddp", "steps": 4, "nan_at": [0, 1, 2, 3], "ema": False})
    untouched = launch(train, 1, arguments={"strategy": "single", "steps": 1, "nan_at": [0], "ema": False})
    assert with_nan[0]["parameters"] == with_nan[1]["parameters"] == untouched[0]["parameters"]


def test_too_many_skipped_steps_stop_every_rank_with_the_same_error() -> None:
    trial = {"strategy": "ddp", "steps": 9, "nan_at": [2, 3, 4], "nan_rank": 1, "max_skipped_steps": 3}
    with Launched(train, 2, trial) as launched:
        assert launched.wait(300) == [1, 1]
        assert launched.logs().count("3 steps in a row had a gradient norm that is not finite, the last at step 5") == 2


@pytest.mark.parametrize(("strategy", "victim"), [("ddp", 0), ("ddp", 1), ("fsdp", 1)])
def test_sigterm_on_one_rank_makes_all_ranks_save_the_same_step_and_leave(
    strategy: str, victim: int, tmp_path: Path
) -> None:
    trial = {"strategy": strategy, "steps": 50, "interval": 100, "run_dir": str(tmp_path)}
    results = launch(train, 2, arguments=trial | {"terminate_at": 4, "kill_rank": victim})
    assert [r["stopped"] for r in results] == [15, 15]
    steps = {r["progress"]["step"] for r in results}
    assert len(steps) == 1
    saved = latest_verified(tmp_path)
    assert saved is not None
    assert {read_progress(saved)["progress"]["step"]} == steps
    assert steps <= {4, 5}
