"""Checks `wrap`, `memory` and `checkpoint`: every rank trains one real step of each stage; together they fit in memory.

Exactly as the run would: its precision, strategy, micro-batch, workers and compilation.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ups.doctor.probes import checkpoint
from ups.doctor.probes.check import Assignment, CheckFailed, Report, begin_check, counted, start
from ups.doctor.probes.ulimits import memory_limit_bytes
from ups.record.text import size_text

if TYPE_CHECKING:
    from ups.config.schema import Recipe
    from ups.distributed.runtime import Runtime

FULL = 0.95
CLOSE = 0.8


def main() -> None:
    """One step, then the bill, then a checkpoint."""
    assignment = start(sys.argv[1:])
    with contextlib.ExitStack() as stack:
        with begin_check("wrap") as report:
            from ups.distributed.runtime import Runtime
            from ups.doctor.probes.parts import quick

            recipe = quick(assignment.run)
            runtime = stack.enter_context(Runtime.start(recipe.engine))
            private = check_wrap(assignment, recipe, runtime, report)
        with begin_check("memory") as report:
            check_memory(runtime, private, report)
        with begin_check("checkpoint") as report:
            checkpoint.check(assignment, recipe, runtime, report)


def check_wrap(assignment: Assignment, recipe: Recipe, runtime: Runtime, report: Report) -> tuple[int, int]:
    """One step of each stage; returns this rank's largest (private, shared) memory. Collective: all ranks."""
    from ups.doctor.probes.parts import StopAfter, open_run_data, run_steps, stage_name
    from ups.run.assemble import assemble
    from ups.training.progress import Progress

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
    return largest


def check_memory(runtime: Runtime, mine: tuple[int, int], report: Report) -> None:
    """What the ranks of this host need together against what they may have. Collective: all ranks."""
    import torch

    from ups.distributed.agreement import from_all

    everyone = from_all(mine, runtime.control_group)
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
        private += _status(str(pid)).get("RssAnon", 0)
    return private, own.get("RssFile", 0)


def _status(pid: str) -> dict[str, int]:
    with contextlib.suppress(OSError):
        lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
        return {parts[0].rstrip(":"): int(parts[1]) * 1024 for parts in lines if len(parts) == 3 and parts[2] == "kB"}
    return {}


if __name__ == "__main__":
    main()
