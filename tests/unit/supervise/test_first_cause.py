"""The first cause: by time on one clock, and never a consequence."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ups.record.blackbox import BlackBox, Phase, ring_path
from ups.record.run_dir import RunDir
from ups.supervise.first_cause import RankEnd, first_cause, rank_ends
from ups.supervise.rank_view import RankView, least_advanced


def rank(root: Path, number: int, *, code: int | None = None, at_ns: int = 0, **failure: Any) -> RankView:
    """A rank as it looks after its death: a ring at step 7, an exit, a failure record, as given."""
    box = BlackBox.create(ring_path(root / "box", number), rank=number, world_size=2, attempt=0, capacity=8)
    box.record(Phase.FORWARD, 7)
    if code is not None:
        document = {"code": code, "time_monotonic_ns": at_ns, "peak_resident_bytes": 0}
        (root / "box" / f"rank_{number:05d}.exit.json").write_text(json.dumps(document))
    if failure:
        stem = RunDir(root).failure_stem(0, number)
        stem.parent.mkdir(parents=True, exist_ok=True)
        base = {"format": 1, "step": 7, "phase": "forward", "at": "x.py:1", "message": "", "hint": "", "cascade": False}
        Path(f"{stem}.json").write_text(json.dumps({**base, "time_monotonic_ns": at_ns, **failure}))
    view = RankView(root, root / "box", 0, number)
    view.refresh()
    return view


def ends(*views: RankView, oom: bool = False, ended_ns: int | None = None) -> list[RankEnd]:
    return rank_ends(views, out_of_memory_kill=oom, ended_ns=ended_ns)


def test_the_first_by_time_is_the_cause(tmp_path: Path) -> None:
    late = rank(tmp_path, 0, at_ns=200, cause="exception(KeyError)")
    early = rank(tmp_path, 1, code=-11, at_ns=100)
    cause = first_cause(ends(late, early))
    assert cause is not None
    assert (cause.rank, cause.cause, cause.step, cause.phase) == (1, "signal(SIGSEGV)", 7, "forward")


def test_a_consequence_is_never_the_cause_even_if_it_was_written_first(tmp_path: Path) -> None:
    echo = rank(tmp_path, 0, at_ns=90, cause="exception(RuntimeError)", cascade=True)
    root = rank(tmp_path, 1, code=-9, at_ns=100)
    cause = first_cause(ends(echo, root))
    assert cause is not None
    assert (cause.rank, cause.cause) == (1, "killed(SIGKILL)")


def test_where_all_are_consequences_that_is_what_is_said(tmp_path: Path) -> None:
    views = [rank(tmp_path, n, at_ns=90 - n, cause="exception(RuntimeError)", cascade=True) for n in (0, 1)]
    cause = first_cause(ends(*views))
    assert cause is not None
    assert (cause.rank, cause.cause) == (1, "connection_lost")


def test_sigkill_is_lack_of_memory_only_if_the_kernel_says_so(tmp_path: Path) -> None:
    view = rank(tmp_path, 0, code=-9, at_ns=100)
    assert ends(view, oom=False)[0].cause == "killed(SIGKILL)"
    assert ends(view, oom=True)[0].cause == "out_of_memory"


def test_a_wrapper_that_the_kernel_killed_for_memory_is_lack_of_memory(tmp_path: Path) -> None:
    started, never = rank(tmp_path, 0), rank(tmp_path, 1)
    started.pid = 1
    for view in (started, never):
        view.notice_unrecorded_death(-9)
    assert [rank_end.cause for rank_end in ends(started, never)] == ["killed(SIGKILL)", "launcher_failed"]
    assert {rank_end.cause for rank_end in ends(started, never, oom=True)} == {"out_of_memory"}
    assert "before it started the rank" in ends(never, oom=True)[0].message


def test_a_wrapper_that_left_by_itself_is_a_failed_launcher(tmp_path: Path) -> None:
    view = rank(tmp_path, 0)
    view.pid = 1
    view.notice_unrecorded_death(None)
    assert view.alive
    view.notice_unrecorded_death(3)
    assert [(s.cause, s.message) for s in ends(view)] == [
        ("launcher_failed", "the wrapper of rank 0 failed with exit code 3, and the rank died with it")
    ]


def test_deaths_that_the_supervisor_caused_are_not_seen(tmp_path: Path) -> None:
    assert ends(rank(tmp_path, 0, code=-9, at_ns=100), ended_ns=50) == []


def test_a_crash_is_placed_by_its_dump(tmp_path: Path) -> None:
    view = rank(tmp_path, 1, code=-11, at_ns=100)
    stem = RunDir(tmp_path).failure_stem(0, 1)
    stem.parent.mkdir(parents=True)
    dump = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n"
        '  File "/me/kernel.py", line 31 in launch\n'
    )
    Path(f"{stem}.crash.txt").write_text(dump)
    assert ends(view)[0].at == "/me/kernel.py:31"


def test_an_abort_of_gloo_is_a_mismatch_or_an_echo_by_what_it_said(tmp_path: Path) -> None:
    view = rank(tmp_path, 0, code=-6, at_ns=100)
    log = tmp_path / view.log
    log.parent.mkdir(parents=True)
    log.write_text(
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n what(): op.preamble.length <= op.nbytes"
    )
    assert ends(view)[0].cause == "collective_mismatch"
    log.write_text("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\nterminate called")
    assert ends(view)[0].cascade


def test_leaving_early_with_code_0_is_a_fault_and_finishing_is_not(tmp_path: Path) -> None:
    assert ends(rank(tmp_path, 0, code=0, at_ns=100))[0].cause == "early_exit(0)"
    box = BlackBox.create(ring_path(tmp_path / "box", 1), rank=1, world_size=2, attempt=0, capacity=8)
    box.finish(20)
    (tmp_path / "box/rank_00001.exit.json").write_text(json.dumps({"code": 0, "time_monotonic_ns": 1}))
    done = RankView(tmp_path, tmp_path / "box", 0, 1)
    done.refresh()
    assert ends(done) == []


def test_the_rank_that_is_behind_is_found_by_step_and_place_within_it(tmp_path: Path) -> None:
    ahead, behind = rank(tmp_path, 0), rank(tmp_path, 1)
    box = BlackBox.create(ring_path(tmp_path / "box", 0), rank=0, world_size=2, attempt=0, capacity=8)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        box.record(phase, 7)
    ahead = RankView(tmp_path, tmp_path / "box", 0, 0)
    ahead.refresh()
    assert least_advanced([ahead, behind]) == [behind]


def test_a_death_that_the_wrapper_is_late_to_record_has_no_reason_and_no_peak_until_it_does(tmp_path: Path) -> None:
    """The parent of the rank is a busy wrapper: it lives, and does not reap its child."""
    view = rank(tmp_path, 0)
    program = "import subprocess, time; print(subprocess.Popen(['sleep', '300']).pid, flush=True); time.sleep(300)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as wrapper:
        assert wrapper.stdout is not None
        pid = int(wrapper.stdout.readline())
        (tmp_path / "box/rank_00000.pid").write_text(json.dumps({"rank_pid": pid, "wrapper_pid": wrapper.pid}))
        view.refresh()
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while view.alive and time.monotonic() < deadline:
            view.notice_unrecorded_death(None)
            time.sleep(0.05)
        wrapper.kill()
    (end,) = ends(view)
    assert (end.cause, end.message) == ("killed(SIGKILL)", "")
    assert view.exit is not None
    assert "peak_resident_bytes" not in view.exit
    recorded = {"pid": pid, "code": -9, "time_monotonic_ns": 5, "peak_resident_bytes": 7}
    (tmp_path / "box/rank_00000.exit.json").write_text(json.dumps(recorded))
    view.refresh()
    assert view.exit == recorded


def test_a_rank_that_was_reaped_is_not_called_killed_before_its_wrapper_had_time_to_say_how_it_ended(
    tmp_path: Path,
) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    view = rank(tmp_path, 0)
    (tmp_path / "box/rank_00000.pid").write_text(json.dumps({"rank_pid": gone.pid, "wrapper_pid": os.getpid()}))
    view.refresh()
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        view.notice_unrecorded_death(None)
        time.sleep(0.05)
    assert view.alive
