"""Starts the ranks of one attempt and ends them: all of them, provably.

Each rank is started by a wrapper of its own (`ups.record.rank_wrapper`), which writes down the moment of death. No
process stands between the supervisor and the wrappers; how ranks find each other is in `options.py`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from ups.errors import MachineError
from ups.record import processes
from ups.record.run_dir import RunDir
from ups.supervise.link import SECRET_VARIABLE
from ups.supervise.options import Options

# Carried by every process of the run: what it finds after the end is an orphan.
TOKEN_VARIABLE = "UPS_SUPERVISOR_TOKEN"  # noqa: S105 - a mark, not a secret
_LAUNCH_VARIABLES = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME")
) | frozenset(("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
FLIGHT_PREFIX = "nccl_trace_rank_"


class Launcher:
    """One attempt's processes: a wrapper for each rank, which starts the rank."""

    def __init__(self, options: Options, attempt: int, box_dir: Path, overrides: Mapping[str, int]) -> None:
        self.token = secrets.token_hex(16)
        # Why a wrapper could not be started, by rank; the ranks after it were not tried.
        self.not_started: dict[int, str] = {}
        self._wrappers: dict[int, subprocess.Popen[bytes]] = {}
        log_of_rank = functools.partial(RunDir(options.run_dir).log, attempt)
        try:
            log_of_rank(0).parent.mkdir(parents=True, exist_ok=True)
            rendezvous = options.rendezvous.variables(box_dir)
        except OSError as error:
            raise MachineError(
                f"cannot start ranks: {error}", hint="check space and permissions of the run directory and of /dev/shm"
            ) from error
        environment = {
            **{name: value for name, value in os.environ.items() if not _of_another_launcher(name)},
            **({"OMP_NUM_THREADS": "1"} if options.ranks > 1 and "OMP_NUM_THREADS" not in os.environ else {}),
            **options.environment,
            **rendezvous,
            "WORLD_SIZE": str(options.ranks),
            "LOCAL_WORLD_SIZE": str(len(options.local_ranks)),
            "UPS_ATTEMPT": str(attempt),
            "UPS_BLACKBOX_DIR": str(box_dir),
            "UPS_OVERRIDES": json.dumps(dict(overrides)),
            TOKEN_VARIABLE: self.token,
            **_flight_recorder(options.run_dir, attempt),
        }
        command = processes.module_command("ups.record.rank_wrapper", str(options.run_dir), *options.command)
        for local_rank, rank in enumerate(options.local_ranks):
            try:
                rank_variables = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
                with log_of_rank(rank).open("ab") as log:
                    self._wrappers[rank] = _start(command, {**environment, **rank_variables}, log)
            except (OSError, subprocess.SubprocessError) as error:
                self.not_started[rank] = f"rank {rank} could not be started: {error}"
                return

    def ended(self) -> bool:
        """Whether every wrapper has left."""
        return all(wrapper.poll() is not None for wrapper in self._wrappers.values())

    def will_end(self) -> bool:
        """Whether a wrapper is still there that can leave by itself: one that somebody has stopped cannot."""
        waiting = [wrapper.pid for wrapper in self._wrappers.values() if wrapper.poll() is None]
        states = [process.state for pid in waiting if (process := processes.read_process(pid)) is not None]
        return any(state not in processes.STOPPED for state in states)

    def wrapper_code(self, rank: int) -> int | None:
        """The exit code of a rank's wrapper as `subprocess` gives it; None while it runs."""
        wrapper = self._wrappers.get(rank)
        return None if wrapper is None else wrapper.poll()

    def members(self) -> list[processes.Process]:
        """Every living process of this attempt, in the family tree or out of it."""
        found = {p.pid: p for p in processes.carriers(TOKEN_VARIABLE, self.token)}
        for wrapper in self._wrappers.values():
            if wrapper.returncode is None:  # not reaped: its number is still its own
                alone = processes.read_process(wrapper.pid)
                found |= {p.pid: p for p in [alone] if p is not None and p.state != "Z"}
                found |= {p.pid: p for p in processes.descendants(wrapper.pid)}
        found.pop(os.getpid(), None)
        return list(found.values())

    def end(self, timeout_seconds: float = 10.0) -> list[processes.Process]:
        """SIGKILL everything that is left of the attempt; returns what survived that (nothing, but it is looked at)."""
        # A program that trains with `ups.train` may have children besides, and waits for them itself.
        own = frozenset(wrapper.pid for wrapper in self._wrappers.values()) | processes.children_in_session()
        left = processes.kill_until_gone(self.members, timeout_seconds, not_reaped=own)
        for wrapper in self._wrappers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                wrapper.wait(timeout=1.0)
        processes.reap_adopted(own)
        return left


def _start(command: list[str], environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        # Its own session: Ctrl-C at the terminal is the supervisor's to pass on, once.
        start_new_session=True,
        # Until the wrapper is far enough to end its rank by itself.
        preexec_fn=processes.bound_to(os.getpid()),
    )


def _of_another_launcher(name: str) -> bool:
    """Whether a variable shows a launcher around the supervisor, or is for supervisors only: not for these ranks."""
    return name in _LAUNCH_VARIABLES or name == SECRET_VARIABLE or name.startswith("TORCHELASTIC_")


def _flight_recorder(run_dir: Path, attempt: int) -> dict[str, str]:
    """Where torch's flight recorder dumps, for who has turned it on: into the run, not into everybody's /tmp.

    It is not turned on here: on NCCL nothing of it has been tried, and the black box does the same for every backend.
    """
    prefix = str((RunDir(run_dir).failures_of(attempt) / FLIGHT_PREFIX).absolute())
    if not any(os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")):
        return {}
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    return {name: prefix for name in names if name not in os.environ}


def keep_rings(run_dir: Path, box_dir: Path) -> None:
    """Copy the rings of an attempt into the run: shared memory goes with the supervisor."""
    target = RunDir(run_dir).blackbox
    with contextlib.suppress(OSError):
        target.mkdir(exist_ok=True)
        for ring in box_dir.glob("rank_*.ring"):
            if ring.parent != target:
                shutil.copy2(ring, target / ring.name)
