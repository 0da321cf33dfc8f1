"""A rank program for the fault tests: tiny synchronous training over gloo with the real recorder and real commits.

`python toy_rank.py RUN_DIR`. Steps of a few milliseconds, a checkpoint every `TOY_INTERVAL` steps, two named
all-reduces per step. The fault of each attempt comes from `TOY_FAULTS`, a JSON list of objects with kind, rank, step
and phase, which only this program knows. Each step maps the state exactly, so that final bytes can be compared.
"""

import contextlib
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

from tests.support.faults.programs.faults_to_plant import FAULT, FLAGS, plant_fault  # noqa: E402
from ups.record import manifest  # noqa: E402
from ups.record.blackbox import Phase  # noqa: E402

STEPS = int(os.environ.get("TOY_STEPS", "20"))
INTERVAL = int(os.environ.get("TOY_INTERVAL", "5"))
STEP_SECONDS = float(os.environ.get("TOY_STEP_SECONDS", "0.01"))
FORWARD_DEADLINE = float(os.environ.get("TOY_FORWARD_DEADLINE", "0"))
ONE_SAVES = os.environ.get("TOY_ONE_SAVES", "0") == "1"
WATCHED = os.environ.get("TOY_WATCHED", "1") == "1"
WORKERS = int(os.environ.get("TOY_WORKERS", "0"))
OVERRIDES = json.loads(os.environ.get("UPS_OVERRIDES", "{}"))
MICRO_BATCH_SIZE = int(OVERRIDES.get("engine.micro_batch_size", os.environ.get("TOY_MICRO_BATCH", "8")))


ASKED: list[int] = []
CHILDREN: list[subprocess.Popen[bytes]] = []


def main() -> None:
    plant_fault("init", 0, int(os.environ["RANK"]))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda number, frame: ASKED.append(number))
    init = {"init_method": os.environ["UPS_RENDEZVOUS"]} if "UPS_RENDEZVOUS" in os.environ else {}
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), **init)
    rank = dist.get_rank()
    CHILDREN.extend(subprocess.Popen(["sleep", "3600"]) for _ in range(WORKERS))
    if FAULT.get("daemon"):
        subprocess.Popen(["setsid", "sleep", "3600"])
    step, state = load(torch)
    BOX.total_steps = STEPS

    watched = WATCHED or rank != FAULT.get("rank")

    def hit(phase: str, at_step: int) -> None:
        plant_fault(phase, at_step, rank, micro_batch_size=MICRO_BATCH_SIZE, run_dir=RUN_DIR)

    try:
        with RECORDER.watch() if watched else contextlib.nullcontext():
            while step < STEPS:
                BOX.record(Phase.DATA, step, batch=step * 10)
                hit("data", step)
                BOX.record(Phase.FORWARD, step, deadline_seconds=FORWARD_DEADLINE if step == FAULT.get("step") else 0)
                hit("forward", step)
                time.sleep(STEP_SECONDS)
                size = 5 if "wrong_shape" in FLAGS else 4
                gradient = torch.full((size,), float(step + rank))
                BOX.record(Phase.BACKWARD, step)
                hit("backward", step)
                if "skip_collective" not in FLAGS:
                    BOX.issue(f"all_reduce(gradient, float32[{size}])", Phase.SYNC, step)
                    hit("sync", step)
                    dist.all_reduce(gradient)
                FLAGS.clear()
                BOX.record(Phase.OPTIMIZER, step)
                hit("optimizer", step)
                state = state * 1.000001 + gradient[:4].double()
                asked = torch.tensor([len(ASKED)])
                BOX.issue("all_reduce(asked, int64[1])", Phase.SYNC, step)
                dist.all_reduce(asked, op=dist.ReduceOp.MAX)
                BOX.loss = float(state[0])
                step += 1
                leave = int(asked) > 0
                if step % INTERVAL == 0 or step == STEPS or leave:
                    # Who left out a collective has read another one's bytes as `asked`: it must not commit its state.
                    BOX.issue("barrier(before save)", Phase.SYNC, step)
                    dist.barrier()
                    if rank == 0 or not ONE_SAVES:
                        BOX.record(Phase.SAVE, step)
                    if rank == 0 and ONE_SAVES:
                        BOX.record(Phase.SAVE, step)  # two parts, so that those who only wait look further behind
                    hit("save", step)
                    save(step, state, rank)
                    BOX.issue("barrier", Phase.SYNC, step)
                    dist.barrier()
                if FAULT.get("phase") == "evaluate" and step % INTERVAL == 0:
                    BOX.record(Phase.EVALUATE, step, deadline_seconds=30)
                    hit("evaluate", step)
                if leave and step < STEPS:
                    BOX.leave(step)
                    print(f"rank {rank} left at {step}", flush=True)
                    hit("left", FAULT.get("step", 0))
                    return
            print(f"rank {rank} done {hashlib.sha256(state.numpy().tobytes()).hexdigest()}", flush=True)
            BOX.record(Phase.TEARDOWN, step)
            hit("teardown", step)
            BOX.finish(step - 1 if "done_too_early" in FLAGS else step)
            hit("finished", step)
    finally:
        for child in CHILDREN:
            child.kill()
        dist.destroy_process_group()
        if not watched:
            time.sleep(2.0)  # the peers write down what they see before this rank says why it leaves


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
