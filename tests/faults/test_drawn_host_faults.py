"""Sixteen faults in a run over two hosts, drawn: what, on which host, when. Each is named, ends, and costs no bytes.

Where a run cannot go on, its commands are started again: then it must, to the same end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.faults.hosts import (
    HostsResult,
    Network,
    StartedHosts,
    network,
    started_hosts,
    why_no_network,
    without_space,
)
from ups.record import processes

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(400)]

STEPS, STEP_SECONDS = 60, 0.1
# Both are alive as a rule when the fault comes, and none has finished.
FIRST, LAST = 5, 40
RESTART_SECONDS = 20.0
KINDS = (
    "kill a rank",
    "kill a supervisor",
    "kill a host",
    "cut for 5 s",
    "cut",
    "delay by 200 ms",
    "full disk",
    "stop a host",
)


@dataclass(frozen=True)
class Fault:
    """What happens to a host when so many steps are saved."""

    number: int
    kind: str
    host: int
    step: int
    signal: signal.Signals

    def __str__(self) -> str:
        return f"{self.number}: {self.kind}, host {self.host}, step {self.step}"


def drawn() -> list[Fault]:
    draw = random.Random("faults over two hosts")
    kinds = [*KINDS, *KINDS]
    draw.shuffle(kinds)
    signals = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
    return [
        Fault(number, kind, draw.randrange(2), draw.randrange(FIRST, LAST, 5), draw.choice(signals))
        for number, kind in enumerate(kinds)
    ]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    problem = why_no_network()
    if problem:
        pytest.skip(problem)
    with network(2) as made:
        yield made


@pytest.mark.parametrize("fault", drawn(), ids=str)
def test_a_drawn_fault_is_named_and_the_run_ends_in_the_same_bytes(
    tmp_path: Path, hosts: Network, fault: Fault
) -> None:
    run_dir = tmp_path / "run"
    around = without_space(run_dir, fault.host) if fault.kind == "full disk" else {}
    with started_hosts(run_dir, hosts, steps=STEPS, step_seconds=STEP_SECONDS, around=around) as started:
        if not around:
            started.wait_for(lambda: started.has_commit(fault.step))
        result = _strike(started, hosts, fault)
    hosts.plug(fault.host, True)
    assert result.orphans == [], result.outputs
    _check_named(result, fault)
    if result.codes != [0, 0]:
        with started_hosts(run_dir, hosts, steps=STEPS, step_seconds=STEP_SECONDS) as started:
            result = started.finish(200)
        assert result.orphans == []
    assert result.codes == [0, 0], result.outputs
    # The sum over ranks and steps, by the rule that every rank follows.
    last = sorted((run_dir / "checkpoints").glob("step_*"))[-1]
    assert json.loads((last / "state.json").read_text()) == [STEPS, 3 * sum(range(STEPS))]


def _strike(started: StartedHosts, hosts: Network, fault: Fault) -> HostsResult:
    host, supervisor = fault.host, started.processes[fault.host]
    match fault.kind:
        case "kill a rank":
            os.kill(started.rank_pid(host), fault.signal)
        case "kill a supervisor":
            supervisor.kill()
        case "kill a host":
            processes.send(started.everything_of(host), signal.SIGKILL)
        case "cut":
            hosts.plug(host, False)
        case "cut for 5 s":
            hosts.plug(host, False)
            time.sleep(5)
            hosts.plug(host, True)
        case "delay by 200 ms":
            with hosts.slow(host, 0.2):
                return started.finish(250)
        case "stop a host":
            frozen = started.everything_of(host)
            processes.send(frozen, signal.SIGSTOP)
            started.processes[1 - host].wait(200)
            processes.send(frozen, signal.SIGCONT)
    return started.finish(250)


def _check_named(result: HostsResult, fault: Fault) -> None:
    """Host, rank, phase and cause, where a host is left to report them."""
    said = "\n---\n".join(result.outputs)
    match fault.kind:
        case "cut for 5 s" | "delay by 200 ms":
            assert result.codes == [0, 0], said
            assert result.faults == []
        case "kill a rank":
            assert result.codes == [0, 0], said
            (record,) = result.faults
            assert (record["rank"], record["cause"]) == (fault.host, _cause(fault.signal))
            assert record["host"].startswith(f"{fault.host}:")
            assert record["phase"] in ("forward", "sync", "save")
            before, after = result.document["attempts"]
            assert after["training"] - before["ended"] < RESTART_SECONDS
        case "full disk":
            assert "No space left" in said
            assert 5 in result.codes, said
        case _ if fault.host == 0 and fault.kind != "cut":
            # The head is gone, and with it the verdict: the host that is left says so and ends.
            assert result.codes[1] == 6, said
            assert "ERROR head_lost: host 0 was not heard" in result.outputs[1]
        case _:
            # Whichever cable is out, the head has lost host 1, and host 1 the head.
            record = result.faults[0]
            assert record["cause"].startswith("host_lost(1:"), said
            assert (record["rank"], record["host"][:2]) == (1, "1:")
            assert record["phase"] in ("forward", "sync", "save")
            assert result.codes[0] == 6, said


def _cause(number: signal.Signals) -> str:
    return f"killed({number.name})" if number == signal.SIGKILL else f"signal({number.name})"
