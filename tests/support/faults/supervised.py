"""Runs rank programs under the real supervisor, in a process of its own, and gives back everything it left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.checkout import path_with
from ups.record import processes
from ups.supervise.run_file import read_run
from ups.supervise.why import faults_as_json

PROGRAMS = Path(__file__).with_name("programs")
TOY = PROGRAMS / "toy_rank.py"
REAL = PROGRAMS / "real_rank.py"
RUNNER = PROGRAMS / "run_supervisor.py"
# Multiplies every bar on time, for machines that are shared.
PATIENCE = float(os.environ.get("UPS_TEST_PATIENCE", "1"))
# Far below the floors of real runs, so that a cell does not take a minute. The deadline of teardown is that of real
# runs: a rank that ends on a machine without free cores takes long, and only the tests of that deadline wait for it.
DEADLINES = {
    "name_floor_seconds": 3.0 * PATIENCE,
    "kill_floor_seconds": 6.0 * PATIENCE,
    "unseen_seconds": 60.0,
}
MARK = "TOY_MARK"


@contextlib.contextmanager
def usual_port_taken() -> Iterator[None]:
    """The usual port of launchers belongs to another process."""
    with socket.socket() as listener:
        with contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", 29500))
            listener.listen()
        yield


@dataclass(frozen=True)
class Result:
    """What a supervised run left behind. `orphans` are processes that outlived it by more than a moment."""

    run_dir: Path
    code: int
    output: str
    seconds: float
    orphans: list[int]

    @property
    def document(self) -> dict[str, Any]:
        """run.json."""
        document: dict[str, Any] = json.loads((self.run_dir / "run.json").read_text())
        return document

    @property
    def faults(self) -> list[dict[str, Any]]:
        """As `ups why --json` gives them."""
        return faults_as_json(read_run(self.run_dir))

    @property
    def failed_lines(self) -> list[str]:
        """The printed lines of faults."""
        return [line for line in self.output.splitlines() if line.startswith("FAILED ")]

    @property
    def verdict(self) -> str:
        """The one line at the end."""
        lines = [line for line in self.output.splitlines() if line.startswith("VERDICT ")]
        assert len(lines) == 1, self.output
        return lines[0]

    @property
    def digests(self) -> set[str]:
        """Hash of the final state of each rank of the last attempt."""
        last = sorted(self.run_dir.glob("logs/attempt_*"), key=lambda path: int(path.name.split("_")[1]))[-1]
        return {d for path in last.glob("*.out") for d in re.findall(r"done ([0-9a-f]{64})", path.read_text())}


@dataclass(frozen=True)
class Started:
    """A run in progress."""

    run_dir: Path
    process: subprocess.Popen[str]
    mark: str
    began: float

    def finish(self, timeout_seconds: float = 900.0) -> Result:
        """Wait for the supervisor, then look for what it left running."""
        try:
            output, _ = self.process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            output, _ = self.process.communicate()
            raise AssertionError(f"the supervisor did not end in {timeout_seconds} s:\n{output}") from None
        finally:
            orphans = self.leftovers()
        return Result(self.run_dir, self.process.returncode, output, time.monotonic() - self.began, orphans)

    def leftovers(self, within_seconds: float = 0.0) -> list[int]:
        """Processes of this run that still live; ended here, so that one bad test does not disturb the next."""
        deadline = time.monotonic() + within_seconds
        while (left := processes.carriers(MARK, self.mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        processes.send((process.pid for process in left), signal.SIGKILL)
        return [process.pid for process in left]

    def wait_for(self, what: Callable[[], bool], timeout_seconds: float = 300.0) -> None:
        """Wait until `what` is true; fails when the supervisor ends before."""
        deadline = time.monotonic() + timeout_seconds
        while not what():
            assert self.process.poll() is None, "the supervisor ended too early"
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.02)

    def rank_pid(self, rank: int, of: str = "rank") -> int:
        """Process number of a rank of the current attempt or of its `wrapper`, 0 if it has not started."""
        with contextlib.suppress(OSError, ValueError):
            document = json.loads((self.run_dir / "run.json").read_text())
            record = json.loads((Path(document["blackbox_dir"]) / f"rank_{rank:05d}.pid").read_text())
            return int(record[f"{of}_pid"])
        return 0


def start(
    run_dir: Path,
    *faults: dict[str, Any],
    ranks: int = 2,
    restarts: int = 0,
    deadlines: dict[str, float] | None = None,
    micro_batch_size: int = 0,
    recipe: Path | None = None,
    open_files: tuple[int, int] | None = None,
    rendezvous: dict[str, Any] | None = None,
    **variables: object,
) -> Started:
    """Start a supervisor over toy ranks, with `recipe` over real ones.

    `faults` are those of attempts 0, 1, ...; `variables` become TOY_*; `open_files` are the limits, soft and hard.
    """
    settings = {
        "run_dir": str(run_dir),
        "ranks": ranks,
        "max_restarts": restarts,
        "micro_batch_size": micro_batch_size,
        "recipe": str(recipe or ""),
        "deadlines": {**DEADLINES, **(deadlines or {})},
        "rendezvous": rendezvous or {},
    }
    mark = f"{os.getpid()}-{run_dir}"
    environment = {
        **os.environ,
        **path_with(),
        "OMP_NUM_THREADS": "1",
        "TOY_FAULTS": json.dumps(faults),
        **{f"TOY_{name.upper()}": str(value) for name, value in variables.items()},
    }
    process = subprocess.Popen(
        [sys.executable, str(RUNNER), json.dumps(settings), str(REAL if recipe else TOY), mark],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        preexec_fn=(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, open_files)) if open_files else None,
    )
    return Started(run_dir, process, mark, time.monotonic())


def run(run_dir: Path, *faults: dict[str, Any], timeout_seconds: float = 900.0, **options: Any) -> Result:
    """Start and wait."""
    return start(run_dir, *faults, **options).finish(timeout_seconds)
