"""One cell: one stack meets one fault, in namespaces of its own. Keeps raw logs; judges nothing.

Started by `python -m benchmarks.stacks run`. The cell runs as the first process of new network, mount and process
namespaces: there is no network but loopback, ports of cells never meet, and whatever a stack leaves is counted here and
ends with the cell. The directory of the run is a tmpfs of 512 MiB, so that a disk can be full.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

START_SECONDS, CELL_SECONDS, AFTER_SECONDS = 900.0, 240.0, 10.0
SCRIPTS = Path(__file__).with_name("scripts")
FREE_BYTES = 4096  # what a full disk has left


class Cell:
    """What happens in a cell, in the order in which it happens."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.folder = Path(request["folder"])
        self.out = self.folder / "out"
        self.data = self.folder / "data.h5"
        self.facts: dict[str, Any] = {**request, "started": time.time(), "load": os.getloadavg()}
        self.codes: dict[int, int] = {}
        self.launchers: list[subprocess.Popen[bytes]] = []  # a Popen that is dropped collects the exit code itself

    def run(self) -> None:
        """Start, wait, count what is left, ask the stack's own report, start again where the rules say so."""
        self.out.mkdir()
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512m", "cell", str(self.out)], check=True)
        for folder in map(Path, self.request["private"]):
            folder.mkdir(exist_ok=True)
            subprocess.run(["mount", "-t", "tmpfs", "cell", str(folder)], check=True)
        shutil.copy(self.request["data"], self.data)
        launcher = self._start("output.log")
        self.facts["exit_code"] = self._wait(launcher)
        self.facts["ended"] = time.time()
        end = time.monotonic() + AFTER_SECONDS
        while (left := descendants(1)) and time.monotonic() < end and self.facts["exit_code"] is not None:
            self._reap()
            time.sleep(0.25)
        self.facts["left_over"] = left if self.facts["exit_code"] is not None else None
        self._end_all()
        if report := self.request["report"]:
            result = subprocess.run(report, env=self._environment(), capture_output=True, text=True, timeout=600)
            (self.folder / "report.log").write_text(result.stdout + result.stderr)
        if self.request["again"]:
            (self.folder / "planted.jsonl").touch()
            again = self._start("again.log")
            self.facts["again_exit_code"] = self._wait(again)
            self._end_all()
        names = sorted(str(path.relative_to(self.out)) for path in self.out.rglob("*") if path.is_file())
        self.facts["files"] = [name for name in names if "ray_tmp" not in name][:200]
        self.facts["load_end"] = os.getloadavg()
        self._keep_text()
        (self.folder / "cell.json").write_text(json.dumps(self.facts, indent=1))

    def _environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.folder),
            "LANG": "C.UTF-8",
            "PATH": f"{self.request['environment']}/bin:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": str(SCRIPTS),
            "PYTHONUNBUFFERED": "1",
            "PYTHONNOUSERSITE": "1",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "STACKS_CELL": str(self.folder),
            "STACKS_FAULT": self.request["fault"],
            **self.request["variables"],
        }

    def _start(self, log: str) -> int:
        process = subprocess.Popen(
            self.request["command"],
            env=self._environment(),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.launchers.append(process)
        threading.Thread(target=self._copy, args=(process, self.folder / log), daemon=True).start()
        return process.pid

    def _copy(self, process: subprocess.Popen[bytes], log: Path) -> None:
        assert process.stdout is not None
        with log.open("w") as file:
            for line in process.stdout:
                file.write(f"{time.time():.3f} {line.decode(errors='replace').rstrip()}\n")
                file.flush()

    def _wait(self, launcher: int) -> int | None:
        """Exit code of the launcher, None after the time of a cell; plants from outside when rank 1 is there."""
        end = time.monotonic() + (CELL_SECONDS if "acted" in self.facts else START_SECONDS)
        seen = time.monotonic()
        while (now := time.monotonic()) < end:
            self.facts["frozen"] = max(self.facts.get("frozen", 0.0), round(now - seen, 1))
            seen = now
            self._reap()
            if launcher in self.codes:
                return self.codes[launcher]
            if "acted" not in self.facts and (planted := read_lines(self.folder / "planted.jsonl")):
                act = getattr(self, f"_act_{self.request['fault']}", None)
                self.facts["acted"], end = time.time(), now + CELL_SECONDS
                if act is not None:
                    self.facts["act"] = act(planted[0]["pid"], launcher)
                (self.folder / "acted").touch()
            time.sleep(0.05)
        return None

    def _reap(self) -> None:
        """Collect every ended child: this is the first process of its namespace."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self.codes[pid] = os.waitstatus_to_exitcode(status)

    def _end_all(self) -> None:
        for _ in range(20):
            for process in descendants(1):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process["pid"], signal.SIGKILL)
            time.sleep(0.1)
            self._reap()

    def _keep_text(self) -> None:
        """Text files that the stack left in the directory of the run, for reading; the scorer does not use them."""
        for path in list(self.out.rglob("*")):
            if path.suffix in (".json", ".log", ".err", ".out", ".txt", ".jsonl") and path.stat().st_size < 200_000:
                target = self.folder / "kept" / path.relative_to(self.out)
                target.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(OSError):
                    shutil.copy(path, target)

    # What is done from outside, when rank 1 stands in the forward pass of step 18.

    def _act_kill(self, rank: int, launcher: int) -> str:
        os.kill(rank, signal.SIGKILL)
        return f"SIGKILL to rank 1 ({rank})"

    def _act_stop(self, rank: int, launcher: int) -> str:
        os.kill(rank, signal.SIGSTOP)
        return f"SIGSTOP to rank 1 ({rank})"

    def _act_worker(self, rank: int, launcher: int) -> str:
        # torch's workers are forks of the rank or of a server that it started; ours run a module called worker.
        helpers = ("resource_tracker", "forkserver", "semaphore_tracker")
        workers = [p for p in descendants(rank) if not any(name in p["command"] for name in helpers)]
        pid = min(process["pid"] for process in workers)
        os.kill(pid, signal.SIGKILL)
        return f"SIGKILL to loader worker {pid} of {workers}"

    def _act_data(self, rank: int, launcher: int) -> str:
        size = self.data.stat().st_size
        with self.data.open("r+b") as file:
            file.seek(size // 20)
            file.write(b"\xff" * (size * 9 // 10))
        return f"90 % of {size} bytes overwritten"

    def _act_full_disk(self, rank: int, launcher: int) -> str:
        free = shutil.disk_usage(self.out).free
        with (self.out / "filler").open("wb") as file:
            file.write(b"\0" * (free - FREE_BYTES))
        return f"{free - FREE_BYTES} bytes written, {shutil.disk_usage(self.out).free} left"

    def _act_truncated(self, rank: int, launcher: int) -> str:
        entries = sorted(self.out.glob(self.request["checkpoints"]), key=lambda path: path.stat().st_mtime)
        files = [
            path for path in ([entries[-1]] if entries[-1].is_file() else entries[-1].rglob("*")) if path.is_file()
        ]
        largest = max(files, key=lambda path: path.stat().st_size)
        size = largest.stat().st_size
        os.truncate(largest, size // 2)
        os.kill(rank, signal.SIGKILL)
        return f"{largest.relative_to(self.out)} cut from {size} bytes to half, SIGKILL to rank 1 ({rank})"

    def _act_launcher(self, rank: int, launcher: int) -> str:
        os.kill(launcher, signal.SIGKILL)
        return f"SIGKILL to the launcher ({launcher})"

    def _act_sigterm(self, rank: int, launcher: int) -> str:
        os.kill(launcher, signal.SIGTERM)
        return f"SIGTERM to the launcher ({launcher})"


def descendants(of: int) -> list[dict[str, Any]]:
    """Living processes below `of`, zombies left out."""
    parents: dict[int, tuple[int, str, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                parents[int(entry.name)] = (int(parent), state, command.strip()[:200])
    below, found = {of}, []
    while new := [pid for pid, (parent, _, _) in parents.items() if parent in below and pid not in below]:
        below |= set(new)
        found += [
            {"pid": pid, "state": parents[pid][1], "command": parents[pid][2]} for pid in new if parents[pid][1] != "Z"
        ]
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of notes; none where there is no file."""
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return []


if __name__ == "__main__":
    Cell(json.loads(Path(sys.argv[1]).read_text())).run()
