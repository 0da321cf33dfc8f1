"""One stage of a run inside a rank: model, stage, loader, engine and hooks put together, and its state restored.

Every stage starts from the checkpoint before it, its own or the last one of the previous stage: one way in, whether the
run goes on or comes back, and sharded weights need not be taken apart in memory between stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ups.config.schema import Recipe
from ups.data.loader import build_loader
from ups.distributed.runtime import Runtime
from ups.distributed.strategies import spread
from ups.formats.base import Reader
from ups.models.build import build_model
from ups.record.checkpoints import checkpoint_path
from ups.run.validation import build_validation
from ups.spec.keyed import key_of
from ups.spec.statistics import Statistics
from ups.tracking.tracker import FanOut
from ups.training.checkpoint import Checkpointer
from ups.training.engine import Engine
from ups.training.hooks import EvaluateHook, LogHook, SaveHook, in_order
from ups.training.progress import Progress
from ups.training.stages import build_stage
from ups.training.step_recorder import StepRecorder
from ups.training.stop_requests import StopRequests


@dataclass(frozen=True)
class StageRun:
    """What a stage of this run needs from outside."""

    recipe: Recipe
    runtime: Runtime
    readers: Sequence[Reader]
    statistics: Mapping[str, Statistics]
    checkpointer: Checkpointer
    tracker: FanOut | None
    stop_requests: StopRequests
    box: StepRecorder | None

    def run(self, progress: Progress, path: Path | None) -> tuple[int, Progress, Path]:
        """Train stage `progress.stage_index` from `progress`, whose state is in `path`. Collective: all ranks.

        Returns the signal to leave with (0: the stage is done), the new progress, and the checkpoint that holds it.
        """
        recipe, runtime = self.recipe, self.runtime
        config = recipe.stages[progress.stage_index]
        tasks = [reader.task for reader in self.readers]
        stepper = build_model(recipe.model, tasks, self.statistics, recipe.data.context_frames, seed=recipe.run.seed)
        stage = build_stage(config, stepper, recipe.run.seed)
        strategy = spread(stage, runtime, recipe.engine)
        loader = build_loader(
            recipe.data,
            self.readers,
            runtime.place,
            seed=key_of(recipe.run.seed, "stage", progress.stage_index) >> 1,
            window_frames=stage.window_frames(recipe.data.context_frames),
            micro_batch=recipe.engine.micro_batch,
        )
        with loader:
            loader.start()
            engine = Engine(
                runtime,
                strategy,
                loader,
                config=recipe.engine,
                length=config,
                global_batch=recipe.data.block_size * recipe.data.blocks_per_step,
                progress=progress,
                stop_requests=self.stop_requests,
                hooks=in_order(
                    SaveHook(self.checkpointer, recipe.checkpoint),
                    EvaluateHook(
                        build_validation(recipe.evaluate, self.readers, stepper),
                        recipe.evaluate.interval_steps,
                        self.tracker,
                    ),
                    LogHook(recipe.tracking.log_interval_steps, config.type, self.tracker, attempt=runtime.attempt),
                ),
                box=self.box,
            )
            if path is not None:
                # A stage that has not begun takes over the weights of the one before it, and nothing else.
                self.checkpointer.load(path, engine.state_tensors(), only_model=progress.stage_step == 0)
                strategy.weights_changed()
            stopped = engine.run()
        return stopped, engine.progress, checkpoint_path(self.checkpointer.run_dir, engine.progress.step)
