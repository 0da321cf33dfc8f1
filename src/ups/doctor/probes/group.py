"""Checks `group` and `collective`: ranks find each other, and the first sums they make are right and not slow."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from ups.doctor.probes.check import TIMEOUT_SECONDS, Assignment, CheckFailed, Report, begin_check, start
from ups.record.text import size_text

if TYPE_CHECKING:
    from ups.distributed.runtime import Runtime

LARGE_BYTES = 64 << 20
# 64 MB in longer than this would make a step of a small model wait for seconds: something is badly set up.
SLOW_SECONDS = 10.0


def main() -> None:
    """Start the runtime of a rank, then reduce."""
    assignment = start(sys.argv[1:])
    with begin_check("group") as report:
        from ups.config.schema import EngineConfig
        from ups.distributed.runtime import Runtime

        config = assignment.recipe.engine if assignment.recipe else EngineConfig()
        config = config.model_copy(update={"timeout_seconds": TIMEOUT_SECONDS})
        started = time.monotonic()
        context = Runtime.start(config)
        runtime = context.__enter__()
        check_group(assignment, runtime, time.monotonic() - started, report)
    with begin_check("collective") as report:
        check_collective(runtime, report)
    context.__exit__(None, None, None)


def check_group(assignment: Assignment, runtime: Runtime, seconds: float, report: Report) -> None:
    """As many ranks as asked for, each with a number of its own. Collective: all ranks."""
    import os

    from ups.distributed.agreement import from_all

    if runtime.control_group is None:
        report.says = "one rank: no process group is needed"
        return
    seen = from_all((runtime.rank, os.getpid(), runtime.device.type), runtime.control_group)
    if sorted(rank for rank, _, _ in seen) != list(range(assignment.ranks)):
        raise CheckFailed(f"asked for {assignment.ranks} ranks, found {sorted(rank for rank, _, _ in seen)}")
    if len({kind for _, _, kind in seen}) > 1:
        raise CheckFailed(f"ranks are on different kinds of devices: {[kind for _, _, kind in seen]}")
    backend = "nccl" if runtime.device.type == "cuda" else "gloo"
    report.facts |= {"backend": backend, "start_seconds": round(seconds, 2), "strategy": runtime.strategy}
    report.says = f"{len(seen)} ranks found each other and joined with {backend}, strategy {runtime.strategy}"


def check_collective(runtime: Runtime, report: Report) -> None:
    """A small and a large sum, checked for value and speed. Collective: all ranks."""
    import torch
    import torch.distributed as dist

    if runtime.control_group is None:
        report.says = "one rank: nothing to reduce"
        return
    world, rank = runtime.world_size, runtime.rank
    small = torch.full((8,), float(rank + 1), device=runtime.device)
    dist.all_reduce(small)
    expected = world * (world + 1) / 2
    if not bool((small == expected).all()):
        raise CheckFailed(f"the sum of 1 to {world} over all ranks is {small[0].item()}, not {expected}")
    large = torch.ones(LARGE_BYTES // 4, device=runtime.device) * (rank + 1)
    dist.all_reduce(torch.ones(LARGE_BYTES // 4, device=runtime.device))  # the first one opens connections
    started = time.monotonic()
    dist.all_reduce(large)
    if runtime.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.monotonic() - started
    wrong = int((large != expected).sum())
    if wrong:
        raise CheckFailed(
            f"an all-reduce of {size_text(LARGE_BYTES)} gave {wrong} wrong numbers",
            means="the transport between ranks corrupts data",
            hint="try another interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), or NCCL_P2P_DISABLE=1",
        )
    rate = LARGE_BYTES / seconds
    report.facts |= {"bytes": LARGE_BYTES, "seconds": round(seconds, 4), "bytes_per_second": round(rate)}
    if seconds > SLOW_SECONDS:
        report.warnings.append(f"64 MB took {seconds:.1f} s to reduce: each step waits for that")
    report.says = f"sums are right; 64 MB in {seconds * 1000:.0f} ms ({size_text(rate)} a second)"


if __name__ == "__main__":
    main()
