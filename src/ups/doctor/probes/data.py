"""Checks `data`, `loader` and `opened`: opens each task as a run does, reads parts of each split, has its statistics.

`data` and `opened` measure a task that was never measured, as `ups train` would, and keep the result for the other
checks. `loader`: what worker processes read is bit for bit what this process reads, in the same order. A look at every
byte is `ups data validate`.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from typing import Any

from ups.buckets.block_cache import use_cache
from ups.config.schema import Recipe
from ups.data.normalize import ensure_statistics
from ups.data.open import open_task
from ups.doctor.probes.check import STATISTICS_NAME, Assignment
from ups.doctor.probes.parts import changed, open_run_data
from ups.record.text import counted, size_text
from ups.run.assemble import OpenData, bare_stage, stage_loader
from ups.run.preflight import CheckFailed, Report, check_fit, check_windows, memory_available_bytes
from ups.spec.batch import Batch, RankInfo


def check_data(assignment: Assignment, report: Report) -> None:
    """Every task of the recipe."""
    use_cache(assignment.run.data.cache_dir, assignment.run.data.cache_bytes)
    statistics: dict[str, Any] = {}
    texts = []
    for config in assignment.run.data.tasks:
        reader = open_task(config)
        check_fit(reader, assignment.run)
        for split, count in reader.splits.items():
            for trajectory in sorted({0, count // 2, count - 1}) if count else ():
                check_windows(reader, split, trajectory)
        if reader.splits.get("valid", 0) < 1:
            report.warnings.append(f"task '{config.name}' has no valid split: nothing is scored during training")
        measured = ensure_statistics(reader, config.path).to_json()
        predicted = reader.task.predicted
        if not any(s > 0 for s in measured[f"{predicted}_std"]):
            raise CheckFailed(
                f"every {predicted} channel of task '{config.name}' is constant: there is nothing to learn"
            )
        statistics[config.name] = measured
        grid = "x".join(map(str, reader.space))
        texts.append(f"{config.name} ({reader.splits['train']} trajectories, {grid} points)")
        reader.close()
    (assignment.work_dir / STATISTICS_NAME).write_text(json.dumps(statistics))
    report.facts["tasks"] = texts
    report.says = f"{counted(len(texts), 'task')} opened and read: {', '.join(texts)}"


NUM_BATCHES = 12
FIELDS = ("numbers", "state", "static", "target", "parameters", "dt")


def check_loader(assignment: Assignment, report: Report) -> None:
    """The first batches of rank 0 of the first stage."""
    recipe = assignment.run
    with open_run_data(assignment) as opened:
        expected = read_batches(recipe, opened, assignment.ranks, workers=0)
        workers = workers_to_try(recipe.data.loader.workers, recipe.data_of(0).blocks_per_step)
        started = time.monotonic()
        batches = read_batches(recipe, opened, assignment.ranks, workers=workers)
        seconds = time.monotonic() - started
    compare_batches(expected, batches)
    num_bytes = max(batch_bytes(batch) for batch in expected)
    check_batch_memory(recipe, assignment.ranks, num_bytes, report)
    report.facts |= {"batch_bytes": num_bytes, "workers_tried": workers, "seconds": round(seconds, 2)}
    report.says = (
        f"{workers} worker processes read {len(batches)} batches ({size_text(num_bytes)} each) exactly as this process"
    )


def workers_to_try(wanted: int, blocks_per_step: int) -> int:
    """About as many as the recipe has, and so that blocks do not divide among them: each then reads from every task.

    With two tasks and two workers, each task would be read by one worker alone, and nothing would be shared.
    """
    return next(n for n in itertools.count(max(2, min(4, wanted))) if math.gcd(n, blocks_per_step) == 1)


def read_batches(recipe: Recipe, opened: OpenData, ranks: int, workers: int) -> list[Batch]:
    """The first batches of rank 0, read by so many workers."""
    recipe = changed(recipe, data=changed(recipe.data, loader=changed(recipe.data.loader, workers=workers)))
    _, stage = bare_stage(recipe, opened, 0, device="meta")
    with stage_loader(recipe, opened, RankInfo(0, ranks, 0, ranks), 0, stage) as loader:
        return [batch for _ in range(NUM_BATCHES) for batch in next(loader)]


def compare_batches(expected: list[Batch], batches: list[Batch]) -> None:
    """Refuse the first difference in any bit."""
    for number, (ours, theirs) in enumerate(zip(expected, batches, strict=True)):
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


def check_batch_memory(recipe: Recipe, ranks: int, num_bytes: int, report: Report) -> None:
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


def check_opened(assignment: Assignment, report: Report) -> None:
    """Open and measure every task: the first trial of `--bisect`. What fails here needs no model."""
    measured = {}
    for config in assignment.run.data.tasks:
        report.facts["task"] = config.name
        reader = open_task(config)
        measured[config.name] = ensure_statistics(reader, config.path).to_json()
        reader.close()
    (assignment.work_dir / STATISTICS_NAME).write_text(json.dumps(measured))
    report.facts.clear()
    report.says = f"{counted(len(measured), 'task')} opened and measured"
