"""Checks `data` and `loader`: opens each task as a run does, reads ends and middle of each split, has its statistics.

Measures a task that was never measured (as `ups train` would before its ranks start), and keeps the result for the
other checks. A look at every byte is `ups data validate`.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from ups.doctor.probes import loader
from ups.doctor.probes.check import Assignment, CheckFailed, Report, begin_check, counted, start
from ups.doctor.probes.statistics import STATISTICS_NAME

if TYPE_CHECKING:
    from ups.config.schema import Recipe
    from ups.formats.base import Reader


def main() -> None:
    """Open, read, measure; then the same by worker processes."""
    assignment = start(sys.argv[1:])
    with begin_check("data") as report:
        check(assignment, report)
    with begin_check("loader") as report:
        loader.check(assignment, report)


def check(assignment: Assignment, report: Report) -> None:
    """Every task of the recipe."""
    from ups.buckets.block_cache import use_cache
    from ups.data.normalize import ensure_statistics
    from ups.data.open import open_task

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
        found = ensure_statistics(reader, config.path)
        check_statistics(reader, found.to_json())
        statistics[config.name] = found.to_json()
        grid = "x".join(map(str, reader.space))
        texts.append(f"{config.name} ({reader.splits['train']} trajectories, {grid} points)")
        reader.close()
    (assignment.work_dir / STATISTICS_NAME).write_text(json.dumps(statistics))
    report.facts["tasks"] = texts
    report.says = f"{counted(len(texts), 'task')} opened and read: {', '.join(texts)}"


def check_fit(reader: Reader, recipe: Recipe) -> None:
    """What the recipe asks of the data: something to train on, and trajectories that are long enough."""
    from ups.data.open import check_conserved
    from ups.data.rank_source import WindowIndex

    check_conserved(recipe.model, reader)
    name = reader.task.name
    if reader.splits.get("train", 0) < 1:
        raise CheckFailed(f"task '{name}' has no trajectories to train on", hint="check its splits")
    for stage in recipe.stages:
        frames = stage.window_frames(recipe.data.context_frames)
        if not len(WindowIndex.of(reader, "train", frames)):
            raise CheckFailed(
                f"task '{name}' has no trajectory of {frames} frames to train on",
                hint="use fewer context frames and unroll steps, or put longer ones into split 'train'",
            )
    for split in ("valid", "test"):
        frames = recipe.data.context_frames + 1
        if reader.splits.get(split, 0) and not len(WindowIndex.of(reader, split, frames)):
            raise CheckFailed(
                f"no trajectory of split '{split}' of task '{name}' has {frames} frames: there is nothing to score",
                hint="put longer trajectories into it, or leave the split out",
            )


def check_windows(reader: Reader, split: str, trajectory: int) -> None:
    """First, middle and last frames of a trajectory: there, in the right shape, finite."""
    import numpy as np

    from ups.data.normalize import MASK_HINT, masked

    num_frames = reader.frames_in(split, trajectory)
    frames = min(2, num_frames)
    starts = [0] if reader.task.steady else sorted({0, num_frames // 2 - 1, num_frames - frames})
    for first in (s for s in starts if s >= 0):
        window = reader.read(split, trajectory, first, 0 if reader.task.steady else frames)
        for name in ("state", "static", "target", "parameters"):
            values = getattr(window, name)
            if not np.isfinite(values).all():
                obstacle = name == "state" and masked(values[None]).any()
                raise CheckFailed(
                    f"{reader.where(split, trajectory)}, frame {first}: {name} of task '{reader.task.name}' has "
                    "values that are not finite",
                    means="one such sample makes the loss NaN for all ranks",
                    hint=MASK_HINT
                    if obstacle
                    else "find all of them with `ups data validate`, and leave those trajectories out",
                )


def check_statistics(reader: Reader, statistics: dict[str, Any]) -> None:
    """The statistics are of this data, and some channel that is predicted varies."""
    task = reader.task
    if statistics["data_identity"] != reader.identity():
        raise CheckFailed(
            f"the statistics of task '{task.name}' are of other data",
            means="fields would be normalized with numbers that do not fit them",
            hint="delete the statistics file next to the data; it is computed again",
        )
    if not any(s > 0 for s in statistics[f"{task.predicted}_std"]):
        raise CheckFailed(
            f"every {task.predicted} channel of task '{task.name}' is constant: there is nothing to learn"
        )


if __name__ == "__main__":
    main()
