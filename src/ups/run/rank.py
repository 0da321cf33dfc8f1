"""The stages of a run inside one rank, from wherever the run stands: for a supervised rank and for `ups.fit`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from ups.config.schema import Recipe
from ups.data.open import open_tasks
from ups.distributed.environment import RankEnvironment
from ups.distributed.runtime import Runtime
from ups.record.failure import Recorder
from ups.record.identity import RunIdentity
from ups.run.assemble import OpenData
from ups.run.directory import read_statistics
from ups.run.stage_run import StageRun
from ups.tracking.build import build_trackers
from ups.tracking.tracker import FanOut, JsonlTracker
from ups.training.checkpoint import Checkpointer
from ups.training.progress import Progress
from ups.training.stop_requests import StopRequests


def run_stages(
    run_dir: Path,
    recipe: Recipe,
    environment: RankEnvironment,
    recorder: Recorder,
    stop_requests: StopRequests,
    *,
    identity: RunIdentity | None,
    hashed: str = "",
    on_commit: Callable[[int, str], None] | None = None,
) -> tuple[int, int]:
    """Train from the newest checkpoint, or from nothing, to the end. Collective: all ranks.

    Returns the signal to leave with (0: all stages are done) and the step that was reached. `identity`, `hashed` and
    `on_commit`: see `Checkpointer`.
    """
    box = recorder.box
    with contextlib.ExitStack() as stack:
        runtime = stack.enter_context(Runtime.start(recipe.engine, environment))
        readers = stack.enter_context(open_tasks(recipe.data.tasks))
        opened = OpenData(readers, read_statistics(run_dir, readers))
        tracker = None
        if runtime.is_first:
            others = build_trackers(recipe.tracking.trackers, run_dir)
            tracker = FanOut(JsonlTracker(run_dir / "metrics.jsonl"), others)
            stack.callback(tracker.close)
        checkpointer = Checkpointer(
            runtime,
            run_dir,
            keep=recipe.checkpoint.keep,
            asynchronous=recipe.checkpoint.asynchronous,
            identity=identity,
            hashed=hashed,
            on_commit=on_commit,
        )
        stack.callback(checkpointer.close)
        stack.enter_context(stop_requests)
        # Entered last, so that it records before anything above closes a connection and misleads the peers.
        stack.enter_context(recorder.watch())
        found = checkpointer.find()
        path, progress = found if found is not None else (None, Progress())
        progress.check([stage.steps for stage in recipe.stages])
        while True:
            if progress.stage_finished:
                if progress.stage_index + 1 >= len(recipe.stages):
                    break
                progress = progress.next_stage()
            stage = StageRun(recipe, runtime, opened, checkpointer, tracker, stop_requests, box)
            stopped, progress, path = stage.run(progress, path)
            if stopped:
                if box is not None:
                    box.leave(progress.step)
                return stopped, progress.step
        if box is not None:
            box.finish(progress.step)
        return 0, progress.step
