"""Starts the ranks of one attempt under torchrun, and ends them: all of them, provably.

torchrun gives rendezvous and environment; it never restarts (`--max-restarts=0`). Between it and each rank stands a
wrapper (`ups.record.rank_wrapper`) that writes down the moment of death.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ups.errors import MachineError
from ups.record import process_tree
from ups.supervise.options import Options

# Carried by every process of the run: what it finds after the end is an orphan.
TOKEN_VARIABLE = "UPS_SUPERVISOR_TOKEN"  # noqa: S105 - a mark, not a secret
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a private directory with a random name is made inside
_PREFIX = "ups-box"
_BOX_BYTES = 2**20  # a ring, what a rank says when it fails, and some room
FLIGHT_PREFIX = "nccl_trace_rank_"


class Launcher:
    """One attempt's processes."""

    def __init__(self, options: Options, attempt: int, box_dir: Path, overrides: Mapping[str, int]) -> None:
        self.token = secrets.token_hex(16)
        self._log = options.run_dir / "logs" / f"attempt_{attempt}" / "torchrun.log"
        environment = {
            **os.environ,
            # torchrun's restarts and a second run on the host would otherwise meet a stale store.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            **options.environment,
            "UPS_ATTEMPT": str(attempt),
            "UPS_BLACKBOX_DIR": str(box_dir),
            "UPS_OVERRIDES": json.dumps(dict(overrides)),
            TOKEN_VARIABLE: self.token,
            **_flight_recorder(options.run_dir, attempt),
        }
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                self.process = subprocess.Popen(
                    [*_torchrun(options.ranks), str(options.run_dir), *options.rank_command()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    # Its own session: Ctrl-C at the terminal is the supervisor's to pass on, once.
                    start_new_session=True,
                    preexec_fn=process_tree.bound_to(os.getpid()),
                )
        except OSError as error:
            raise MachineError(
                f"cannot start torchrun: {error}", hint="check room on the disk and the limit on processes"
            ) from error

    @property
    def log_tail(self) -> str:
        """The end of what torchrun itself said."""
        try:
            return self._log.read_bytes()[-8192:].decode(errors="replace")
        except OSError:
            return ""

    def ended(self) -> bool:
        """Whether torchrun has left."""
        return self.process.poll() is not None

    def members(self) -> list[process_tree.Process]:
        """Every living process of this attempt, in the family tree or out of it."""
        found = {p.pid: p for p in process_tree.descendants(self.process.pid)}
        found |= {p.pid: p for p in process_tree.carriers(TOKEN_VARIABLE, self.token)}
        found.pop(os.getpid(), None)
        return list(found.values())

    def end(self, timeout_seconds: float = 10.0) -> list[process_tree.Process]:
        """SIGKILL everything that is left of the attempt; returns what survived that (nothing, but it is looked at)."""
        left = process_tree.kill_until_gone(self.members, timeout_seconds, not_reaped=frozenset({self.process.pid}))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1.0)
        process_tree.reap_adopted(frozenset({self.process.pid}))
        return left


def _torchrun(ranks: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",  # port 0: nothing to collide with
        "--local-addr=127.0.0.1",
        "--max-restarts=0",
        # Ranks that were asked to leave do so one after the other; a fault's survivors are ended by the supervisor.
        "--shutdown-timeout=30",
        "-m",
        "ups.record.rank_wrapper",
    ]


def _flight_recorder(run_dir: Path, attempt: int) -> dict[str, str]:
    """Where torch's flight recorder dumps, for who has turned it on: into the run, not into everybody's /tmp.

    It is not turned on here: on NCCL nothing of it has been tried, and the black box does the same for every backend.
    """
    prefix = str((run_dir / "failures" / f"attempt_{attempt}" / FLIGHT_PREFIX).absolute())
    if not any(os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")):
        return {}
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    return {name: prefix for name in names if name not in os.environ}


def make_box_root(run_dir: Path, ranks: int) -> Path:
    """A directory for the rings: shared memory where there is enough, else inside the run."""
    sweep_box_roots()
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK) and _room(_SHARED_MEMORY) >= ranks * _BOX_BYTES:
        root = _SHARED_MEMORY / f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(4)}"
    else:
        root = run_dir / "blackbox" / "live"
    root.mkdir(parents=True, mode=0o700, exist_ok=True)
    return root


def _room(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def sweep_box_roots() -> None:
    """Remove rings whose supervisor was killed before it could."""
    for path in _SHARED_MEMORY.glob(f"{_PREFIX}-*-*"):
        owner = path.name.split("-")[2]
        with contextlib.suppress(OSError):
            if owner.isdigit() and not process_tree.is_alive(int(owner)) and path.stat().st_uid == os.getuid():
                shutil.rmtree(path)
