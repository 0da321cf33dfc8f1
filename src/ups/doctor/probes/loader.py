"""Check `loader`: what worker processes read is bit for bit what this process reads, in the same order.

This process reads first and keeps its files open, as a rank may have done before it starts workers: a handle that
leaks into a worker gives wrong data there, without an error.
"""

from __future__ import annotations

import itertools
import math
import time
from typing import TYPE_CHECKING, Any

from ups.doctor.probes.check import Assignment, CheckFailed, Report
from ups.doctor.probes.ulimits import memory_available_bytes
from ups.record.text import size_text

if TYPE_CHECKING:
    from ups.config.schema import Recipe
    from ups.run.assemble import OpenData
    from ups.spec.batch import Batch

NUM_BATCHES = 12
FIELDS = ("numbers", "state", "static", "target", "parameters", "dt")


def check(assignment: Assignment, report: Report) -> None:
    """The first batches of rank 0 of the first stage."""
    from ups.doctor.probes.parts import open_run_data

    recipe = assignment.run
    with open_run_data(assignment) as opened:
        expected = read(recipe, opened, assignment.ranks, workers=0)
        workers = workers_to_try(recipe.data.loader.workers, recipe.data_of(0).blocks_per_step)
        started = time.monotonic()
        found = read(recipe, opened, assignment.ranks, workers=workers)
        seconds = time.monotonic() - started
    compare(expected, found)
    num_bytes = max(batch_bytes(batch) for batch in expected)
    check_memory(recipe, assignment.ranks, num_bytes, report)
    report.facts |= {"batch_bytes": num_bytes, "workers_tried": workers, "seconds": round(seconds, 2)}
    report.says = (
        f"{workers} worker processes read {len(found)} batches ({size_text(num_bytes)} each) exactly as this process"
    )


def workers_to_try(wanted: int, blocks_per_step: int) -> int:
    """About as many as the recipe has, and so that blocks do not divide among them: each then reads from every task.

    With two tasks and two workers, each task would be read by one worker alone, and nothing would be shared.
    """
    return next(n for n in itertools.count(max(2, min(4, wanted))) if math.gcd(n, blocks_per_step) == 1)


def read(recipe: Recipe, opened: OpenData, ranks: int, workers: int) -> list[Batch]:
    """The first batches of rank 0, read by so many workers."""
    from ups.run.assemble import bare_stage, stage_loader
    from ups.spec.batch import RankInfo

    loader_config = recipe.data.loader.model_copy(update={"workers": workers})
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"loader": loader_config})})
    _, stage = bare_stage(recipe, opened, 0, device="meta")
    with stage_loader(recipe, opened, RankInfo(0, ranks, 0, ranks), 0, stage) as loader:
        return [batch for _ in range(NUM_BATCHES) for batch in next(loader)]


def compare(expected: list[Batch], found: list[Batch]) -> None:
    """Refuse the first difference in any bit."""
    for number, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        if ours.task.name != theirs.task.name:
            raise CheckFailed(
                f"batch {number} is of task '{theirs.task.name}' from a worker, of '{ours.task.name}' here"
            )
        for name in FIELDS:
            a, b = getattr(ours, name).numpy(), getattr(theirs, name).numpy()
            if a.tobytes() != b.tobytes():
                wrong = [int(n) for n, x, y in zip(ours.numbers, a, b, strict=False) if x.tobytes() != y.tobytes()]
                raise CheckFailed(
                    f"batch {number}: a worker read other '{name}' of task '{ours.task.name}' than this process, in "
                    f"{len(wrong)} of {len(a)} windows (first: window {wrong[0] if wrong else '-'})",
                    means="training with loader workers would see wrong data without any error, as with a file handle "
                    "(HDF5) that was opened before a fork",
                    hint="open files in the process that reads them: nothing may be open when workers start",
                )


def check_memory(recipe: Recipe, ranks: int, num_bytes: int, report: Report) -> None:
    """Batches on the way of all ranks together must fit in memory (they travel in memory files, not in /dev/shm)."""
    loader = recipe.data.loader
    on_the_way = ranks * max(1, loader.workers * loader.prefetch) * num_bytes
    available = memory_available_bytes()
    report.facts["batches_on_the_way_bytes"] = on_the_way
    if on_the_way > available:
        raise CheckFailed(
            f"{ranks} ranks x {loader.workers} workers x {loader.prefetch} batches x {size_text(num_bytes)} are "
            f"{size_text(on_the_way)}, and {size_text(available)} of memory are free",
            means="ranks or workers would be killed for lack of memory, or by a bus error",
            hint="use fewer data.loader.workers or a smaller data.loader.prefetch",
        )


def batch_bytes(batch: Any) -> int:
    """Bytes of the tensors of a batch."""
    return sum(getattr(batch, name).numpy().nbytes for name in FIELDS)
