"""Several hosts on one machine: a network namespace for each, cables to a switch, and a supervisor in each of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.checkout import path_with
from tests.support.faults.supervised import MARK, PROGRAMS, TOY
from ups.record import processes

HOST_RUNNER = PROGRAMS / "run_host.py"
SLOW_CABLE = PROGRAMS / "slow_cable.py"
LIGHT = PROGRAMS / "light_rank.py"
PORT = 29500
# Hosts are judged sooner than in real runs, ranks are not: all of them share the cores of one machine.
HOST_DEADLINES = {"host_lost_seconds": 12.0, "host_return_seconds": 10.0, "host_join_seconds": 120.0}


def why_no_network() -> str:
    """Why namespaces with cables between them cannot be made here; '' if they can."""
    try:
        with network(1):
            return ""
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None)
        return f"network namespaces cannot be made here: {(said or str(error)).strip()[:200]}"


@dataclass(frozen=True)
class Network:
    """`count` hosts at 10.203.0.1, .2, ... on one switch."""

    name: str
    count: int

    def inside(self, host: int, command: list[str]) -> list[str]:
        """The command that runs `command` on a host."""
        return ["ip", "netns", "exec", f"{self.name}-{host}", *command]

    def plug(self, host: int, plugged: bool) -> None:
        """Pull the cable of a host out of the switch, or put it back."""
        _ip("-n", f"{self.name}-switch", "link", "set", f"port{host}", "up" if plugged else "down")

    @contextlib.contextmanager
    def slow(self, host: int, seconds: float) -> Iterator[None]:
        """Delay every frame to and from a host by so much."""
        switch, port = f"{self.name}-switch", f"port{host}"
        for number in range(self.count):  # an answer is as plain as its question
            _plain(f"{self.name}-{number}", "cable")
        _ip("-n", switch, "link", "add", "slow-a", "type", "veth", "peer", "name", "slow-b")
        try:
            _ip("-n", switch, "link", "set", "slow-b", "master", "bridge", "up")
            _ip("-n", switch, "link", "set", "slow-a", "up")
            _ip("-n", switch, "link", "set", port, "nomaster")
            command = ["ip", "netns", "exec", switch, sys.executable, str(SLOW_CABLE), port, "slow-a", str(seconds)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as carrier:
                try:
                    assert carrier.stdout is not None
                    assert carrier.stdout.readline() == "ready\n"
                    yield
                finally:
                    carrier.kill()
        finally:
            _ip("-n", switch, "link", "delete", "slow-a")
            _ip("-n", switch, "link", "set", port, "master", "bridge")

    @property
    def address(self) -> str:
        """Where host 0 listens."""
        return f"10.203.0.1:{PORT}"


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    """Make the hosts, and remove them whatever happens."""
    made = Network(f"ups{os.getpid()}", count)
    spaces = [f"{made.name}-switch", *(f"{made.name}-{host}" for host in range(count))]
    try:
        for space in spaces:
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", spaces[0], "link", "add", "bridge", "type", "bridge")
        _ip("-n", spaces[0], "link", "set", "bridge", "up")
        for host in range(count):
            space, port = f"{made.name}-{host}", f"port{host}"
            _ip("-n", spaces[0], "link", "add", port, "type", "veth", "peer", "name", "cable", "netns", space)
            _ip("-n", spaces[0], "link", "set", port, "master", "bridge", "up")
            _ip("-n", space, "address", "add", f"10.203.0.{host + 1}/24", "dev", "cable")
            _ip("-n", space, "link", "set", "cable", "up")
        yield made
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, timeout=20)


def _plain(space: str, interface: str) -> None:
    command = ["ip", "netns", "exec", space, sys.executable, str(SLOW_CABLE), "--plain", interface]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


@dataclass(frozen=True)
class HostsResult:
    """What is left of a run over several hosts: codes and output by host, and processes that should be gone."""

    run_dir: Path
    codes: list[int]
    outputs: list[str]
    orphans: list[int]

    @property
    def document(self) -> dict[str, Any]:
        """run.json, as the head wrote it."""
        return dict(json.loads((self.run_dir / "run.json").read_text()))

    @property
    def faults(self) -> list[dict[str, Any]]:
        return [fault for attempt in self.document["attempts"] for fault in attempt["faults"]]

    @property
    def digests(self) -> set[str]:
        """Hash of the final state of each rank of the last attempt."""
        last = max((self.run_dir / "logs").iterdir(), key=lambda path: int(path.name.split("_")[1]))
        return {d for path in last.glob("*.out") for d in re.findall(r"done ([0-9a-f]{64})", path.read_text())}


class StartedHosts:
    """Supervisors in progress, one for each host."""

    def __init__(
        self,
        run_dir: Path,
        mark: str,
        processes: list[subprocess.Popen[str]],
        begin: Callable[[int], subprocess.Popen[str]],
    ) -> None:
        self.run_dir, self.mark, self.processes, self._begin = run_dir, mark, processes, begin

    def start_again(self, host: int) -> None:
        """Start the command of a host whose supervisor is gone again."""
        self.processes[host].communicate(timeout=30)
        self.processes[host] = self._begin(host)

    def wait_for(self, what: Callable[[], bool], timeout_seconds: float = 300.0) -> None:
        """Wait until `what` is true."""
        deadline = time.monotonic() + timeout_seconds
        while not what():
            ended = [process.poll() for process in self.processes]
            assert ended == [None] * len(ended), (ended, [p.communicate()[0] for p in self.processes if p.poll()])
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.05)

    def has_commit(self, step: int) -> bool:
        """Whether the checkpoint of `step` is committed."""
        return any(self.run_dir.glob(f"checkpoints/step_*{step:05d}/COMMITTED"))

    def rank_pid(self, rank: int) -> int:
        """Process number of a rank, found by what it carries."""
        for process in processes.carriers(MARK, self.mark):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
                environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in environment and b"ups.record.rank_wrapper" not in words:
                    return process.pid
        return 0

    def everything_of(self, host: int) -> list[int]:
        """The supervisor of a host, its ranks and their wrappers."""
        own = processes.descendants(self.processes[host].pid)
        return [self.processes[host].pid, *(process.pid for process in own)]

    def finish(self, timeout_seconds: float = 150.0) -> HostsResult:
        """Wait for all supervisors, then look for what they left running."""
        deadline = time.monotonic() + timeout_seconds
        outputs, late = [], []
        for host, process in enumerate(self.processes):
            try:
                outputs.append(process.communicate(timeout=max(0.1, deadline - time.monotonic()))[0])
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGCONT)
                process.kill()
                late.append(host)
                outputs.append(process.communicate()[0])
        left = processes.carriers(MARK, self.mark)
        processes.send((process.pid for process in left), signal.SIGKILL)
        assert late == [], f"hosts {late} did not end in {timeout_seconds} s:\n" + "\n---\n".join(outputs)
        codes = [process.returncode for process in self.processes]
        return HostsResult(self.run_dir, codes, outputs, [process.pid for process in left])


def apart(host: int, ahead_seconds: int) -> dict[int, list[str]]:
    """`around` of a host with processes, a name, shared memory and a clock of its own, which began earlier."""
    spaces = ["--fork", "--kill-child", "--pid", "--mount-proc", "--mount", "--uts", "--time"]
    clock = ["--monotonic", str(ahead_seconds), "--boottime", str(ahead_seconds)]
    begin = 'mount -t tmpfs none /dev/shm && hostname far && exec "$@"'
    return {host: ["unshare", *spaces, *clock, "sh", "-c", begin, "sh"]}


def without_space(run_dir: Path, host: int) -> dict[int, list[str]]:
    """`around` of a host that alone has a file system for its logs on which not even a directory can be made."""
    (run_dir / "logs").mkdir(parents=True)
    mount = f"mount -t tmpfs -o nr_inodes=1 none '{run_dir}/logs' && exec \"$@\""
    return {host: ["unshare", "-m", "sh", "-c", mount, "sh"]}


@contextlib.contextmanager
def started_hosts(
    run_dir: Path,
    made: Network | None,
    *faults: dict[str, Any],
    hosts: int = 2,
    ranks: int = 2,
    restarts: int = 1,
    deadlines: dict[str, float] | None = None,
    address: str = "",
    around: dict[int, list[str]] | None = None,
    with_torch: bool = False,
    first_only: bool = False,
    **variables: object,
) -> Iterator[StartedHosts]:
    """Start a supervisor on each host, over ranks without torch or over toy ranks `with_torch`.

    Without a network all are on the loopback, at `address`.
    around: host -> a command that gets the command of its supervisor as further arguments. first_only: the other
    hosts are the caller's.
    """
    mark = f"{os.getpid()}-{run_dir}"
    environment = {
        **os.environ,
        **path_with(),
        "OMP_NUM_THREADS": "1",
        "TOY_FAULTS": json.dumps(faults),
        **{f"TOY_{name.upper()}": str(value) for name, value in variables.items()},
    }
    program = TOY if with_torch else LIGHT

    def begin(host: int) -> subprocess.Popen[str]:
        settings = {
            "run_dir": str(run_dir),
            "ranks": ranks,
            "hosts": hosts,
            "host": host,
            "address": address or (made.address if made else ""),
            "max_restarts": restarts,
            "deadlines": {**HOST_DEADLINES, **(deadlines or {})},
        }
        outer = (around or {}).get(host, [])
        command = [*outer, sys.executable, str(HOST_RUNNER), json.dumps(settings), str(program), mark]
        return subprocess.Popen(
            command if made is None else made.inside(host, command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )

    supervisors = [begin(host) for host in range(1 if first_only else hosts)]
    try:
        yield StartedHosts(run_dir, mark, supervisors, begin)
    finally:
        for process in supervisors:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.kill()
        left = processes.carriers(MARK, mark)
        processes.send((process.pid for process in left), signal.SIGKILL)
