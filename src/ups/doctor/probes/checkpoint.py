"""Check `checkpoint`: writes one of full size where the run would, verifies it, reads it back, and takes the time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ups.doctor.probes.check import Assignment, CheckFailed, Report
from ups.doctor.probes.ulimits import free_bytes
from ups.record.text import size_text

if TYPE_CHECKING:
    from ups.config.schema import Recipe
    from ups.distributed.runtime import Runtime

# What schedulers usually leave between SIGTERM and SIGKILL (Slurm and Kubernetes: 30 s).
GRACE_SECONDS = 30.0


def check(assignment: Assignment, recipe: Recipe, runtime: Runtime, report: Report) -> None:
    """The state of the largest stage there and back. Collective: all ranks."""
    import torch

    from ups.distributed.agreement import from_all
    from ups.distributed.strategies import local
    from ups.doctor.probes.parity import digest
    from ups.doctor.probes.parts import open_run_data
    from ups.run.assemble import assemble
    from ups.training.checkpoint import Checkpointer
    from ups.training.progress import Progress

    folder = assignment.run_dir / f".doctor-{assignment.work_dir.name}"
    # The last stage: what it holds is what the run ends with.
    last = Progress(stage_index=len(recipe.stages) - 1)
    with open_run_data(assignment) as opened, assemble(recipe, opened, runtime, last) as parts:
        tensors = parts.engine.state_tensors()
        before = {name: digest(local(tensor)) for name, tensor in tensors.items()}
        num_bytes = sum(local(t).nbytes for t in tensors.values())
        whole = num_bytes if runtime.strategy != "fsdp" else sum(from_all(num_bytes, runtime.control_group))
        check_space(whole, recipe.checkpoint.keep, free_bytes(assignment.run_dir))
        checkpointer = Checkpointer(runtime, folder, keep=1, asynchronous=False)
        started = time.monotonic()
        checkpointer.save_now(tensors, Progress(step=1))
        seconds = time.monotonic() - started
        found = checkpointer.find()
        if found is None:
            raise CheckFailed(f"the checkpoint that was just committed in {folder} is not found")
        with torch.no_grad():
            for tensor in tensors.values():
                local(tensor).zero_()
        checkpointer.load(found[0], tensors)
        after = {name: digest(local(tensor)) for name, tensor in tensors.items()}
    wrong = sorted(name for name in before if before[name] != after[name])
    if wrong:
        raise CheckFailed(
            f"{len(wrong)} of {len(before)} tensors came back from the checkpoint with other values: {wrong[:6]}",
            means="a run that resumes would go on with another model",
        )
    report.facts |= {"bytes": whole, "seconds": round(seconds, 2), "tensors": len(before)}
    if seconds > GRACE_SECONDS:
        report.warnings.append(
            f"a checkpoint takes {seconds:.0f} s, and schedulers usually leave {GRACE_SECONDS:.0f} s between SIGTERM "
            "and SIGKILL: ask for more (Slurm: --signal=TERM@120), or save more often"
        )
    report.says = f"{size_text(whole)} written, verified and read back, {seconds:.1f} s to save"


def check_space(num_bytes: int, keep: int, free: int) -> None:
    """All checkpoints that are kept, and the one that is being written, must fit."""
    needed = (keep + 1) * num_bytes
    if needed > free:
        raise CheckFailed(
            f"{keep + 1} checkpoints of {size_text(num_bytes)} need {size_text(needed)}; {size_text(free)} are free",
            means="saving would fail in the middle of the run, when the disk is full",
            hint="free some space, use --set run.dir=PATH on a larger disk, or a smaller checkpoint.keep",
        )
