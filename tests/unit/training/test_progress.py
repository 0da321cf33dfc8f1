"""Progress survives JSON and refuses what is not progress; a budget becomes a number of steps."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ups.config.stage import OperatorStageConfig
from ups.errors import CheckpointError
from ups.training import progress as module
from ups.training.progress import Budget, Progress, cpu_seconds

COUNT = st.integers(0, 10**9)


SECONDS = st.floats(0, 1e9)


@given(st.builds(Progress, COUNT, COUNT, COUNT, COUNT, COUNT, COUNT, COUNT, SECONDS, st.booleans(), SECONDS))
def test_progress_survives_json(progress: Progress) -> None:
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress


@pytest.mark.parametrize(
    "change", [{"step": -1}, {"step": "3"}, {"step": True}, {"step": 1.5}, {"more": 1}, {"stage_finished": 1}]
)
def test_malformed_progress_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match="malformed"):
        Progress.from_json(Progress().to_json() | change)
    with pytest.raises(CheckpointError, match="malformed"):
        Progress.from_json([1, 2])


def test_progress_of_an_earlier_version_is_read() -> None:
    old = Progress(step=3, stage_step=3).to_json()
    del old["mean_norm"]
    assert Progress.from_json(old) == Progress(step=3, stage_step=3)
    del old["skipped"]
    with pytest.raises(CheckpointError, match="malformed"):
        Progress.from_json(old)


def test_the_next_stage_starts_at_its_first_step_and_keeps_the_count_of_the_run() -> None:
    following = Progress(
        stage_index=1, stage_step=9, step=30, total_steps=9, skipped=2, stage_finished=True
    ).next_stage()
    assert following == Progress(stage_index=2, step=30, skipped=2)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", clock)
    return clock


def test_a_budget_fixes_the_number_of_steps_from_its_first_twentieth(clock: Clock) -> None:
    budget = Budget(OperatorStageConfig(budget_seconds=100.0))
    assert budget.propose(0, 0) == (0, 0)
    clock.now += 3.0  # the first step warms up and does not count for the rate
    assert budget.propose(1, 0) == (30_000, 0)
    clock.now += 1.0
    assert budget.propose(3, 0) == (40_000, 0)
    clock.now += 1.0
    assert budget.propose(5, 0) == (50_000, 5 + 190)
    assert budget.propose(5, 77) == (0, 77)


def test_time_used_before_a_restart_counts(clock: Clock) -> None:
    budget = Budget(OperatorStageConfig(budget_seconds=100.0), used_seconds=90.0)
    clock.now += 1.0
    assert budget.propose(10, 0)[0] == 910_000
    assert budget.used_seconds == 91.0


def test_a_budget_shorter_than_a_step_still_ends(clock: Clock) -> None:
    budget = Budget(OperatorStageConfig(budget_seconds=1.0))
    clock.now += 50.0
    assert budget.propose(1, 0) == (10**6, 2)


def test_cpu_time_counts_living_children() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    before = cpu_seconds()
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert cpu_seconds() - before > 0.25
    finally:
        child.kill()
        child.wait()
        child.communicate()


def test_cpu_time_stands_still_while_nothing_runs() -> None:
    before = cpu_seconds()
    time.sleep(0.2)
    assert cpu_seconds() - before < 0.15
