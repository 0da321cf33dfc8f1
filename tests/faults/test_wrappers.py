"""What stands between the supervisor and a rank may be stopped, killed or fail: the rank is still named rightly."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults.test_matrix import check_every_fault_was_printed_once_and_handled_in_time, fault, reported
from tests.support.faults.small_run import rank_is_at_step
from tests.support.faults.supervised import PATIENCE, Started, run, start

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]


def wait_for_step(started: Started, attempt: int, step: int) -> None:
    log = started.run_dir / "logs" / f"attempt_{attempt}" / "rank_00000.err"
    started.wait_for(lambda: log.exists() and rank_is_at_step(started.run_dir, step))


def test_a_rank_that_dies_under_a_stopped_wrapper_is_named_and_not_its_peer(tmp_path: Path) -> None:
    started = start(tmp_path / "run", restarts=2, steps=250, step_seconds=0.02, interval=10)
    for attempt, number in enumerate((signal.SIGKILL, signal.SIGSEGV)):
        wait_for_step(started, attempt, 30 + 50 * attempt)
        os.kill(started.rank_pid(0, "wrapper"), signal.SIGSTOP)
        os.kill(started.rank_pid(0), number)
    result = started.finish(400)
    assert result.code == 0, result.output
    assert [(rank, cause) for rank, _, cause in reported(result)] == [(0, "killed(SIGKILL)"), (0, "signal(SIGSEGV)")]
    assert "its wrapper is stopped" in result.faults[0]["message"]
    check_every_fault_was_printed_once_and_handled_in_time(result)


def test_a_stopped_wrapper_neither_delays_a_verdict_nor_outlives_the_supervisor(tmp_path: Path) -> None:
    started = start(tmp_path / "run", steps=2000, step_seconds=0.02, interval=1000)
    wait_for_step(started, 0, 5)
    for rank in (0, 1):
        os.kill(started.rank_pid(rank, "wrapper"), signal.SIGSTOP)
    started.process.send_signal(signal.SIGTERM)
    # Half of the grace that ranks have to save: who waits for a stopped wrapper waits for all of it.
    result = started.finish(30 * PATIENCE)
    assert result.code == 143, result.output
    assert result.failed_lines == []
    assert result.orphans == []
    again = start(tmp_path / "again", fault("", 9, 0, "", daemon=True), steps=100_000, workers=1)
    wait_for_step(again, 0, 5)
    os.kill(again.rank_pid(1, "wrapper"), signal.SIGSTOP)
    again.process.kill()
    again.process.communicate()
    assert again.leftovers(10.0) == []


def test_ranks_that_leave_next_to_a_wrapper_that_failed_were_not_preempted(tmp_path: Path) -> None:
    """Rank 1 gets SIGTERM from an unknown sender, all ranks save and leave, and the wrapper of rank 1 is gone."""
    leaves = fault("leave_without_wrapper", 1, 7, ["forward", "left"])
    result = run(tmp_path / "run", leaves, restarts=1)
    assert result.code == 0, result.output
    assert [(record["rank"], record["cause"]) for record in result.faults] == [(1, "launcher_failed")]
    assert "the wrapper of rank 1 was killed by SIGKILL" in result.faults[0]["message"]
    assert result.faults[0]["lost_steps"] == 0
    assert result.orphans == []
