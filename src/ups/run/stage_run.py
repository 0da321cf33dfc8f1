"""One stage of a run inside a rank: assembled, given its hooks and its state, and trained.

Every stage starts from the checkpoint before it, its own or the last one of the previous stage: one way in, whether the
run goes on or comes back, and sharded weights need not be taken apart in memory between stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ups.config.schema import Recipe
from ups.distributed.runtime import Runtime
from ups.record.checkpoints import checkpoint_path
from ups.run.assemble import OpenData, assemble
from ups.run.validation import build_validation
from ups.tracking.tracker import FanOut
from ups.training.checkpoint import Checkpointer
from ups.training.hooks import EvaluateHook, LogHook, SaveHook, in_order
from ups.training.progress import Progress
from ups.training.step_recorder import StepRecorder
from ups.training.stop_requests import StopRequests


@dataclass(frozen=True)
class StageRun:
    """What a stage of this run needs from outside."""

    recipe: Recipe
    runtime: Runtime
    opened: OpenData
    checkpointer: Checkpointer
    tracker: FanOut | None
    stop_requests: StopRequests
    box: StepRecorder | None

    def run(self, progress: Progress, path: Path | None) -> tuple[int, Progress, Path]:
        """Train stage `progress.stage_index` from `progress`, whose state is in `path`. Collective: all ranks.

        Returns the signal to leave with (0: the stage is done), the new progress, and the checkpoint that holds it.
        """
        recipe, runtime = self.recipe, self.runtime
        with assemble(recipe, self.opened, runtime, progress, stop_requests=self.stop_requests, box=self.box) as parts:
            parts.loader.start()
            parts.engine.hooks += in_order(
                SaveHook(self.checkpointer, recipe.checkpoint),
                EvaluateHook(
                    build_validation(recipe.evaluate, self.opened.readers, parts.stepper),
                    recipe.evaluate.interval_steps,
                    self.tracker,
                ),
                LogHook(
                    recipe.tracking.log_interval_steps,
                    recipe.stages[progress.stage_index].type,
                    self.tracker,
                    attempt=runtime.attempt,
                ),
            )
            if path is not None:
                # A stage that has not begun takes over the weights of the one before it, and nothing else.
                self.checkpointer.load(path, parts.engine.state_tensors(), only_model=progress.stage_step == 0)
                parts.strategy.weights_changed()
            stopped = parts.engine.run()
        return stopped, parts.engine.progress, checkpoint_path(self.checkpointer.run_dir, parts.engine.progress.step)
