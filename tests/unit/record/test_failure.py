"""Failure records: written by the process that fails, before anything else, with the line to change."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from ups.record.failure import Frame, innermost, location_of_dump, memory_of_process, read_failure
from ups.record.run_dir import RunDir

pytestmark = pytest.mark.processes

BEGIN = """
    import os, sys, threading, time, signal, ctypes, json
    from pathlib import Path
    from ups.record.failure import install_from_environment
    from ups.record.blackbox import Phase
    recorder = install_from_environment(Path(sys.argv[1]))
    recorder.box.record(Phase.FORWARD, 41, 1, 0, 77)
"""


def start(run_dir: Path, body: str, **variables: str) -> subprocess.Popen[str]:
    script = run_dir / "person.py"
    script.write_text(textwrap.dedent(BEGIN) + textwrap.dedent(body))
    environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "4", "UPS_ATTEMPT": "2", **variables}
    return subprocess.Popen(
        [sys.executable, str(script), str(run_dir)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=run_dir,
    )


def run(run_dir: Path, body: str, **variables: str) -> tuple[int, str, dict[str, Any] | None]:
    process = start(run_dir, body, **variables)
    _, err = process.communicate(timeout=30)
    return process.returncode, err, read_failure(RunDir(run_dir).failure_stem(2, 1))


def line_of(run_dir: Path, text: str) -> int:
    return next(n for n, line in enumerate((run_dir / "person.py").read_text().splitlines(), 1) if text in line)


def test_an_exception_becomes_a_record_with_the_persons_line(tmp_path: Path) -> None:
    body = """
    def load(text):
        return json.loads(text)
    load("{")
    """
    code, err, record = run(tmp_path, body)
    assert code == 1
    assert "JSONDecodeError" in err  # the traceback still reaches the log
    assert record is not None
    assert record["cause"] == "exception(JSONDecodeError)"
    assert record["at"] == f"person.py:{line_of(tmp_path, 'return json.loads')}"
    assert (record["rank"], record["world"], record["attempt"]) == (1, 4, 2)
    assert (record["step"], record["phase"], record["stage"], record["batch"]) == (41, "forward", 1, 77)
    assert record["memory"]["resident"] > 0
    assert not record["cascade"]
    assert any("MainThread" in thread["name"] for thread in record["threads"])


def test_the_record_is_written_before_a_finally_can_mislead_the_peers(tmp_path: Path) -> None:
    body = """
    try:
        with recorder.watch():
            raise KeyError("first")
    finally:
        print(json.loads(Path(f"{recorder.stem}.json").read_text())["cause"], flush=True)
        raise RuntimeError("second")
    """
    process = start(tmp_path, body)
    out, _ = process.communicate(timeout=30)
    assert out.strip() == "exception(KeyError)"
    record = read_failure(RunDir(tmp_path).failure_stem(2, 1))
    assert record is not None
    assert record["cause"] == "exception(KeyError)"


def test_leaving_early_by_sys_exit_is_recorded_by_the_watch(tmp_path: Path) -> None:
    code, _, record = run(tmp_path, "with recorder.watch():\n    sys.exit(0)\n")
    assert code == 0
    assert record is not None
    assert record["cause"] == "early_exit(0)"
    assert record["at"].startswith("person.py:")


def test_a_threads_exception_is_kept_but_is_not_the_death(tmp_path: Path) -> None:
    body = """
    def save():
        raise OSError("disk gone")
    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    """
    code, _, record = run(tmp_path, body)
    assert (code, record) == (0, None)
    thread_record = json.loads((tmp_path / "failures/attempt_2/rank_00001.thread.json").read_text())
    assert (thread_record["cause"], thread_record["fatal"]) == ("exception(OSError)", False)


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT"])
def test_a_crash_in_native_code_leaves_the_python_line(tmp_path: Path, name: str) -> None:
    number = signal.Signals[name].value
    body = f"""
    def native():
        getattr(ctypes.CDLL(None), "raise")({number})
    native()
    """
    code, _, record = run(tmp_path, body)
    assert code == -number
    assert record is None
    frame = location_of_dump((tmp_path / "failures/attempt_2/rank_00001.crash.txt").read_text())
    assert frame is not None
    assert frame.function == "native"
    assert frame.path.endswith("person.py")


def test_sigusr1_prints_all_stacks_even_while_the_interpreter_lock_is_held(tmp_path: Path) -> None:
    body = """
    def stuck():
        import re
        print("ready", flush=True)
        re.match(r"(a+)+$", "a" * 40 + "b")
    stuck()
    """
    process = start(tmp_path, body)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGUSR1)
        stacks = tmp_path / "failures/attempt_2/rank_00001.stacks.txt"
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and "stuck" not in stacks.read_text():
            time.sleep(0.05)
        frame = location_of_dump(stacks.read_text())
        assert frame is not None
        assert frame.function == "stuck"
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_a_full_disk_does_not_lose_the_record_because_it_also_lies_next_to_the_black_box(tmp_path: Path) -> None:
    shared = tmp_path / "shm"
    body = """
    import errno, ups.record.failure as failure
    real = failure.write_file_atomically
    def full(path, content):
        if "failures" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content)
    failure.write_file_atomically = full
    raise ValueError("x")
    """
    _, _, record = run(tmp_path, body, UPS_BLACKBOX_DIR=str(shared))
    assert record is None
    record = read_failure(RunDir(tmp_path).failure_stem(2, 1), shared)
    assert record is not None
    assert record["cause"] == "exception(ValueError)"


def test_too_many_open_files_is_recorded_although_the_record_itself_needs_one(tmp_path: Path) -> None:
    body = """
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    kept = []
    while True:
        kept.append(open(os.devnull))
    """
    _, _, record = run(tmp_path, body)
    assert record is not None
    assert record["cause"] == "exception(OSError)"
    assert "Too many open files" in record["message"]
    assert record["at"] == f"person.py:{line_of(tmp_path, 'kept.append')}"


def test_where_only_libraries_are_on_the_stack_the_innermost_is_named() -> None:
    frames = [Frame("/x/site-packages/a.py", 1, "f"), Frame("<frozen importlib>", 2, "g")]
    assert innermost(frames) == frames[1]
    assert innermost([]) is None


def test_memory_is_read_for_other_processes_too() -> None:
    assert memory_of_process(os.getpid())["resident"] > 2**20
    assert memory_of_process(2**30) == {}
