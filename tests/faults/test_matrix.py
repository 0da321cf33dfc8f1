"""The fault matrix on toy ranks: each fault named by rank, phase and cause, survived, and nothing left running.

Faults share launches: attempt after attempt meets the next one and the run must still complete with the bytes of a run
that met none. The names m1, m2, ... are the rows of the fault matrix. The bars are the product's: a death is noticed
within 2 s, all ranks are down within 5 s; UPS_TEST_PATIENCE multiplies them where the machine is shared.
"""

import contextlib
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults.small_run import rank_is_at_step
from tests.support.faults.supervised import PATIENCE, PROGRAMS, Result, run, start, usual_port_taken
from ups.record.blackbox import BlackBoxReader, Mark, ring_path

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]

LINE_OF_PERSON_CODE = 1 + next(
    n for n, line in enumerate((PROGRAMS / "faults_to_plant.py").read_text().splitlines()) if "shard_0003.h5" in line
)


def fault(kind: str, rank: int, step: int, phase: str | list[str], **more: Any) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "step": step, "phase": phase, **more}


def reported(result: Result) -> list[tuple[int, str, str]]:
    return [(f["rank"], f["phase"], f["cause"]) for f in result.faults]


def check_every_fault_was_printed_once_and_handled_in_time(result: Result) -> None:
    assert len(result.failed_lines) == len(result.faults)
    for line, record in zip(result.failed_lines, result.faults, strict=True):
        assert f"rank={record['rank']}/{record['world']} " in line
        assert f" cause={record['cause']} " in line
        assert record["down_after_seconds"] <= 5 * PATIENCE
        if not record["cause"].startswith(("stopped", "stalled", "deadline")):
            assert record["noticed_after_seconds"] <= 2 * PATIENCE
        assert record["lost_steps"] <= 10
    assert result.orphans == []
    assert all(attempt["orphans"] == 0 for attempt in result.document["attempts"])


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Result:
    with usual_port_taken():  # M13
        return run(tmp_path_factory.mktemp("clean") / "run")


def test_m13_m22_with_its_usual_port_taken_a_clean_run_is_proven_and_raises_no_alarm(clean: Result) -> None:
    assert clean.code == 0
    assert clean.failed_lines == []
    assert clean.document["notices"] == []
    assert "state=completed" in clean.verdict
    assert clean.orphans == []
    assert len(clean.digests) == 1


def test_m1_m2_m3_m4_deaths_are_named_and_survived(tmp_path: Path, clean: Result) -> None:
    result = run(
        tmp_path / "run",
        fault("exception", 1, 3, "forward"),
        fault("kill", 0, 7, "backward", signal="SIGKILL"),
        fault("crash", 1, 11, "optimizer", signal="SIGSEGV"),
        fault("os_exit", 0, 16, "data"),
        fault("crash", 0, 0, "init", signal="SIGABRT"),
        fault("sys_exit", 1, 18, "forward"),
        restarts=3,
        workers=1,
        timeout_seconds=1200,
    )
    assert result.code == 0
    assert reported(result) == [
        (1, "forward", "exception(FileNotFoundError)"),
        (0, "backward", "killed(SIGKILL)"),
        (1, "optimizer", "signal(SIGSEGV)"),
        (0, "data", "early_exit(0)"),
        (0, "init", "signal(SIGABRT)"),
        (1, "forward", "early_exit(0)"),
    ]
    locations = [record["at"] for record in result.faults]
    assert locations[0].endswith(f"faults_to_plant.py:{LINE_OF_PERSON_CODE}")
    assert locations[1] == locations[3] == "-"
    assert all("faults_to_plant.py:" in locations[n] for n in (2, 4, 5))
    check_every_fault_was_printed_once_and_handled_in_time(result)
    assert result.digests == clean.digests


def test_m1_the_cause_is_named_although_all_its_consequences_were_written_first(tmp_path: Path) -> None:
    result = run(tmp_path / "run", fault("exception", 3, 10, "optimizer"), ranks=4, interval=4, watched=0)
    assert result.code == 6
    assert reported(result) == [(3, "optimizer", "exception(FileNotFoundError)")]
    assert (result.faults[0]["checkpoint"], result.faults[0]["lost_steps"]) == (8, 2)
    assert result.faults[0]["action"] == "stop(restarts_off)"
    assert len(result.faults[0]["consequences"]) == 3
    assert "state=failed" in result.verdict
    check_every_fault_was_printed_once_and_handled_in_time(result)


def test_m5_m6_m7_who_stands_still_or_leaves_the_pattern_is_named_with_its_place(tmp_path: Path, clean: Result) -> None:
    result = run(
        tmp_path / "run",
        fault("kill", 0, 3, "data", signal="SIGSTOP"),
        fault("hold_the_lock", 1, 7, "backward"),
        fault("skip_collective", 1, 12, "backward"),
        # Level with the rank that waits for it: only the stacks distinguish them.
        fault("sleep", 1, 13, "sync", seconds=3600),
        fault("wrong_shape", 0, 16, "forward"),
        fault("stop_worker", 1, 18, "data"),
        restarts=3,
        workers=1,
        timeout_seconds=1200,
    )
    assert result.code == 0
    assert reported(result) == [
        (0, "data", "stopped(SIGSTOP)"),
        (1, "backward", "stalled"),
        (1, "sync", "collective_mismatch(all_reduce(asked,int64[1]))"),
        (1, "sync", "stalled"),
        (0, "sync", "collective_mismatch(all_reduce(gradient,float32[5]))"),
        (1, "data", "stopped(SIGSTOP)"),
    ]
    assert "faults_to_plant.py:" in result.faults[1]["at"]
    assert "faults_to_plant.py:" in result.faults[3]["at"]
    assert "toy_rank.py:" in result.faults[4]["at"]
    assert "SLOW rank=1/2 step=7 phase=backward" in result.output
    for record in result.faults:
        assert record["noticed_after_seconds"] <= 10 * PATIENCE
    check_every_fault_was_printed_once_and_handled_in_time(result)
    assert result.digests == clean.digests


def test_m9b_lack_of_memory_is_cured_by_half_the_micro_batch(tmp_path: Path, clean: Result) -> None:
    memory = fault("out_of_memory", 1, 7, "forward", fits=2)
    result = run(tmp_path / "run", memory, memory, memory, restarts=3, micro_batch_size=8, timeout_seconds=600)
    assert result.code == 0
    assert [record["cause"] for record in result.faults] == ["out_of_memory", "out_of_memory"]
    assert [record["action"] for record in result.faults] == [
        "restart 1/3(engine.micro_batch_size=4)",
        "restart 2/3(engine.micro_batch_size=2)",
    ]
    assert result.document["overrides"] == {"engine.micro_batch_size": 2}
    assert result.digests == clean.digests


def test_m10_sigterm_is_a_request_to_save_and_leave(tmp_path: Path) -> None:
    started = start(tmp_path / "run", step_seconds=0.05, steps=2000, interval=1000, workers=1)
    started.wait_for(lambda: rank_is_at_step(started.run_dir, 10))
    started.process.send_signal(signal.SIGTERM)
    result = started.finish(150)
    assert result.code == 143
    assert result.failed_lines == []
    assert "state=preempted" in result.verdict
    assert " lost=0" in result.verdict
    assert result.orphans == []
    saved = result.document["checkpoint"]
    resumed = run(tmp_path / "run", steps=saved + 3)
    assert resumed.code == 0
    assert resumed.document["attempts"][1]["from_checkpoint"] == saved


def test_m10_a_rank_that_has_saved_and_does_not_leave_does_not_hold_up_the_exit(tmp_path: Path) -> None:
    wedged = fault("sleep", 1, 0, "left", seconds=3600)
    started = start(tmp_path / "run", wedged, step_seconds=0.05, steps=2000, interval=1000)
    started.wait_for(lambda: rank_is_at_step(started.run_dir, 10))
    started.process.send_signal(signal.SIGTERM)
    result = started.finish(150)
    assert (result.code, result.failed_lines) == (143, []), result.output
    assert " lost=0" in result.verdict
    (notice,) = result.document["notices"]
    assert "rank=1/2" in notice["line"]
    assert "did not leave in time, and was ended" in notice["line"]
    assert result.document["attempts"][0]["exits"]["1"] == -signal.SIGKILL
    assert result.orphans == []


def test_m15_slow_but_healthy_is_never_killed(tmp_path: Path, clean: Result) -> None:
    """A compilation (a step that declares its deadline), and a save on one rank while the other waits for it.

    The one that waits has written fewer records, so it looks like the last: no rank is judged while any rank is busy.
    """
    result = run(
        tmp_path / "run",
        fault("sleep", 0, 10, ["forward", "save"], seconds=8),
        deadlines={"name_floor_seconds": 2.0, "kill_floor_seconds": 4.0},
        forward_deadline=120,
        one_saves=1,
    )
    assert result.code == 0
    assert result.failed_lines == []
    assert result.document["notices"] == []
    assert result.digests == clean.digests


def test_m15_a_straggler_is_named_and_left_alone(tmp_path: Path, clean: Result) -> None:
    result = run(
        tmp_path / "run",
        fault("sleep", 1, 10, "data", seconds=15),
        deadlines={"name_floor_seconds": 1.0, "kill_floor_seconds": 60.0},
    )
    assert result.code == 0
    assert result.failed_lines == []
    assert [notice["rank"] for notice in result.document["notices"]] == [1]
    assert "SLOW rank=1/2 step=10 phase=data" in result.output
    assert result.digests == clean.digests


@pytest.mark.long
def test_m17_a_wedged_teardown_and_a_killed_wrapper_end_in_time(tmp_path: Path) -> None:
    result = run(
        tmp_path / "run",
        fault("kill_wrapper", 1, 12, "forward", daemon=True),
        fault("sleep", 1, 20, "teardown", seconds=3600),
        restarts=3,
        workers=1,
        timeout_seconds=200,
        deadlines={"teardown_seconds": 8.0 * PATIENCE},
    )
    assert result.code == 0
    causes = [record["cause"] for record in result.faults]
    assert causes == ["killed(SIGKILL)", "deadline(teardown)"]
    assert "the wrapper of rank 1 was killed by SIGKILL" in result.faults[0]["message"]
    assert [record["rank"] for record in result.faults] == [1, 1]
    assert result.orphans == []


@pytest.mark.parametrize(
    ("kind", "rank", "more", "noticed"),
    [
        ("sleep", 1, {"seconds": 3600}, "did not leave in time, and was ended"),
        ("kill", 0, {"signal": "SIGKILL"}, "ended with killed(SIGKILL)"),
        ("exception", 1, {}, "ended with exception(FileNotFoundError)"),
    ],
)
def test_m17_what_happens_to_a_rank_after_its_work_is_noted_and_nothing_is_trained_again(
    tmp_path: Path, kind: str, rank: int, more: dict[str, Any], noticed: str
) -> None:
    after = fault(kind, rank, 20, "finished", **more)
    result = run(tmp_path / "run", after, restarts=3, deadlines={"teardown_seconds": 8.0 * PATIENCE})
    assert (result.code, result.failed_lines, len(result.document["attempts"])) == (0, [], 1), result.output
    assert result.verdict.endswith("step=20 ckpt=20 verified")
    (notice,) = result.document["notices"]
    assert notice["rank"] == rank
    assert noticed in notice["line"]
    assert notice["line"] in result.output
    assert result.orphans == []


def test_m4_m17_a_rank_that_is_killed_after_its_work_proves_nothing_without_its_checkpoint(tmp_path: Path) -> None:
    result = run(tmp_path / "run", fault("damage", 0, 20, "finished", signal="SIGKILL"))
    assert result.code == 6
    assert [record["cause"] for record in result.faults] == ["unproven(final_checkpoint)"]
    assert "state=failed" in result.verdict


def test_m4_m11_a_success_that_cannot_be_proven_is_no_success(tmp_path: Path) -> None:
    result = run(tmp_path / "run", fault("damage", 0, 20, "teardown"))
    assert result.code == 6
    assert [record["cause"] for record in result.faults] == ["unproven(final_checkpoint)"]
    assert "state=failed" in result.verdict


def test_m4_ranks_that_are_done_at_different_steps_are_no_success(tmp_path: Path) -> None:
    result = run(tmp_path / "run", fault("done_too_early", 1, 20, "teardown"))
    assert result.code == 6
    assert reported(result) == [(1, "teardown", "unproven(last_step)")]
    assert "state=failed" in result.verdict


@pytest.mark.long
def test_m12_a_low_limit_on_open_files_is_raised_or_named(tmp_path: Path) -> None:
    many = fault("open_files", 1, 7, "data", count=200)
    raised = run(tmp_path / "raised", many, open_files=(64, 4096))
    assert raised.code == 0, raised.output
    named = run(tmp_path / "named", many, open_files=(64, 64))
    assert named.code == 6
    assert reported(named) == [(1, "data", "exception(OSError)")]
    assert "Too many open files" in named.faults[0]["message"]
    assert "faults_to_plant.py:" in named.faults[0]["at"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_m22_ten_clean_runs_raise_no_alarm_and_leave_in_time(tmp_path: Path) -> None:
    for number in range(10):
        result = run(tmp_path / str(number))
        left_ns = time.monotonic_ns()
        with contextlib.closing(BlackBoxReader(ring_path(result.run_dir / "blackbox", 0))) as reader:
            finished = reader.latest()
        assert (result.code, result.failed_lines, result.document["notices"]) == (0, [], []), result.output
        assert finished is not None
        assert finished.mark is Mark.FINISHED
        assert (left_ns - finished.time_ns) / 1e9 <= 5 * PATIENCE
        assert result.orphans == []


def test_m17_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    started = start(tmp_path / "run", fault("", 9, 0, "", daemon=True), steps=100_000, workers=2)
    started.wait_for(lambda: rank_is_at_step(started.run_dir, 5))
    started.process.kill()
    started.process.communicate()
    assert started.leftovers(10.0) == []


def test_m20_the_same_crash_at_the_same_step_stops_at_the_third_time(tmp_path: Path) -> None:
    again = fault("exception", 1, 7, "data")
    result = run(tmp_path / "run", again, again, again, again, restarts=50, timeout_seconds=600)
    assert result.code == 6
    assert [entry["action"] for entry in result.faults] == ["restart 1/50", "restart 2/50", "stop(same_fault_3_times)"]
    assert result.orphans == []
