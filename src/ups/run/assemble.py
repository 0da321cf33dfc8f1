"""The stages of a run inside one rank: each is put together (model, strategy, loader, engine), validated and trained.

`run_stages` is the same for a supervised rank and for `ups.fit`; `assemble` also serves the doctor and the tests, so
that what is checked is what trains. Every stage starts from the checkpoint before it, its own or the last one of the
previous stage: sharded weights need not be taken apart in memory between stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ups.config.schema import DataConfig, EvaluateConfig, Recipe
from ups.data.latent_cache import CacheKey, open_cache
from ups.data.loader import Loader, build_loader
from ups.data.normalize import ensure_statistics
from ups.data.open import check_conserved, open_tasks
from ups.distributed.environment import RankEnvironment
from ups.distributed.runtime import Runtime
from ups.distributed.strategies import Strategy, autocast, spread, weight_dtype
from ups.errors import CheckpointError, ConfigError
from ups.evaluation.ensemble import score_ensemble
from ups.evaluation.results import trajectory_means
from ups.evaluation.rollout import RolloutPlan, mean_field, score_task
from ups.formats.base import Reader
from ups.models.build import build_model
from ups.models.ensemble import FlowMembers, has_members, members_of
from ups.models.flow import FLOW, STUDENT, trained_flow
from ups.models.stepper import Predictor, Stepper, TrainingMean, persistence
from ups.plan.devices import known_devices, row_of
from ups.plan.operations import OperationTrace
from ups.record.blackbox import BlackBox
from ups.record.checkpoints import read_progress
from ups.record.failure import Recorder
from ups.record.identity import RunIdentity
from ups.record.run_dir import RunDir
from ups.run.directory import check_start, earlier_stage, read_statistics
from ups.run.warm_start import take_weights
from ups.spec.batch import RankInfo
from ups.spec.keyed import key_of
from ups.spec.statistics import Statistics
from ups.tracking.metrics_file import MetricsWriter
from ups.training.checkpoint import Checkpointer
from ups.training.engine import Engine, Hook
from ups.training.hooks import EvaluateHook, LogHook, SaveHook, in_order, named_hooks
from ups.training.progress import Progress, StopRequests
from ups.training.stages import Stage, build_stage


@dataclass(frozen=True)
class OpenData:
    """Readers of a recipe's tasks in their order, and statistics by task."""

    readers: Sequence[Reader]
    statistics: Mapping[str, Statistics]

    def readers_of(self, recipe: Recipe, data: DataConfig) -> list[Reader]:
        """Those of the tasks of one stage, in their order."""
        names = {task.name for task in data.tasks}
        return [r for r, task in zip(self.readers, recipe.data.tasks, strict=True) if task.name in names]


@dataclass(frozen=True)
class Assembled:
    """One stage of a run, ready to train."""

    stepper: Stepper
    stage: Stage
    strategy: Strategy
    loader: Loader
    engine: Engine


@contextlib.contextmanager
def open_data(recipe: Recipe) -> Iterator[OpenData]:
    """Readers and statistics without a run directory; a task that was never measured is measured now."""
    tasks = recipe.data.tasks
    with open_tasks(recipe.data) as readers:
        statistics = {r.task.name: ensure_statistics(r, t.paths) for r, t in zip(readers, tasks, strict=True)}
        yield OpenData(readers, statistics)


def bare_stage(recipe: Recipe, opened: OpenData, index: int, device: str = "cpu") -> tuple[Stepper, Stage]:
    """Model and stage `index` as every rank builds them; device 'meta' needs no memory."""
    tasks = [reader.task for reader in opened.readers]
    for reader in opened.readers:
        check_conserved(recipe.model, reader)
    stepper = build_model(
        recipe.network_configs,
        tasks,
        opened.statistics,
        recipe.data.context_frames,
        seed=recipe.run.seed,
        device=device,
    )
    stage = build_stage(recipe.stages[index], stepper, recipe.run.seed)
    for reader in opened.readers_of(recipe, recipe.data_of(index)):
        if not stage.takes(reader.task):
            kind = "is steady" if reader.task.steady else "changes in time"
            raise ConfigError(
                f"stages.{index}: '{recipe.stages[index].type}' does not train task '{reader.task.name}', which {kind}",
                hint=f"name the tasks that it trains: stages.{index}.tasks",
            )
    return stepper, stage


def stage_loader(
    recipe: Recipe, opened: OpenData, rank_info: RankInfo, index: int, stage: Stage, *, together: bool = False
) -> Loader:
    """The loader of one rank for stage `index`; with a cache, which is checked, fields are read only if they count.

    together: all ranks go through the same micro-batches, as they also do under fsdp.
    """
    data, config, cache = recipe.data_of(index), recipe.stages[index], None
    readers = opened.readers_of(recipe, data)
    if config.cache_place:
        decodes = bool(getattr(config, "decode_weight", 1.0))
        cache = open_cache(config.cache_place, readers, cache_key(recipe, opened, index), with_fields=decodes)
    return build_loader(
        data,
        readers,
        rank_info,
        seed=key_of(recipe.run.seed, "stage", index) >> 1,
        window_frames=stage.window_frames(recipe.data.context_frames),
        micro_batch_size=recipe.engine.fixed_micro_batch_size,
        grouped=recipe.model.groups_tasks,
        together=together or recipe.engine.strategy == "fsdp",
        array_source=cache,
    )


def cache_key(recipe: Recipe, opened: OpenData, index: int, *, dtype: str = "", encoder: str = "") -> CacheKey:
    """What decides the latents that stage `index` reads; the weights of the encoder only where they are given."""
    return CacheKey.of(
        opened.readers,
        opened.statistics,
        dtype=dtype or str(getattr(recipe.stages[index], "cache_dtype", "float32")),
        model=recipe.model.encoder_settings,
        context_frames=recipe.data.context_frames,
        encoder=encoder,
    )


@contextlib.contextmanager
def assemble(
    recipe: Recipe,
    opened: OpenData,
    runtime: Runtime,
    progress: Progress,
    *,
    hooks: Sequence[Hook] = (),
    stop_requests: StopRequests | None = None,
    box: BlackBox | None = None,
    change: Callable[[Stage], None] | None = None,
) -> Iterator[Assembled]:
    """Stage `progress.stage_index` on this rank, standing at `progress`. Collective: all ranks.

    change: called with the stage before it is spread over the ranks.
    """
    index = progress.stage_index
    stepper, stage = bare_stage(recipe, opened, index)
    if change is not None:
        change(stage)
    strategy = spread(stage, runtime, recipe.engine)
    with stage_loader(recipe, opened, runtime.place, index, stage) as loader:
        engine = Engine(
            runtime,
            strategy,
            loader,
            config=recipe.engine,
            length=recipe.stages[index],
            progress=progress,
            stop_requests=stop_requests,
            hooks=hooks,
            box=box,
        )
        yield Assembled(stepper, stage, strategy, loader, engine)


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
        path, progress = checkpointer.find() or (None, Progress())
        if path is not None and progress.stage_index == len(recipe.stages) - 1 and _by_another_recipe(path, identity):
            progress = progress.lengthened(recipe.stages[-1])
        progress.check([stage.steps for stage in recipe.stages])
        # A later stage may start from the last checkpoint of an earlier one, in this run or when it is trained alone.
        needed = range(len(recipe.stages) - 1)
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
            recipe, self.opened, runtime, progress, stop_requests=self.stop_requests, box=self.box, change=change
        ) as parts:
            parts.loader.start()
            engine, stage_type = parts.engine, recipe.stages[index].type
            members = recipe.stages[index].num_members
            validate = build_validation(recipe.evaluate, self.opened.readers, parts.stepper, members)
            flops, peak = _arithmetic(engine) if self.metrics is not None else (float, 0.0)
            engine.hooks += in_order(
                SaveHook(self.checkpointer, recipe.checkpoint),
                EvaluateHook(validate, recipe.evaluate.interval_steps, self.metrics),
                LogHook(
                    recipe.tracking.log_interval_steps,
                    stage_type,
                    self.metrics,
                    attempt=runtime.attempt,
                    flops=flops,
                    peak_flops=peak,
                ),
            )
            engine.hooks += named_hooks(recipe.engine.hooks)
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
        checkpoint = self.checkpointer.find_end(index)
        if checkpoint is None:
            raise CheckpointError(
                f"the checkpoint with which stage {index} ended is gone, and a later stage starts from it",
                hint="bring it back, or start a new run: --set run.dir=PATH",
            )
        return checkpoint[1]


MODEL = "one_step"
# Of members together, of those of the corrector that a student learns from, and without members.
CRPS, TEACHER, CENTER = "crps", "crps_teacher", "absolute_error"


def _arithmetic(engine: Engine) -> tuple[Callable[[], float], float]:
    """Floating point operations of a step of all ranks, counted in the first one; and of all devices a second, 0 if
    that is not known."""
    if engine.config.compile:  # compiled code does not show its operations
        return float, 0.0
    trace, world, device = OperationTrace(), engine.runtime.world_size, engine.runtime.device
    engine.around_first_step = trace
    row = row_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    peak = known_devices()[row][engine.config.precision] or 0.0 if row else 0.0
    return lambda: world * sum(one.flops for one in trace.operations), world * 1e12 * peak


def build_validation(
    config: EvaluateConfig, readers: Sequence[Reader], stepper: Stepper, members: int = 0
) -> Callable[[Engine], Mapping[str, float]]:
    """A validation of `stepper` on the valid split of each task that has one. Collective: all ranks call it together.

    Per task: `valid/<task>/one_step`, the error of every frame predicted from the true ones before it, relative to the
    RMS of the trajectory, and the same of the references (see `_bar`); `better_on` of `trajectories`: on how many the
    model is better than the best of them. With `members`, for a stage that trains what has some: `crps` of them, next
    to `absolute_error`, the same score without members (one_step is of that too), and to that of a student's teacher.
    """
    context = stepper.context_frames
    held_out = []
    for reader in readers:
        frames = reader.frames_of("valid")
        if reader.splits.get("valid", 0) > 0 and (reader.task.steady or frames is None or frames.max() > context):
            held_out.append(reader)
    plans = {reader.task.name: RolloutPlan.whole(reader, context, split="valid") for reader in held_out}
    bars: dict[str, dict[str, Predictor]] = {}  # filled at the first validation: a mean takes reading

    def validate(engine: Engine) -> Mapping[str, float]:
        device = engine.runtime.device
        rows: dict[str, tuple[float, float, float]] = {}  # metric -> sum over trajectories, wins, their number
        for reader in held_out:
            task = reader.task.name
            if task not in bars:
                bars[task] = _bar(reader, stepper)
            predictors: dict[str, Predictor] = {MODEL: stepper, **bars[task]}
            rank_info, plan = engine.runtime.place, plans[task]
            common: dict[str, Any] = {
                "split": "valid",
                "max_trajectories": config.max_trajectories,
                "device": device,
                "dtype": weight_dtype(engine.config.precision),
                "kind": "one_step",
            }
            with autocast(engine.precision, device):
                scores = score_task(predictors, reader, rank_info, plan, **common)
                for name, total, count in _members(stepper, reader, rank_info, plan, members, **common):
                    rows[f"valid/{task}/{name}"] = (total, 0.0, count)
            ours = trajectory_means(scores[MODEL].rows)
            for name in predictors:
                theirs = trajectory_means(scores[name].rows)
                # not by rounding alone: who wins must not depend on the number of ranks
                wins = float(sum(ours[t] < error * (1 - 1e-6) for t, error in theirs.items()))
                rows[f"valid/{task}/{name}"] = (sum(theirs.values()), wins, float(len(theirs)))
        packed = torch.tensor(list(rows.values()), dtype=torch.float64, device=device).reshape(-1, 3)  # (N, 3)
        if engine.runtime.control_group is not None:
            dist.all_reduce(packed)
        means = dict(zip(rows, (packed[:, 0] / packed[:, 2]).tolist(), strict=True))
        wins_and_counts = dict(zip(rows, packed[:, 1:].tolist(), strict=True))
        metrics: dict[str, float] = {}
        for task, bar in bars.items():
            shown = (MODEL, CRPS, TEACHER, CENTER, *bar)
            metrics |= {key: means[key] for name in shown if (key := f"valid/{task}/{name}") in means}
            best = min((f"valid/{task}/{name}" for name in bar), key=lambda name: means[name])
            won, scored = wins_and_counts[best]
            metrics |= {f"valid/{task}/better_on": won, f"valid/{task}/trajectories": scored}
        return metrics

    return validate


def _members(
    stepper: Stepper, reader: Reader, rank_info: RankInfo, plan: RolloutPlan, members: int, **common: Any
) -> Iterator[tuple[str, float, float]]:
    """Name, sum and number of each score of `members` members on this rank; nothing without members."""
    flow = trained_flow(stepper, reader.task)
    if not members or not has_members(stepper, reader.task):
        return
    means = score_ensemble(members_of(stepper, reader.task, members), reader, rank_info, plan, **common).means
    for name in (CRPS, CENTER):
        yield name, sum(means[name].values()), float(len(means[name]))
    if flow == STUDENT:
        teacher = FlowMembers(stepper, members, 0, FLOW)
        errors = score_ensemble(teacher, reader, rank_info, plan, **common).means[CRPS]
        yield TEACHER, sum(errors.values()), float(len(errors))


def _bar(reader: Reader, stepper: Stepper) -> dict[str, Predictor]:
    """What a trained model must beat on this task, under the names of their metrics.

    The training mean of each channel is known; that of each point, which `ups eval` takes, needs reading, and is worth
    it where it is the only reference.
    """
    task = reader.task
    if task.steady:
        return {"training_mean": TrainingMean({task.name: mean_field(reader, max_trajectories=64)})}
    mean = torch.tensor(stepper.statistics[task.name].state_mean, dtype=torch.float64)
    field = mean.reshape(-1, *[1] * task.num_spatial_dims).expand(-1, *reader.space)  # (C, *S)
    return {"persistence": persistence, "training_mean": TrainingMean({task.name: field})}
