"""`ups doctor` passes a healthy recipe and refuses ten silent bugs, each by the check that is for it, in useful words.

A silent bug is one with which training runs to its end and gives a worse model: no error, no crash.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.faults.doctor_data import write_data, write_recipe
from tests.support.faults.planted import PLANTS, SILENT_BUGS, planted, run_checks, write_assignment
from ups.cli.doctor import show
from ups.config.recipe import resolve
from ups.doctor import examine
from ups.doctor.checks import CHECK_PROGRAMS, names
from ups.doctor.examine import Examination, Processes, Verdict, judge
from ups.record import processes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and recipe."""
    folder = tmp_path_factory.mktemp("doctor")
    write_data(folder)
    write_recipe(folder)
    return folder


@pytest.fixture(scope="module")
def work_dir(prepared: Path) -> Path:
    """The checks up to those that compare many ranks with one, all well so far."""
    folder = prepared / "work"
    folder.mkdir()
    write_assignment(folder, prepared / "recipe.yaml")
    for module in ("data", "model"):
        assert all(v.ok for v in run_checks(module, folder))
    return folder


@pytest.mark.timeout(900)
def test_a_healthy_recipe_passes_every_check(prepared: Path) -> None:
    command = [sys.executable, "-m", "ups.cli.main", "doctor", str(prepared / "recipe.yaml"), "--ranks", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, cwd=prepared)
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [v["rung"] for v in report["rungs"]] == names(recipe=True)
    assert report["ok"]
    assert not (prepared / "run").exists(), "the doctor leaves nothing where the run will live"


@pytest.mark.parametrize("module", ["samples", "wrap", "parity"])
def test_without_a_plant_the_same_checks_are_content(work_dir: Path, module: str) -> None:
    verdicts = run_checks(module, work_dir)
    assert all(v.ok for v in verdicts), verdicts


@pytest.mark.parametrize("plant", SILENT_BUGS)
def test_a_silent_bug_is_refused_by_its_check(work_dir: Path, plant: str) -> None:
    module, check, *words = SILENT_BUGS[plant]
    verdict = run_checks(module, work_dir, plant)[-1]
    assert (verdict.check, verdict.ok) == (check, False), verdict
    for word in words:
        assert word in verdict.says
    assert verdict.means
    assert verdict.advice


def test_the_death_of_a_loader_worker_is_named(work_dir: Path) -> None:
    verdict = run_checks("data", work_dir, "killed_worker")[-1]
    assert not verdict.ok
    assert "loader worker 1" in verdict.says
    assert "SIGKILL" in verdict.says


def test_a_crash_in_native_code_is_named_by_rank_signal_and_line(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # what a failed check printed stays: here
    plant = PLANTS / "segfault_in_wrap.py"
    examination = Examination(
        2,
        prepared / "run",
        resolve(prepared / "recipe.yaml").text,
        environment=planted("segfault_in_wrap"),
        only=("wrap",),
    )
    (verdict,) = examine.examine(examination)
    line = 1 + plant.read_text().splitlines().index("        ctypes.string_at(0)")
    assert (verdict.check, verdict.ok, verdict.rank) == ("wrap", False, 1)
    assert "SIGSEGV" in verdict.says
    assert verdict.at.endswith(f"segfault_in_wrap.py:{line}")
    assert (Path(verdict.log) / "rank_00001.err").read_text(), "what a failed check printed stays"


def test_a_check_that_hangs_ends_at_its_deadline_with_its_stack(tmp_path: Path) -> None:
    plant = tmp_path / "plant.py"
    plant.write_text("import time\n\n\ndef wait_for_ever():\n    time.sleep(10_000)\n\n\nwait_for_ever()\n")
    program = replace(CHECK_PROGRAMS[0], seconds=9.0)
    examination = Examination(1, tmp_path / "run", environment=planted("plant", tmp_path))
    work = tmp_path / "work"
    work.mkdir()
    examine.write_assignment(examination, work)
    started = time.monotonic()
    (verdict,) = examine.run_checks(program, examination, work)
    assert time.monotonic() - started < 30
    assert not verdict.ok
    assert "not done after 9 s" in verdict.says
    assert "plant.py:5" in verdict.says
    assert not [p for p in processes.descendants(os.getpid()) if "ups.doctor.probes" in _command(p.pid)]


def test_too_low_a_limit_on_open_files_is_refused_before_anything_starts(tmp_path: Path) -> None:
    document = {"recipe": "", "run_dir": str(tmp_path), "ranks": 2}
    (tmp_path / "assignment.json").write_text(json.dumps(document))
    done = subprocess.run(
        [sys.executable, "-m", "ups.doctor.probes", "machine", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    )
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1
    assert not verdict["ok"]
    assert "open files, and the limit is 64" in verdict["says"]


def test_a_rank_that_is_killed_from_outside_is_not_taken_for_a_verdict(tmp_path: Path) -> None:
    program = next(program for program in CHECK_PROGRAMS if program.module == "group")
    out = {0: json.dumps({"rung": "group", "ok": True, "says": "", "seconds": 1}) + "\n", 1: ""}
    exits = {1: {"code": -signal.SIGKILL, "time_monotonic_ns": 5}}
    verdicts = list(judge(program, Processes(out, {0: "", 1: ""}, exits, False, tmp_path), 1.0))
    assert [v.ok for v in verdicts] == [True, False]
    assert verdicts[1].check == "collective"
    assert "rank 1" in verdicts[1].says
    assert "SIGKILL" in verdicts[1].says


def test_a_peer_that_lost_its_connection_is_never_blamed_even_if_it_spoke_first(tmp_path: Path) -> None:
    program = next(program for program in CHECK_PROGRAMS if program.module == "samples")
    lost = {
        "rung": "samples",
        "ok": False,
        "rank": 0,
        "time_ns": 5,
        "says": "Connection closed by peer",
        "cascade": True,
    }
    dump = 'Current thread 0x00007f0000000000 (most recent call first):\n  File "/home/me/mine.py", line 7 in crash\n'
    exits = {0: {"code": 1, "time_monotonic_ns": 8}, 1: {"code": -11, "time_monotonic_ns": 9}}
    left = Processes({0: json.dumps(lost), 1: ""}, {0: "", 1: dump}, exits, False, tmp_path)
    (verdict,) = judge(program, left, 1.0)
    assert (verdict.rank, verdict.at) == (1, "/home/me/mine.py:7")


def test_what_is_printed_for_a_failed_check_explains_it(capsys: pytest.CaptureFixture[str]) -> None:
    show(Verdict("parity", False, "it is 2 times", "a wrong denominator", "divide", log="/tmp/log"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAILED  parity      it is 2 times")
    assert [line.split(maxsplit=1) for line in lines[1:]] == [
        ["means", "a wrong denominator"],
        ["try", "divide"],
        ["log", "/tmp/log"],
    ]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
