"""Progress survives JSON and refuses what is not progress; a budget becomes a number of steps."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ups.config.stage import OperatorStageConfig
from ups.errors import CheckpointError
from ups.training import progress as module
from ups.training.progress import Budget, Progress, cpu_seconds

COUNT = st.integers(0, 10**9)


SECONDS = st.floats(0, 1e9)


PART = st.floats(0, 1)


@given(
    st.builds(
        Progress,
        *[COUNT] * 7,
        SECONDS,
        st.booleans(),
        mean_norm=SECONDS,
        mark_step=COUNT,
        mark_done=PART,
        mark_ppm=COUNT,
    )
)
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
    for added in ("mean_norm", "mark_step", "mark_done", "mark_ppm"):
        del old[added]
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


def at(step: int, **values: int) -> Progress:
    return Progress(stage_step=step, step=step, **values)


def test_a_budget_gives_a_number_of_steps_after_its_first_twentieth(clock: Clock) -> None:
    budget = Budget(OperatorStageConfig(budget_seconds=100.0))
    assert budget.propose(at(0)) == (0, 0)
    clock.now += 3.0  # the first step warms up and does not count for the rate
    assert budget.propose(at(1)) == (30_000, 0)
    clock.now += 1.0
    assert budget.propose(at(3)) == (40_000, 0)
    clock.now += 1.0
    assert budget.propose(at(5)) == (50_000, 5 + 190)
    assert budget.propose(at(6, mark_step=6, mark_ppm=50_000, total_steps=195)) == (50_000, 0)
    clock.now += 5.0
    assert budget.propose(at(30, mark_step=6, mark_ppm=50_000, total_steps=195)) == (100_000, 30 + 450)


def test_too_few_steps_show_no_rate(clock: Clock) -> None:
    budget = Budget(OperatorStageConfig(budget_seconds=100.0), used_seconds=40.0)
    marked = {"mark_step": 10, "mark_ppm": 300_000, "total_steps": 40}
    for step, expected in ((15, 0), (16, 0), (17, 0), (18, 18 + 37)):
        assert budget.propose(at(step, **marked))[1] == expected
        clock.now += 1.5
    clock.now += 100.0
    assert budget.propose(at(19, **marked)) == (10**6, 20)


def test_time_used_before_a_restart_counts(clock: Clock) -> None:
    budget = Budget(OperatorStageConfig(budget_seconds=100.0), used_seconds=90.0)
    clock.now += 1.0
    assert budget.propose(at(10))[0] == 910_000
    assert budget.used_seconds == 91.0


def test_a_budget_shorter_than_a_step_still_ends(clock: Clock) -> None:
    budget = Budget(OperatorStageConfig(budget_seconds=1.0))
    clock.now += 50.0
    assert budget.propose(at(1)) == (10**6, 2)


def test_a_stage_of_steps_has_no_budget() -> None:
    assert Budget(OperatorStageConfig(steps=5)).propose(at(3)) == (0, 0)


DRIFTS: dict[str, Callable[[float], float]] = {
    "none": lambda part: 1.0,
    "slower": lambda part: 1.0 + 0.3 * part,
    "faster": lambda part: 1.0 - 0.3 * part,
    "a jump up": lambda part: 1.0 if part < 0.5 else 1.3,
    "a jump down late": lambda part: 1.0 if part < 0.85 else 0.7,
    "waves": lambda part: 1.0 + 0.3 * math.sin(20 * part),
}


@pytest.mark.parametrize("restarts", [0, 3])
@pytest.mark.parametrize(("budget_seconds", "step_seconds"), [(240.0, 0.1), (2160.0, 0.6), (3600.0, 8.0)])
@pytest.mark.parametrize("drift", DRIFTS)
def test_the_time_used_is_within_three_percent(
    clock: Clock, drift: str, budget_seconds: float, step_seconds: float, restarts: int
) -> None:
    length = OperatorStageConfig(budget_seconds=budget_seconds)
    progress, budget, parts = Progress(), Budget(length), []
    restart_at = [budget_seconds * (n + 1) / (restarts + 1) for n in range(restarts)]
    while not progress.total_steps or progress.stage_step < progress.total_steps:
        status = budget.propose(progress)
        parts.append(progress.done)
        clock.now += step_seconds * DRIFTS[drift](budget.used_seconds / budget_seconds)
        clock.now += 20 * step_seconds if progress.stage_step == 0 else 0.0
        progress.stage_step += 1
        progress.step += 1
        progress.set_length(*status)
        progress.budget_used_seconds = budget.used_seconds
        if restart_at and budget.used_seconds > restart_at[0]:
            restart_at.pop(0)
            progress = Progress.from_json(json.loads(json.dumps(progress.to_json())))
            budget = Budget(length, progress.budget_used_seconds)
    assert abs(budget.used_seconds / budget_seconds - 1) < 0.01
    assert parts == sorted(parts)
    assert 0.97 < parts[-1] <= 1.0 + 1e-12
    largest = max(b - a for a, b in itertools.pairwise(parts))
    assert largest < max(0.02, 30 * step_seconds / budget_seconds)


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


def test_a_stage_whose_budget_is_used_is_done() -> None:
    progress = Progress(stage_step=10, total_steps=20)
    progress.set_length(1_000_000, 10)
    assert progress.done == 1.0
    assert Progress(stage_step=10, total_steps=10).done == 1.0
