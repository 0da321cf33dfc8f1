"""One run over several hosts, each a network namespace with its own supervisor: a fault is named with its host."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults import supervised
from tests.support.faults.hosts import (
    HostsResult,
    Network,
    apart,
    network,
    started_hosts,
    why_no_network,
    without_space,
)
from tests.support.faults.small_run import write_recipe
from tests.support.mixture import write_mixture
from ups.record import processes
from ups.record.manifest import read_manifest
from ups.supervise.run_file import head_was_lost, read_run
from ups.supervise.status import rows_of_hosts

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def four_hosts() -> Iterator[Network]:
    problem = why_no_network()
    if problem:
        pytest.skip(problem)
    with network(4) as made:
        yield made


@pytest.fixture
def hosts(four_hosts: Network) -> Iterator[Network]:
    yield four_hosts
    for host in range(four_hosts.count):
        four_hosts.plug(host, True)


def check_ended(result: HostsResult) -> None:
    """No process is left on any host."""
    assert result.orphans == [], result.outputs


def test_a_rank_that_is_killed_on_one_host_restarts_all_and_the_result_is_that_of_one_host(
    tmp_path: Path, hosts: Network
) -> None:
    with started_hosts(tmp_path / "run", hosts, with_torch=True, steps=30, step_seconds=0.1) as started:
        started.wait_for(lambda: started.has_commit(10))
        os.kill(started.rank_pid(1), signal.SIGKILL)
        result = started.finish(250)
    check_ended(result)
    assert result.codes == [0, 0], result.outputs
    (fault,) = result.faults
    assert (fault["rank"], fault["cause"]) == (1, "killed(SIGKILL)")
    assert fault["host"].startswith("1:")
    assert fault["action"] == "restart 1/1"
    assert fault["checkpoint"] >= 10
    assert [consequence["rank"] for consequence in fault["consequences"]] in ([0], [])
    assert "VERDICT state=completed exit=0 attempts=2 faults=1" in result.outputs[0]
    assert "VERDICT state=completed exit=0 attempts=2 faults=1" in result.outputs[1]
    alone = supervised.run(tmp_path / "alone", steps=30)
    assert alone.code == 0, alone.output
    assert result.digests == alone.digests
    assert len(result.digests) == 1


def test_a_host_with_a_clock_of_its_own_is_first_if_it_was_first(tmp_path: Path, hosts: Network) -> None:
    """Its monotonic clock is half a day ahead, it sees no process of the other and has other shared memory."""
    around = apart(1, 12 * 3600)
    with started_hosts(tmp_path / "run", hosts, steps=40, step_seconds=0.1, around=around) as started:
        started.wait_for(lambda: started.has_commit(5))
        os.kill(light_rank_from_outside(started.mark, 1), signal.SIGKILL)
        result = started.finish(200)
    check_ended(result)
    assert result.codes == [0, 0], result.outputs
    (fault,) = result.faults
    assert (fault["rank"], fault["cause"], fault["action"]) == (1, "killed(SIGKILL)", "restart 1/1")
    assert fault["host"].startswith("1:")


def light_rank_from_outside(mark: str, rank: int) -> int:
    """The number of a rank's process here, whatever it is in its own namespace."""
    for process in processes.carriers(supervised.MARK, mark):
        words, said = (
            (Path("/proc") / str(process.pid) / name).read_bytes().split(b"\0") for name in ("cmdline", "environ")
        )
        if words[1:2] and words[1].endswith(b"light_rank.py") and f"RANK={rank}".encode() in said:
            return process.pid
    raise AssertionError(f"rank {rank} does not run")


def test_a_supervisor_that_is_killed_takes_its_ranks_along_and_its_host_is_named(
    tmp_path: Path, hosts: Network
) -> None:
    with started_hosts(tmp_path / "run", hosts, steps=5000, step_seconds=0.1) as started:
        started.wait_for(lambda: started.has_commit(40))
        rank = started.rank_pid(1)
        started.processes[1].kill()
        deadline = time.monotonic() + 20
        while processes.is_alive(rank):
            assert time.monotonic() < deadline, "the rank outlives its supervisor"
            time.sleep(0.1)
        result = started.finish(200)
    check_ended(result)
    assert result.codes == [6, -signal.SIGKILL]
    (fault,) = result.faults
    assert fault["cause"].startswith("host_lost(1:")
    assert (fault["rank"], fault["action"]) == (1, "restart 1/1")
    assert fault["host"].startswith("1:")
    assert fault["step"] >= 1  # what its last ping said, a second or two before
    assert "its supervisor is gone" in fault["message"]
    # It does not come back, and the run does not wait for it forever.
    assert result.document["state"] == "failed"
    assert result.document["cause"].startswith("host_lost(1:")


def test_with_two_ranks_on_each_host_the_right_one_is_named(tmp_path: Path, hosts: Network) -> None:
    with started_hosts(tmp_path / "run", hosts, ranks=4, steps=40, step_seconds=0.1) as started:
        started.wait_for(lambda: started.has_commit(5))
        os.kill(started.rank_pid(3), signal.SIGKILL)
        result = started.finish(200)
    check_ended(result)
    assert result.codes == [0, 0], result.outputs
    (fault,) = result.faults
    assert (fault["rank"], fault["world"], fault["cause"]) == (3, 4, "killed(SIGKILL)")
    assert fault["host"].startswith("1:")
    assert fault["log"] == "logs/attempt_0/rank_00003.err"
    evidence = json.loads((result.run_dir / fault["evidence"]).read_text())
    assert [rank["rank"] for rank in evidence["ranks"]] == [2, 3]
    assert "with ranks 2 to 3 of 4" in result.outputs[1]


def test_a_run_goes_on_when_the_command_of_a_lost_host_is_started_again(tmp_path: Path, hosts: Network) -> None:
    patient = {"host_return_seconds": 60.0}
    with started_hosts(tmp_path / "run", hosts, steps=60, step_seconds=0.1, deadlines=patient) as started:
        started.wait_for(lambda: started.has_commit(5))
        started.processes[1].kill()
        started.start_again(1)
        result = started.finish(200)
    check_ended(result)
    assert result.codes == [0, 0], result.outputs
    (fault,) = result.faults
    assert fault["cause"].startswith("host_lost(1:")
    assert fault["action"] == "restart 1/1"
    assert "VERDICT state=completed exit=0 attempts=2 faults=1" in result.outputs[1]


@pytest.mark.long
def test_a_run_goes_on_when_a_cable_is_back_after_its_host_was_given_up(tmp_path: Path, hosts: Network) -> None:
    patient = {"host_return_seconds": 60.0}
    with started_hosts(tmp_path / "run", hosts, steps=60, step_seconds=0.1, deadlines=patient) as started:
        started.wait_for(lambda: started.has_commit(5))
        hosts.plug(1, False)
        started.wait_for(lambda: "host_lost" in (started.run_dir / "run.json").read_text())
        hosts.plug(1, True)
        result = started.finish(200)
    check_ended(result)
    assert result.codes == [0, 0], result.outputs
    assert [fault["cause"].partition(":")[0] for fault in result.faults] == ["host_lost(1"]


def test_hosts_that_lose_the_head_end_their_ranks_and_say_so(tmp_path: Path, hosts: Network) -> None:
    with started_hosts(tmp_path / "run", hosts, steps=5000, step_seconds=0.1) as started:
        started.wait_for(lambda: started.has_commit(5))
        started.processes[0].kill()
        result = started.finish(200)
    check_ended(result)
    assert result.codes == [-signal.SIGKILL, 6], result.outputs
    assert "ERROR head_lost: host 0 was not heard at 10.203.0.1:29500" in result.outputs[1]
    assert head_was_lost(result.run_dir)  # what readers on other hosts go by
    assert read_run(result.run_dir)["state"] == "died"


@pytest.mark.long
def test_a_cable_that_stays_out_is_a_lost_host(tmp_path: Path, hosts: Network) -> None:
    with started_hosts(tmp_path / "run", hosts, steps=5000, step_seconds=0.1) as started:
        started.wait_for(lambda: started.has_commit(5))
        hosts.plug(1, False)
        result = started.finish(250)
    check_ended(result)
    assert result.codes == [6, 6], result.outputs
    assert result.faults[0]["cause"].startswith("host_lost(1:")
    assert result.faults[0]["host"].startswith("1:")
    assert "nothing was heard from it" in result.faults[0]["message"]
    assert "ERROR head_lost" in result.outputs[1]


@pytest.mark.long
def test_a_cable_that_is_out_for_five_seconds_costs_no_fault(tmp_path: Path, hosts: Network) -> None:
    with started_hosts(tmp_path / "run", hosts, with_torch=True, steps=100, step_seconds=0.1) as started:
        started.wait_for(lambda: started.has_commit(5))
        hosts.plug(1, False)
        time.sleep(5)
        hosts.plug(1, True)
        result = started.finish(250)
    check_ended(result)
    assert result.codes == [0, 0], result.outputs
    assert result.faults == []


@pytest.mark.long
def test_a_host_that_stands_still_as_a_whole_is_lost(tmp_path: Path, hosts: Network) -> None:
    with started_hosts(tmp_path / "run", hosts, steps=5000, step_seconds=0.1, restarts=0) as started:
        started.wait_for(lambda: started.has_commit(5))
        frozen = started.everything_of(1)
        processes.send(frozen, signal.SIGSTOP)
        started.processes[0].wait(200)
        processes.send(frozen, signal.SIGCONT)
        result = started.finish(120)
    check_ended(result)
    assert result.codes[0] == 6, result.outputs
    assert result.faults[0]["cause"].startswith("host_lost(1:")
    # It wakes up in a run that is over.
    assert result.codes[1] == 6, result.outputs


@pytest.mark.long
def test_a_job_that_is_frozen_as_a_whole_accuses_no_host(tmp_path: Path, hosts: Network) -> None:
    with started_hosts(tmp_path / "run", hosts, steps=60, step_seconds=0.1) as started:
        started.wait_for(lambda: started.has_commit(5))
        frozen = [*started.everything_of(0), *started.everything_of(1)]
        processes.send(frozen, signal.SIGSTOP)
        time.sleep(20)  # longer than a host may be silent
        processes.send(reversed(frozen), signal.SIGCONT)
        result = started.finish(120)
    check_ended(result)
    assert result.codes == [0, 0], result.outputs
    assert result.faults == []


@pytest.mark.long
def test_four_hosts_give_the_result_of_one(tmp_path: Path, hosts: Network) -> None:
    with started_hosts(tmp_path / "run", hosts, hosts=4, ranks=4, with_torch=True, steps=15) as started:
        result = started.finish(300)
    check_ended(result)
    assert result.codes == [0, 0, 0, 0], result.outputs
    alone = supervised.run(tmp_path / "alone", ranks=4, steps=15)
    assert result.digests == alone.digests


def test_a_host_that_is_asked_to_leave_takes_the_others_along(tmp_path: Path, hosts: Network) -> None:
    with started_hosts(tmp_path / "run", hosts, steps=5000, step_seconds=0.1) as started:
        started.wait_for(lambda: started.has_commit(5))
        started.wait_for(lambda: [row.rank for row in rows_of_hosts(started.run_dir)] == [0, 1])
        shown = [(row.host.partition(":")[0], row.state) for row in rows_of_hosts(started.run_dir)]
        assert shown == [("0", "alive"), ("1", "alive")]
        started.processes[1].send_signal(signal.SIGTERM)
        result = started.finish(200)
    check_ended(result)
    assert result.codes == [143, 143], result.outputs
    assert result.document["state"] == "preempted"
    assert result.faults == []


@pytest.mark.long
def test_a_rank_that_stands_still_is_named_and_not_the_one_that_waits_for_it(tmp_path: Path, hosts: Network) -> None:
    quick = {"name_floor_seconds": 4.0, "kill_floor_seconds": 10.0}
    with started_hosts(tmp_path / "run", hosts, steps=5000, step_seconds=0.1, restarts=0, deadlines=quick) as started:
        started.wait_for(lambda: started.has_commit(5))
        os.kill(started.rank_pid(1), signal.SIGSTOP)
        result = started.finish(200)
    check_ended(result)
    assert result.codes == [6, 6], result.outputs
    (fault,) = result.faults
    assert (fault["rank"], fault["cause"]) == (1, "stopped(SIGSTOP)")
    assert fault["host"].startswith("1:")


@pytest.mark.long
def test_a_rank_that_computes_forever_is_named_although_another_host_waits_for_it(
    tmp_path: Path, hosts: Network
) -> None:
    quick = {"name_floor_seconds": 8.0, "kill_floor_seconds": 20.0}
    planted = {"kind": "hold_the_lock", "rank": 1, "step": 12, "phase": "forward"}
    with started_hosts(
        tmp_path / "run", hosts, planted, with_torch=True, restarts=0, deadlines=quick, steps=5000, step_seconds=0.1
    ) as started:
        result = started.finish(300)
    check_ended(result)
    assert result.codes == [6, 6], result.outputs
    (fault,) = result.faults
    assert (fault["rank"], fault["cause"], fault["step"], fault["phase"]) == (1, "stalled", 12, "forward")
    assert fault["host"].startswith("1:")


def test_a_host_without_space_is_named_with_its_reason(tmp_path: Path, hosts: Network) -> None:
    full = without_space(tmp_path / "run", 1)
    with started_hosts(tmp_path / "run", hosts, restarts=0, around=full) as started:
        result = started.finish(200)
    check_ended(result)
    assert result.codes == [6, 5], result.outputs
    (fault,) = result.faults
    assert fault["cause"].startswith("host_lost(1:")
    assert (fault["rank"], fault["phase"]) == (1, "init")
    assert "its supervisor left: environment: cannot start ranks: [Errno 28] No space left" in fault["message"]


@pytest.mark.long
def test_the_command_trains_the_same_bytes_on_two_hosts_as_on_one(tmp_path: Path, hosts: Network) -> None:
    recipe = write_recipe(tmp_path, write_mixture(tmp_path), steps=6)
    ups = [sys.executable, "-m", "ups", "train", str(recipe), "--ranks", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def begin(command: list[str]) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment)

    spread = [*ups, "--set", f"run.dir={tmp_path}/two", "--hosts", "2", "--address", hosts.address]
    two = [begin(hosts.inside(host, [*spread, "--host", str(host)])) for host in (1, 0)]
    said = [process.communicate(timeout=300)[0] for process in two]
    assert [process.returncode for process in two] == [0, 0], said
    one = begin([*ups, "--set", f"run.dir={tmp_path}/one"])
    output = one.communicate(timeout=300)[0]
    assert one.returncode == 0, output
    files = [
        {name: file.sha256 for name, file in read_manifest(path).files.items() if name.endswith(".distcp")}
        for path in (tmp_path / "one/checkpoints/step_00000006", tmp_path / "two/checkpoints/step_00000006")
    ]
    assert files[0] == files[1] != {}
    assert "JOINED 10.203.0.1:29500 as host 1:" in said[0]
    assert "VERDICT state=completed exit=0" in said[0]
    assert not (tmp_path / "two/.link-secret").exists()


def test_a_run_that_cannot_start_sends_the_other_hosts_home_with_the_reason(tmp_path: Path) -> None:
    """On the loopback: what is missed is found before there is anything to spread."""
    tasks = write_mixture(tmp_path)
    recipe = write_recipe(tmp_path, tasks, steps=6)
    shutil.move(tasks[0]["path"], tmp_path / "elsewhere")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ups = [sys.executable, "-m", "ups", "train", str(recipe), "--ranks", "2", "--hosts", "2", "--address", address]
    ups += ["--set", f"run.dir={tmp_path}/run"]
    pipe = subprocess.PIPE
    both = [
        subprocess.Popen([*ups, "--host", str(host)], stdout=pipe, stderr=subprocess.STDOUT, text=True)
        for host in (0, 1)
    ]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [4, 4], said
    assert "host 0 cannot start the run: " in said[1]
    assert Path(tasks[0]["path"]).name in said[1]
    assert not (tmp_path / "run").exists()
