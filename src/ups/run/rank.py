"""The stages of a run inside one rank, from wherever the run stands: for a supervised rank and for `ups.fit`.

Every stage starts from the checkpoint before it, its own or the last one of the previous stage: one way in, whether the
run goes on or comes back, and sharded weights need not be taken apart in memory between stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ups.config.schema import Recipe
from ups.data.open import open_tasks
from ups.distributed.environment import RankEnvironment
from ups.distributed.runtime import Runtime
from ups.errors import CheckpointError
from ups.record.blackbox import BlackBox
from ups.record.checkpoints import read_progress
from ups.record.failure import Recorder
from ups.record.identity import RunIdentity
from ups.record.run_dir import RunDir
from ups.run.assemble import OpenData, assemble
from ups.run.directory import read_statistics
from ups.run.stage_starts import check_start, earlier_stage, stages_to_keep
from ups.run.validation import build_validation
from ups.run.warm_start import take_weights
from ups.tracking.metrics_file import MetricsWriter
from ups.training.checkpoint import Checkpointer
from ups.training.hooks import EvaluateHook, LogHook, SaveHook, in_order
from ups.training.progress import Progress
from ups.training.stages import Stage
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
    on_damage: Callable[[int, str], None] | None = None,
) -> tuple[int, int]:
    """Train from the newest checkpoint, or from nothing, to the end. Collective: all ranks.

    Returns the signal to leave with (0: all stages are done) and the step that was reached. `identity`, `hashed`,
    `on_commit` and `on_damage`: see `Checkpointer`.
    """
    box = recorder.box
    with contextlib.ExitStack() as stack:
        runtime = stack.enter_context(Runtime.start(recipe.engine, environment))
        readers = stack.enter_context(open_tasks(recipe.data))
        opened = OpenData(readers, read_statistics(run_dir, readers))
        metrics = None
        if runtime.is_first:
            metrics = MetricsWriter(RunDir(run_dir).metrics)
            stack.callback(metrics.close)
        checkpointer = Checkpointer(
            runtime,
            run_dir,
            keep=recipe.checkpoint.keep,
            asynchronous=recipe.checkpoint.asynchronous,
            identity=identity,
            hashed=hashed,
            on_commit=on_commit,
            on_damage=on_damage,
        )
        stack.callback(checkpointer.close)
        stack.enter_context(stop_requests)
        # Entered last, so that it records before anything above closes a connection and misleads the peers.
        stack.enter_context(recorder.watch())
        found = checkpointer.find()
        path, progress = found if found is not None else (None, Progress())
        if path is not None and progress.stage_index == len(recipe.stages) - 1 and _by_another_recipe(path, identity):
            progress = progress.lengthened(recipe.stages[-1])
        progress.check([stage.steps for stage in recipe.stages])
        needed = stages_to_keep(recipe)
        ends = [checkpointer.find_end(index) for index in needed]
        checkpointer.needed |= {end[0] for end in ends if end is not None}
        known = identity.data if identity is not None else {}
        stages = _Stages(recipe, runtime, opened, checkpointer, metrics, stop_requests, box, known)
        while True:
            if progress.stage_finished:
                if progress.stage_index + 1 >= len(recipe.stages):
                    break
                progress = progress.next_stage()
            stopped, progress, path = stages.train(progress, path)
            if progress.stage_finished and progress.stage_index in needed:
                checkpointer.needed.add(progress.step)
            if stopped:
                if box is not None:
                    box.leave(progress.step)
                return stopped, progress.step
        if box is not None:
            box.finish(progress.step)
        return 0, progress.step


def _by_another_recipe(path: Path, identity: RunIdentity | None) -> bool:
    """Whether the run's recipe has changed since this checkpoint: only a longer last stage is such a change."""
    mark = read_progress(path).get("identity")
    recipe = mark.get("recipe") if isinstance(mark, dict) else None
    return identity is not None and bool(identity.recipes) and recipe != identity.recipes[-1]


@dataclass(frozen=True)
class _Stages:
    """What every stage of this run needs from outside."""

    recipe: Recipe
    runtime: Runtime
    opened: OpenData
    checkpointer: Checkpointer
    metrics: MetricsWriter | None
    stop_requests: StopRequests
    box: BlackBox | None
    known: Mapping[str, str]

    def train(self, progress: Progress, path: Path | None) -> tuple[int, Progress, Path]:
        """Train stage `progress.stage_index` from `progress`, whose state is in `path`. Collective: all ranks.

        Returns the signal to leave with (0: the stage is done), the new progress, and the checkpoint that holds it.
        """
        recipe, runtime, index = self.recipe, self.runtime, progress.stage_index
        change: Callable[[Stage], None] | None = None
        if progress.stage_step == 0 and recipe.stages[index].start_from:
            earlier = earlier_stage(recipe, index)
            path = self._end_of(earlier) if earlier is not None else None
            if earlier is None:
                check_start(self.checkpointer.run_dir, index, self.known)
                change = lambda stage: take_weights(  # noqa: E731
                    self.checkpointer.run_dir, index, stage.stepper, say=runtime.is_first
                )
        with assemble(
            recipe,
            self.opened,
            runtime,
            progress,
            stop_requests=self.stop_requests,
            box=self.box,
            change=change,
        ) as parts:
            parts.loader.start()
            engine, stage_type = parts.engine, recipe.stages[index].type
            members = recipe.stages[index].num_members
            validate = build_validation(recipe.evaluate, self.opened.readers, parts.stepper, members)
            engine.hooks += in_order(
                SaveHook(self.checkpointer, recipe.checkpoint),
                EvaluateHook(validate, recipe.evaluate.interval_steps, self.metrics),
                LogHook(recipe.tracking.log_interval_steps, stage_type, self.metrics, attempt=runtime.attempt),
            )
            if path is not None:
                # A stage that has not begun takes over the weights of the one before it, and nothing else.
                self.checkpointer.load(path, engine.state_tensors(), only_model=progress.stage_step == 0)
                parts.strategy.weights_changed()
            if progress.stage_step == 0:
                parts.stage.check_start()
            stopped = engine.run()
        return stopped, engine.progress, RunDir(self.checkpointer.run_dir).checkpoint(engine.progress.step)

    def _end_of(self, index: int) -> Path:
        """The checkpoint with which an earlier stage ended. Collective: all ranks."""
        found = self.checkpointer.find_end(index)
        if found is None:
            raise CheckpointError(
                f"the checkpoint with which stage {index} ended is gone, and a later stage starts from it",
                hint="bring it back, or start a new run: --set run.dir=PATH",
            )
        return found[1]
