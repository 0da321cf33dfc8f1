"""A rank program for the fault tests: tiny synchronous training over gloo with the real recorder and real commits.

`python toy_rank.py RUN_DIR`. Steps of a few milliseconds, a checkpoint every `TOY_INTERVAL` steps, two named
all-reduces per step. The fault of each attempt comes from `TOY_FAULTS`, a JSON list of objects with kind, rank, step
and phase, which only this program knows. Each step maps the state exactly, so that final bytes can be compared.
"""

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ups.record.failure import install_from_environment

RUN_DIR = Path(sys.argv[1])
RECORDER = install_from_environment(RUN_DIR)
BOX = RECORDER.box
assert BOX is not None

from ups.record import manifest  # noqa: E402
from ups.record.blackbox import Phase  # noqa: E402

FAULTS = json.loads(os.environ.get("TOY_FAULTS", "[]"))
STEPS = int(os.environ.get("TOY_STEPS", "20"))
INTERVAL = int(os.environ.get("TOY_INTERVAL", "5"))
STEP_SECONDS = float(os.environ.get("TOY_STEP_SECONDS", "0.01"))
WORKERS = int(os.environ.get("TOY_WORKERS", "0"))
ATTEMPT = int(os.environ["UPS_ATTEMPT"])
FAULT = dict(enumerate(FAULTS)).get(ATTEMPT, {})
OVERRIDES = json.loads(os.environ.get("UPS_OVERRIDES", "{}"))
MICRO_BATCH = int(OVERRIDES.get("engine.micro_batch", os.environ.get("TOY_MICRO_BATCH", "8")))


def native(number: int) -> None:
    """Die in native code, as a bad kernel would."""
    getattr(ctypes.CDLL(None), "raise")(number)


def hold_the_lock() -> None:
    import re

    re.match(r"(a+)+$", "a" * 64 + "b")


def person_code() -> None:
    raise FileNotFoundError("shard_0003.h5")


class OutOfMemoryError(RuntimeError):
    """The name by which torch's own is known."""


def injected(phase: str, step: int, rank: int) -> None:
    """Strike if the fault is for this rank, step, phase and attempt."""
    if not FAULT or rank not in _targets() or phase != FAULT["phase"] or step != FAULT.get("step", 0):
        return
    kind = FAULT["kind"]
    if kind == "exception":
        person_code()
    elif kind == "out_of_memory":
        if FAULT.get("fits", 4) < MICRO_BATCH:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    elif kind == "os_exit":
        os._exit(FAULT.get("code", 0))
    elif kind == "sys_exit":
        sys.exit(0)
    elif kind == "hold_the_lock":
        hold_the_lock()
    elif kind == "sleep":
        time.sleep(FAULT["seconds"])
    elif kind == "crash":
        native(signal.Signals[FAULT["signal"]])
    elif kind == "kill":
        os.kill(os.getpid(), signal.Signals[FAULT["signal"]])
        time.sleep(0.2)
    elif kind == "kill_parent":
        # The launcher: parent of the wrapper.
        parent = int(Path(f"/proc/{os.getppid()}/stat").read_text().split()[3])
        os.kill(parent, signal.SIGKILL)
        time.sleep(60)
    elif kind == "stop_worker":
        os.kill(CHILDREN[0].pid, signal.SIGSTOP)
        time.sleep(3600)
    elif kind == "damage":
        newest = max((RUN_DIR / "checkpoints").glob("step_*")) / "state.json"
        newest.write_text(newest.read_text().replace("0x1", "0x2", 1))
    elif kind == "skip_collective":
        global SKIP
        SKIP = True
    elif kind == "wrong_shape":
        global SHAPE
        SHAPE = 5


def _targets() -> list[int]:
    chosen = FAULT["rank"]
    return chosen if isinstance(chosen, list) else [chosen]


SKIP = False
SHAPE = 4
ASKED: list[int] = []
CHILDREN: list[subprocess.Popen[bytes]] = []


def main() -> None:
    rank_before_torch = int(os.environ["RANK"])
    injected("init", 0, rank_before_torch)
    import torch
    import torch.distributed as dist

    global SKIP, SHAPE
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda number, frame: ASKED.append(number))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    CHILDREN.extend(subprocess.Popen(["sleep", "3600"]) for _ in range(WORKERS))
    if FAULT.get("daemon"):
        subprocess.Popen(["setsid", "sleep", "3600"])
    step, state = load(torch)
    BOX.total_steps = STEPS
    try:
        with RECORDER.watch():
            while step < STEPS:
                BOX.record(Phase.DATA, step, batch=step * 10)
                injected("data", step, rank)
                BOX.record(Phase.FORWARD, step)
                injected("forward", step, rank)
                time.sleep(STEP_SECONDS)
                gradient = torch.full((SHAPE,), float(step + rank))
                BOX.record(Phase.BACKWARD, step)
                injected("backward", step, rank)
                if not SKIP:
                    BOX.issue(f"all_reduce(gradient, float32[{SHAPE}])", Phase.SYNC, step)
                    dist.all_reduce(gradient)
                SKIP = False
                BOX.record(Phase.OPTIMIZER, step)
                injected("optimizer", step, rank)
                state = state * 1.000001 + gradient[:4].double()
                asked = torch.tensor([len(ASKED)])
                BOX.issue("all_reduce(asked, int64[1])", Phase.SYNC, step)
                dist.all_reduce(asked, op=dist.ReduceOp.MAX)
                BOX.loss = float(state[0])
                step += 1
                leave = int(asked) > 0
                if step % INTERVAL == 0 or step == STEPS or leave:
                    BOX.record(Phase.SAVE, step, deadline_seconds=float(os.environ.get("TOY_SAVE_DEADLINE", "30")))
                    injected("save", step, rank)
                    save(step, state, rank)
                    dist.barrier()
                if FAULT.get("phase") == "evaluate" and step % INTERVAL == 0:
                    BOX.record(Phase.EVALUATE, step, deadline_seconds=30)
                    injected("evaluate", step, rank)
                if leave and step < STEPS:
                    BOX.leave(step)
                    print(f"rank {rank} left at {step}", flush=True)
                    return
            print(f"rank {rank} done {hashlib.sha256(state.numpy().tobytes()).hexdigest()}", flush=True)
            BOX.record(Phase.TEARDOWN, step)
            injected("teardown", step, rank)
            BOX.finish(step)
    finally:
        for child in CHILDREN:
            child.kill()
        dist.destroy_process_group()


def load(torch: object) -> tuple[int, object]:
    """The newest committed state, else the first one."""
    import torch

    for path in sorted((RUN_DIR / "checkpoints").glob("step_*"), reverse=True):
        if manifest.is_committed(path):
            manifest.verify(path)
            values = json.loads((path / "state.json").read_text())
            return values["step"], torch.tensor([float.fromhex(x) for x in values["state"]], dtype=torch.float64)
    return 0, torch.zeros(4, dtype=torch.float64)


def save(step: int, state: object, rank: int) -> None:
    """Rank 0 commits; all others wait in the barrier after it."""
    if rank:
        return
    final = RUN_DIR / "checkpoints" / f"step_{step:08d}"
    temporary = manifest.make_temporary(final)
    text = json.dumps({"step": step, "state": [float(x).hex() for x in state]})
    (temporary / "state.json").write_text(text)
    manifest.commit_directory(temporary, final)


if __name__ == "__main__":
    main()
