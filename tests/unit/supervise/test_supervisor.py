"""The supervisor's own errors and signals: a verdict in any case, and no request that was not made."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from ups.errors import MachineError
from ups.supervise.options import Options
from ups.supervise.supervisor import supervise
from ups.supervise.supervisor_process import listen


def test_an_error_of_the_supervisor_is_written_down_as_the_verdict(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no directory can be made here")
    lines: list[str] = []
    with pytest.raises(MachineError, match="cannot start ranks"):
        supervise(Options(run_dir=tmp_path, ranks=2, command=("true",)), lines.append)
    document = json.loads((tmp_path / "run.json").read_text())
    assert (document["state"], document["cause"], document["exit_code"]) == ("failed", "environment", 5)
    assert lines == [document["verdict"]]
    assert "cannot start ranks" in lines[0]
    assert not list(Path("/dev/shm").glob(f"ups-box-{os.getpid()}-*"))


def test_a_rank_that_cannot_be_started_is_a_fault_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    lines: list[str] = []
    assert supervise(Options(run_dir=tmp_path, ranks=2, command=("true",), max_restarts=0), lines.append) == 6
    document = json.loads((tmp_path / "run.json").read_text())
    (fault,) = document["attempts"][0]["faults"]
    assert (fault["rank"], fault["cause"]) == (0, "launcher_failed")
    assert "rank 0 could not be started" in fault["message"]
    assert [line.split()[0] for line in lines] == ["FAILED", "VERDICT"]


def test_a_hang_up_that_is_ignored_stays_ignored() -> None:
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listen() as stop_request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop_request.number == 0
    finally:
        signal.signal(signal.SIGHUP, earlier)


def test_two_signals_at_once_are_one_request_and_a_later_one_means_now() -> None:
    with listen() as stop_request:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_request.number
        assert not stop_request.urgent
        time.sleep(0.6)
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop_request.urgent
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_request.urgent
