"""The wrapper of a rank: sees the moment of death, passes signals on, and nothing outlives whom it depends on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ups.record import processes

pytestmark = pytest.mark.processes


def wrap(run_dir: Path, program: str, **variables: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "RANK": "3", "UPS_ATTEMPT": "1", "WRAPPER_TEST": str(run_dir), **variables}
    command = [
        sys.executable,
        "-m",
        "ups.record.rank_wrapper",
        str(run_dir),
        sys.executable,
        "-c",
        textwrap.dedent(program),
    ]
    return subprocess.Popen(command, env=environment)


def exit_of(run_dir: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run_dir / "failures/attempt_1/rank_00003.exit.json").read_text())
    return record


def wait_for(what: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def left_over(run_dir: Path) -> list[processes.Process]:
    return processes.carriers("WRAPPER_TEST", str(run_dir))


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 11)", -11),
        ("1 / 0", 1),
    ],
)
def test_the_exit_is_written_down_and_passed_on(tmp_path: Path, program: str, code: int) -> None:
    before = time.monotonic_ns()
    assert wrap(tmp_path, program).wait(20) == code
    record = exit_of(tmp_path)
    assert (record["rank"], record["attempt"], record["code"]) == (3, 1, code)
    assert before < record["time_monotonic_ns"] < time.monotonic_ns()
    assert record["peak_resident_bytes"] > 2**20


def test_output_goes_to_the_logs_of_the_rank(tmp_path: Path) -> None:
    wrap(tmp_path, "import sys; print('good'); print('bad', file=sys.stderr)").wait(20)
    assert (tmp_path / "logs/attempt_1/rank_00003.out").read_text() == "good\n"
    assert (tmp_path / "logs/attempt_1/rank_00003.err").read_text() == "bad\n"


def test_sigterm_reaches_the_rank_once_and_the_wrapper_waits_for_it(tmp_path: Path) -> None:
    program = """
        import signal, sys, time
        heard = []
        signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
        print("ready")
        while not heard:
            time.sleep(0.02)
        time.sleep(0.5)
        sys.exit(40 + len(heard))
    """
    wrapper = wrap(tmp_path, program)
    log = tmp_path / "logs/attempt_1/rank_00003.out"
    wait_for(lambda: log.exists() and "ready" in log.read_text())
    os.kill(wrapper.pid, signal.SIGTERM)
    assert wrapper.wait(20) == 41


def test_children_of_the_rank_do_not_outlive_it(tmp_path: Path) -> None:
    program = """
        import os, subprocess
        subprocess.Popen(["sleep", "600"])
        subprocess.Popen(["setsid", "sleep", "600"])
        os._exit(5)
    """
    assert wrap(tmp_path, program).wait(20) == 5
    assert left_over(tmp_path) == []


def test_a_killed_wrapper_takes_the_rank_with_it(tmp_path: Path) -> None:
    wrapper = wrap(tmp_path, "import time; print('ready'); time.sleep(600)")
    log = tmp_path / "logs/attempt_1/rank_00003.out"
    wait_for(lambda: log.exists() and "ready" in log.read_text())
    wrapper.kill()
    wrapper.wait()
    wait_for(lambda: left_over(tmp_path) == [], 10)


def test_a_killed_launcher_takes_wrapper_rank_and_their_children_with_it(tmp_path: Path) -> None:
    program = "import subprocess, time; subprocess.Popen(['setsid', 'sleep', '600']); print('ready'); time.sleep(600)"
    launcher = f"""
import subprocess, sys
rank = [sys.executable, "-c", {program!r}]
subprocess.Popen([sys.executable, "-m", "ups.record.rank_wrapper", {str(tmp_path)!r}, *rank])
import time; time.sleep(600)
"""
    environment = {**os.environ, "RANK": "3", "UPS_ATTEMPT": "1", "WRAPPER_TEST": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", launcher], env=environment)
    log = tmp_path / "logs/attempt_1/rank_00003.out"
    wait_for(lambda: log.exists() and "ready" in log.read_text())
    process.kill()
    process.wait()
    wait_for(lambda: left_over(tmp_path) == [], 10)
    assert exit_of(tmp_path)["supervisor_gone"] is True


def test_a_continue_signal_from_a_living_parent_changes_nothing(tmp_path: Path) -> None:
    wrapper = wrap(tmp_path, "import time; print('ready'); time.sleep(1.5)")
    log = tmp_path / "logs/attempt_1/rank_00003.out"
    wait_for(lambda: log.exists() and "ready" in log.read_text())
    os.kill(wrapper.pid, signal.SIGSTOP)
    os.kill(wrapper.pid, signal.SIGCONT)
    assert wrapper.wait(20) == 0
    assert exit_of(tmp_path)["supervisor_gone"] is False


def test_the_wrapper_is_small(tmp_path: Path) -> None:
    wrapper = wrap(tmp_path, "import time; print('ready'); time.sleep(600)")
    log = tmp_path / "logs/attempt_1/rank_00003.out"
    wait_for(lambda: log.exists() and "ready" in log.read_text())
    status = Path(f"/proc/{wrapper.pid}/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    wrapper.kill()
    wrapper.wait()
    assert resident < 32 * 1024  # KiB; a process with torch has more than 200 MiB


def test_a_rank_that_cannot_be_started_is_reported(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no directory can be made here")
    box = tmp_path / "box"
    box.mkdir()
    process = wrap(tmp_path, "pass", UPS_BLACKBOX_DIR=str(box))
    assert process.wait(20) == 1
    record = json.loads((box / "rank_00003.exit.json").read_text())
    assert record["not_started"].startswith("rank 3 could not be started: ")
    assert record == exit_of(tmp_path)


def test_a_process_whose_name_is_cut_inside_a_character_is_seen(tmp_path: Path) -> None:
    program = tmp_path / "aéééééééé"  # 17 bytes, of which the kernel keeps 15
    shutil.copy2(shutil.which("sleep") or "/bin/sleep", program)
    process = subprocess.Popen([str(program), "60"])
    try:
        wait_for(lambda: processes.is_alive(process.pid))
        assert process.pid in {child.pid for child in processes.descendants(os.getpid())}
    finally:
        process.kill()
        process.wait()
