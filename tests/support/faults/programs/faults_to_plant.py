"""Ways to fail, planted into rank programs of the tests: `TOY_FAULTS` is a JSON list with the fault of each attempt.

A fault is an object with kind, rank and phase (one or a list), step, and what its kind needs. Only the programs next to
this file know it; the product has no special case for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.faults.damage import damage_newest

ATTEMPT = int(os.environ.get("UPS_ATTEMPT", "0"))
FAULT: dict[str, Any] = dict(enumerate(json.loads(os.environ.get("TOY_FAULTS", "[]")))).get(ATTEMPT, {})
# What a program may look at after a fault that only changes what it does next.
FLAGS: set[str] = set()


class OutOfMemoryError(RuntimeError):
    """The name by which torch's own is known."""


def plant_fault(phase: str, step: int, rank: int, *, micro_batch_size: int = 8, run_dir: Path | None = None) -> None:
    """Fail now if the fault of this attempt is for this rank, step and phase."""
    if not FAULT or phase not in _several("phase") or step != FAULT["step"] or rank not in _several("rank"):
        return
    kind = FAULT["kind"]
    if "newest" in FAULT:
        assert run_dir is not None
        while not (run_dir / "checkpoints" / f"step_{FAULT['newest']:08d}").exists():
            time.sleep(0.05)  # a save in the background is committed a little later
    if kind in FLAGS_OF:
        FLAGS.add(kind)
    elif kind == "out_of_memory":
        if micro_batch_size > FAULT["fits"]:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    elif kind == "damage":
        assert run_dir is not None
        damage_newest(run_dir, FAULT.get("how", "flip"))
        if "signal" in FAULT:
            signal_itself()
    else:
        ACTIONS[kind]()


def _several(key: str) -> list[Any]:
    chosen = FAULT[key]
    return chosen if isinstance(chosen, list) else [chosen]


def person_code() -> None:
    """What a mistake in a user's reader looks like."""
    raise FileNotFoundError("shard_0003.h5")


def native() -> None:
    """Die in native code, as a bad kernel would."""
    getattr(ctypes.CDLL(None), "raise")(signal.Signals[FAULT["signal"]])


def hold_the_lock() -> None:
    """Compute forever without letting go of the interpreter lock."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def signal_itself() -> None:
    """Get a signal as if from outside."""
    os.kill(os.getpid(), signal.Signals[FAULT["signal"]])
    time.sleep(0.2)


def kill_wrapper() -> None:
    """End the parent of this rank, which goes with it; what the rank has started is then an orphan."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3600)


def leave_without_wrapper() -> None:
    """The first time ask this rank to leave, the second time, when it has, end its wrapper."""
    if ASKED_TO_LEAVE:
        kill_wrapper()
    ASKED_TO_LEAVE.append(True)
    os.kill(os.getpid(), signal.SIGTERM)


def stop_worker() -> None:
    """Halt the first child of this rank and wait for it, as a loader would."""
    os.kill(min(_children()), signal.SIGSTOP)
    time.sleep(3600)


def kill_worker() -> None:
    """End the first child of this rank and go on, as if the kernel had chosen it."""
    os.kill(min(_children()), signal.SIGKILL)


def open_files() -> None:
    """Open more files than the usual limit allows, and keep them."""
    KEPT.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(FAULT["count"]))


def no_address_space() -> None:
    """From now on this process gets no more address space, as after `prlimit --as`.

    A thread that starts with a stack from the cache comes up, and dies of a MemoryError before it can say so.
    """
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def wedge_saves() -> None:
    """From now on the disk does not answer when a checkpoint of this process is brought to it."""
    from ups.training import checkpoint

    checkpoint.hash_files = lambda *arguments, **named: time.sleep(3600)


def die_in_save() -> None:
    """From now on the kernel ends this process at a byte of a file that it writes, or it kills itself at a call."""
    if "offset" in FAULT:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FAULT["offset"], FAULT["offset"]))
        return
    name, left = FAULT["call"], [FAULT["count"]]
    real = getattr(os, name)

    def counted(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **named)

    setattr(os, name, counted)


def _children() -> list[int]:
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _parent_of(int(p.name)) == os.getpid()]


def _parent_of(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        text = Path(f"/proc/{pid}/stat").read_text()
        return int(text[text.rindex(")") + 2 :].split()[1])
    return 0


FLAGS_OF = frozenset({"skip_collective", "wrong_shape", "end_of_data", "nan", "done_too_early"})
KEPT: list[int] = []
ASKED_TO_LEAVE: list[bool] = []
ACTIONS = {
    "exception": person_code,
    "crash": native,
    "hold_the_lock": hold_the_lock,
    "kill": signal_itself,
    "kill_wrapper": kill_wrapper,
    "leave_without_wrapper": leave_without_wrapper,
    "stop_worker": stop_worker,
    "kill_worker": kill_worker,
    "open_files": open_files,
    "no_address_space": no_address_space,
    "wedge_saves": wedge_saves,
    "die_in_save": die_in_save,
    "os_exit": lambda: os._exit(FAULT.get("code", 0)),
    "sys_exit": lambda: sys.exit(0),
    "sleep": lambda: time.sleep(FAULT["seconds"]),
}
