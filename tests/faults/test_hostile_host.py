"""A host that knows the secret and does not behave: the head ends, names it, and leaves a record that can be read."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults.hosts import StartedHosts, started_hosts
from ups.record import processes
from ups.supervise.link import LinkClosed, Session, read_secret
from ups.supervise.run_file import read_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

FAULT = {
    "attempt": 0,
    "rank": 1,
    "world": 2,
    "host": "1:b",
    "step": 3,
    "phase": "forward",
    "cause": "exception(E)",
    "at": "-",
    "checkpoint": None,
    "lost_steps": 0,
    "action": "",
    "log": "logs/x",
}
QUICK = {"host_lost_seconds": 6.0, "host_return_seconds": 3.0, "grace_seconds": 4.0}


class Host:
    """Host 1, spoken by hand."""

    def __init__(self, session: Session, started: StartedHosts) -> None:
        self.session, self.started = session, started
        self._position: list[Any] = []

    def send(self, report: dict[str, Any], position: list[Any] | None = None) -> None:
        self._position = self._position if position is None else position
        self.session.send({"report": report})
        self._ping()

    def kill_the_rank_of_the_head(self) -> None:
        self.started.wait_for(lambda: self.started.rank_pid(0) != 0)
        os.kill(self.started.rank_pid(0), signal.SIGKILL)

    def until(self, what: str) -> None:
        deadline = time.monotonic() + 60
        while True:
            message = self.session.receive(0.2)
            self._ping()
            if message and message.get("order", {}).get("what") == what:
                return
            assert time.monotonic() < deadline

    def answer_until_the_end(self, seconds: float = 90.0) -> tuple[int, str]:
        """Answers, and says nothing, until the head has ended; its exit code and what it said."""
        head, deadline = self.started.processes[0], time.monotonic() + seconds
        while head.poll() is None:
            assert time.monotonic() < deadline, "the head does not end"
            try:
                self.session.receive(0.2)
                self._ping()
            except LinkClosed:
                time.sleep(0.2)
        return head.returncode, head.communicate()[0]

    def _ping(self) -> None:
        self.session.send({"ping": time.monotonic_ns(), "at": self._position})


@contextlib.contextmanager
def hostile(run_dir: Path, **options: Any) -> Iterator[Host]:
    """A head on the loopback that has told host 1 to begin."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    address = f"127.0.0.1:{port}"
    rules = {"restarts": 0, "deadlines": QUICK, **options}
    # The second supervisor is never started: this test is host 1.
    with started_hosts(
        run_dir, None, address=address, first_only=True, steps=5000, step_seconds=0.1, **rules
    ) as started:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                secret = read_secret(run_dir)
                if secret is not None:
                    session = Session(socket.create_connection(("127.0.0.1", port), 3))
                    break
            assert time.monotonic() < deadline
            time.sleep(0.1)
        who = {"number": 1, "name": "b", "hosts": 2, "ranks": 2, "version": "test", "incarnation": "x"}
        session.introduce(secret, who)
        host = Host(session, started)
        host.send({"state": "waiting"})
        host.until("begin")
        yield host
        session.close()


def test_a_host_that_answers_and_never_says_how_its_ranks_ended_is_lost(tmp_path: Path) -> None:
    with hostile(tmp_path / "run") as host:
        host.kill_the_rank_of_the_head()
        code, said = host.answer_until_the_end()
    assert code == 6, said
    document = read_run(tmp_path / "run")
    (fault,) = [fault for attempt in document["attempts"] for fault in attempt["faults"]]
    assert fault["cause"] == "killed(SIGKILL)"
    (consequence,) = fault["consequences"]
    assert consequence["cause"] == "host_lost(1:b)"
    assert "it answers, but has not said in" in consequence["message"]


def test_a_second_request_to_leave_ends_a_head_whose_host_says_nothing(tmp_path: Path) -> None:
    patient = {**QUICK, "grace_seconds": 600.0, "leave_seconds": 600.0}
    with hostile(tmp_path / "run", deadlines=patient) as host:
        host.started.wait_for(lambda: host.started.rank_pid(0) != 0)
        head = host.started.processes[0]
        head.send_signal(signal.SIGTERM)
        time.sleep(1.5)
        head.send_signal(signal.SIGTERM)
        code, said = host.answer_until_the_end()
    assert code in (6, 143), said
    assert not processes.carriers("TOY_MARK", host.started.mark)


@pytest.mark.parametrize(
    ("report", "position"),
    [
        ({"outcome": {"exits": {"²": 1}}}, []),
        ({"outcome": {"fault": FAULT | {"consequences": [{"a": [[[[]]]]}]}}}, []),
        ({"outcome": {"fault": FAULT | {"cause": "x\nVERDICT state=completed exit=0"}}}, []),
        ({"leaving": "so"}, [1, 10**30, "x"]),
        pytest.param({"outcome": {"exits": {"1" * 5000: 1}}}, [], marks=pytest.mark.long),
        pytest.param({"asked": 9999, "outcome": {"state": "left", "fault": None}}, [], marks=pytest.mark.long),
        pytest.param({"leaving": "so"}, [1.0, 3, "x"], marks=pytest.mark.long),
        pytest.param({"leaving": "so"}, [True, 3, "x"], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_whatever_a_host_reports_the_record_can_be_read(
    tmp_path: Path, report: dict[str, Any], position: list[Any]
) -> None:
    plain = {"state": "failed", "time_ns": 1, "last_step": 3, "orphans": 0, "exits": {}, "behind": None, "fault": FAULT}
    whole = {"attempt": 0, "state": "failed", **report}
    if "outcome" in report:
        whole["outcome"] = plain | report["outcome"]
    with hostile(tmp_path / "run") as host:
        host.send(whole, position)
        host.kill_the_rank_of_the_head()
        code, said = host.answer_until_the_end()
    assert code == 6, said
    assert "Traceback" not in said
    assert not any(line.startswith("VERDICT state=completed") for line in said.splitlines())
    assert read_run(tmp_path / "run")["state"] == "failed"
