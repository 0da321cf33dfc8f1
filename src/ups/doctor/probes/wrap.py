"""Checks `wrap`, `memory` and `checkpoint`: every rank trains one real step of each stage, and saves a checkpoint.

Exactly as the run would: its precision, strategy, micro-batch, workers and compilation. Together the ranks must fit in
memory. The checkpoint has full size and lies where the run would have it.
"""

from __future__ import annotations

import math
import time

import torch

from ups.distributed.agreement import from_all
from ups.distributed.runtime import Runtime
from ups.distributed.strategies import local
from ups.doctor.examine import scratch_dir
from ups.doctor.probes.check import Assignment
from ups.doctor.probes.parity import digest
from ups.doctor.probes.parts import StopAfter, open_run_data, quick, run_steps, stage_name
from ups.record.processes import status_fields
from ups.record.text import counted, size_text
from ups.run.assemble import assemble
from ups.run.preflight import CheckFailed, Report, free_bytes, memory_limit_bytes
from ups.training.checkpoint import Checkpointer
from ups.training.progress import Progress

FULL = 0.95
CLOSE = 0.8


def check_wrap(assignment: Assignment, report: Report) -> None:
    """One step of each stage, and the largest (private, shared) memory of this rank. Collective: all ranks."""
    recipe = quick(assignment.run)
    runtime = assignment.shared["runtime"] = assignment.stack.enter_context(Runtime.start(recipe.engine))
    largest = (0, 0)
    with open_run_data(assignment) as opened:
        for index in range(len(recipe.stages)):
            started = time.monotonic()
            with assemble(recipe, opened, runtime, Progress(stage_index=index), hooks=[StopAfter(1)]) as parts:
                run_steps(parts)
                largest = max(largest, resident_bytes(parts.loader.worker_pids))
                norm = parts.engine.gradient_norm
            if not math.isfinite(norm):
                raise CheckFailed(
                    f"the first step of {stage_name(recipe, index)} has a gradient norm of {norm}",
                    hint="try engine.precision=float32, and look at the data with `ups data validate`",
                )
            report.facts[f"stage_{index}"] = {"gradient_norm": norm, "seconds": round(time.monotonic() - started, 2)}
    report.says = (
        f"{counted(runtime.world_size, 'rank')} ({runtime.strategy}, {recipe.engine.precision}) trained a real step"
    )
    assignment.shared["memory"] = largest


def check_memory(assignment: Assignment, report: Report) -> None:
    """What the ranks of this host need together against what they may have. Collective: all ranks."""
    runtime: Runtime = assignment.shared["runtime"]
    everyone = from_all(assignment.shared["memory"], runtime.control_group)
    # Libraries are mapped by all ranks and are in memory once.
    needed = sum(private for private, _ in everyone) + max(shared for _, shared in everyone)
    judge_memory(needed, memory_limit_bytes(), len(everyone), report)
    report.facts["bytes_by_rank"] = [private + shared for private, shared in everyone]
    if runtime.device.type == "cuda":
        used, (_, total) = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()
        report.facts["device_bytes"] = used
        if used > FULL * total:
            report.warnings.append(f"a step needs {size_text(used)} of the {size_text(total)} of a GPU")


def judge_memory(needed: int, limit: int, ranks: int, report: Report) -> None:
    """Refuse what does not fit; warn where it is close."""
    text = f"{counted(ranks, 'rank')} with workers need {size_text(needed)} of {size_text(limit)}"
    if needed > FULL * limit:
        raise CheckFailed(
            text,
            means="the kernel would kill a rank for lack of memory (SIGKILL, no traceback)",
            hint="use fewer ranks or loader workers, a smaller engine.micro_batch_size, or a machine with more memory",
        )
    if needed > CLOSE * limit:
        report.warnings.append(text)
    report.facts |= {"needed_bytes": needed, "limit_bytes": limit}
    report.says = text


def resident_bytes(children: tuple[int, ...] = ()) -> tuple[int, int]:
    """(private, file-backed) bytes of this process at its peak, with the private ones of its workers now."""
    own = _status("self")
    private = max(own.get("VmHWM", 0) - own.get("RssFile", 0), own.get("RssAnon", 0) + own.get("RssShmem", 0))
    for pid in children:
        private += _status(pid).get("RssAnon", 0)
    return private, own.get("RssFile", 0)


def _status(pid: int | str) -> dict[str, int]:
    sizes = {name: value.split() for name, value in status_fields(pid).items() if value.endswith(" kB")}
    return {name: int(number) * 1024 for name, (number, _) in sizes.items()}


# What schedulers usually leave between SIGTERM and SIGKILL (Slurm and Kubernetes: 30 s).
GRACE_SECONDS = 30.0


def check_checkpoint(assignment: Assignment, report: Report) -> None:
    """The state of the largest stage there and back. Collective: all ranks."""
    recipe = quick(assignment.run)
    runtime: Runtime = assignment.shared["runtime"]
    folder = scratch_dir(assignment.run_dir, assignment.work_dir)
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
        saved = checkpointer.find()
        if saved is None:
            raise CheckFailed(f"the checkpoint that was just committed in {folder} is not found")
        with torch.no_grad():
            for tensor in tensors.values():
                local(tensor).zero_()
        checkpointer.load(saved[0], tensors)
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
