"""The training loop, and nothing else: one loop for every stage, on one rank or many.

The engine owns the order of a step, accumulation, clipping, the judgment of non-finite steps and the agreement between
ranks. What is trained is a stage (`stages.py`), how it is spread a strategy, when to save, evaluate and log the hooks.
No rank issues a collective after an error: an exception leaves the loop and the process.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ups.config.schema import EngineConfig
from ups.config.stage import StageLength
from ups.distributed.agreement import OPERATION, Agreement, Status
from ups.distributed.runtime import Runtime
from ups.distributed.strategies import Strategy, autocast, locals_of, weight_dtype
from ups.errors import DataError, TrainingError
from ups.record.blackbox import BlackBox, Phase
from ups.record.identity import note_bad_loss
from ups.spec.batch import Batch
from ups.training import optim
from ups.training.averages import Meters, counted, follow
from ups.training.progress import Budget, Progress, StopRequests
from ups.training.stages import LossModule, pass_measured

COMPILE_SECONDS = 3600.0
# Steps after which the engine reads what gradients were, if no hook asked before.
_MOST_UNREAD = 1000

logger = logging.getLogger(__name__)


class BatchSource(Protocol):
    """A loader: endless micro-batches of this rank, each a group of batches of one task."""

    def batches_in_step(self, step: int) -> int:
        """Micro-batches of an optimizer step on this rank; the same on every rank where each pass is collective."""
        ...

    def windows_in_step(self, step: int) -> int:
        """Windows of an optimizer step over all ranks."""
        ...

    def __iter__(self) -> Iterator[tuple[Batch, ...]]: ...

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@runtime_checkable
class Hook(Protocol):
    """Something done around steps, on all ranks in the same order. A hook overrides what it needs.

    Hooks of plugins (`ups.registry.HOOKS`) are built without arguments, for each stage, and come after ours.
    """

    def before_step(self, engine: Engine) -> None:
        """Before each step; `engine.progress` says how many were done."""
        return

    def after_step(self, engine: Engine, agreed: Status) -> None:
        """After each step."""
        return

    def after_checkpoint(self, engine: Engine) -> None:
        """After a checkpoint was handed over to be written; it may not be complete yet."""
        return

    def at_end(self, engine: Engine) -> None:
        """After the last step of the stage, not after a stop."""
        return


class Engine:
    """Trains one stage from `progress` to its end."""

    def __init__(
        self,
        runtime: Runtime,
        strategy: Strategy,
        loader: BatchSource,
        *,
        config: EngineConfig,
        length: StageLength,
        progress: Progress | None = None,
        stop_requests: StopRequests | None = None,
        hooks: Sequence[Hook] = (),
        box: BlackBox | None = None,
    ) -> None:
        self.runtime, self.strategy, self.loader = runtime, strategy, loader
        assert isinstance(strategy.stage, LossModule)
        self.stage = strategy.stage
        self.config, self.length = config, length
        self.progress = progress or Progress()
        self.stop_requests = stop_requests or StopRequests()
        self.hooks = list(hooks)
        self.box = box or BlackBox.unread()
        self.parameters = optim.trainable(self.stage.named_parameters())
        self.optimizer = optim.build_optimizer(length.optim, self.parameters, self.stage.matrices())
        self.ema = optim.Ema(config.ema, self.parameters) if config.ema.enabled else None
        self.meters = Meters(runtime.device, distributed=runtime.control_group is not None)
        if self.stage.averages is not None:
            self.stage.averages.move_to(runtime.device)
        self._judge = optim.GradientJudge(length.optim)
        # Of the last step that was read.
        self.gradient_norm = 0.0
        self.learning_rate = 0.0
        self.windows = 0  # trained on since this process started, over all ranks
        self._own_finite: list[Tensor] = []  # () for each step that was not read: whether the loss of this rank was
        self._dtype = weight_dtype(config.precision)
        self._compiled: set[tuple[str, str]] = set()
        self.around_first_step: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._begun = False

    def run(self) -> int:
        """Train to the end of the stage; returns 0, or the signal that all ranks agreed to leave with.

        Collective: all ranks. Raises TrainingError when too many steps in a row are not finite. On an accelerator no
        step waits for it: what gradients were is read when a hook or the end asks (`read_gradients`).
        """
        progress = self.progress
        if not progress.total_steps and self.length.steps:
            progress.total_steps = self.length.steps
        self.begin()
        if self.ema is not None and not progress.stage_step:
            self.ema.restart()  # the weights may have come from the stage before, after the average was made
        budget = Budget(self.length, progress.budget_used_seconds, progress.idle_seconds)
        agreement = Agreement(self.runtime.control_group)
        self.box.total_steps = progress.step - progress.stage_step + progress.total_steps
        self.strategy.module.train()
        self.warm_up()
        self.loader.load_state_dict({"step": progress.stage_step})
        batches = iter(self.loader)
        while not progress.total_steps or progress.stage_step < progress.total_steps:
            number = progress.step + 1
            for hook in self.hooks:
                hook.before_step(self)
            self.box.issue(OPERATION, Phase.DATA, number, progress.stage_index)
            agreement.issue(number, self._status(budget))

            self.learning_rate = optim.learning_rate(self.length.optim, progress.done)
            optim.set_learning_rate(self.optimizer, self.learning_rate)
            with self.around_first_step:
                self._update(self._accumulate(batches, number), number)
            self.around_first_step = contextlib.nullcontext()
            progress.stage_step += 1
            progress.step += 1
            if self._judge.num_unread >= _MOST_UNREAD:
                self.read_gradients()

            agreed = agreement.read()
            if self.length.budget_seconds is not None:
                progress.set_length(agreed.elapsed_ppm, agreed.total_steps)
            if self.length.counts_seconds:
                progress.budget_used_seconds = budget.used_seconds
            if self.runtime.device.type == "cpu":  # with a GPU, CPU time does not say how much was computed
                progress.idle_seconds = budget.idle_seconds
            self.box.total_steps = progress.step - progress.stage_step + progress.total_steps
            for hook in self.hooks:
                hook.after_step(self, agreed)
            if agreed.stop:
                self.read_gradients()
                self.stop_requests.ask_to_stop(agreed.stop)
                return agreed.stop

        self.read_gradients()
        self._end()
        return 0

    def _end(self) -> None:
        """What a stage does after its last step, with the average as weights. Collective: all ranks."""
        self.progress.stage_finished = True
        if self.ema is not None:
            self.ema.become_weights()
        self.stage.finish()
        if self.ema is not None:
            self.ema.restart()  # whoever reads the checkpoint takes the average
        self.strategy.weights_changed()
        for hook in self.hooks:
            hook.at_end(self)

    def begin(self) -> None:
        """What a stage does before its first step, once. Collective: all ranks."""
        if self.progress.stage_step or self._begun:
            return
        self._begun = True
        if pass_measured(self.stage, self._first_steps(), self._forward):
            self.loader.load_state_dict({"step": 0})
            self.strategy.weights_changed()  # what begin() writes must reach the shards and not a gathered copy
        self.stage.begin()
        self.strategy.weights_changed()

    def _first_steps(self) -> Iterator[Iterator[tuple[Batch, ...]]]:
        """The batches of each step, from the first step on."""
        self.box.record(Phase.INIT, self.progress.step, self.progress.stage_index, deadline_seconds=COMPILE_SECONDS)
        self.loader.load_state_dict({"step": 0})
        batches = iter(self.loader)
        for step in itertools.count():
            yield (self._next(batches, 0) for _ in range(self.loader.batches_in_step(step)))

    def _forward(self, batches: tuple[Batch, ...]) -> None:
        with autocast(self.precision, self.runtime.device):
            self.strategy.module(batches)

    @property
    def precision(self) -> str:
        """Arithmetic of the step in work: a run in bfloat16 may end in float32."""
        fraction = self.config.float32_fraction
        ends = self.config.precision == "bfloat16" and fraction > 0 and self.progress.done > 1.0 - fraction
        return "float32" if ends else self.config.precision

    def _status(self, budget: Budget) -> Status:
        """What this rank requests and knows; only the first rank's clock counts."""
        elapsed, total = budget.propose(self.progress) if self.runtime.is_first else (0, 0)
        return Status(self.stop_requests.stop, int(self.stop_requests.take_save()), elapsed, total, self.gradient_norm)

    def _accumulate(self, batches: Iterator[tuple[Batch, ...]], number: int) -> Tensor:
        """Gradients of one global batch, summed exactly by the weights of its samples; () whether their norm is
        finite."""
        self.optimizer.zero_grad(set_to_none=True)
        stage, last = self.progress.stage_index, self.loader.batches_in_step(self.progress.stage_step) - 1
        seen: list[dict[str, Tensor]] = []
        totals: list[Tensor] = []
        for index in range(last + 1):
            self.box.record(Phase.DATA, number, stage, batch=index)
            group = self._next(batches, number)
            with self.strategy.micro_batch(is_last=index == last):
                # The first pass of a task compiles: slow for once, and not stuck.
                passes = {(batch.task.name, self.precision) for batch in group}
                slow = COMPILE_SECONDS if self.config.compile and not passes <= self._compiled else 0.0
                self.box.record(Phase.FORWARD, number, stage, batch=index, deadline_seconds=slow)
                with autocast(self.precision, self.runtime.device):
                    losses = self.strategy.module(group)
                if index == last:
                    self.box.issue("reduce(gradients)", Phase.BACKWARD, number, stage, deadline_seconds=slow)
                else:
                    self.box.record(Phase.BACKWARD, number, stage, batch=index, deadline_seconds=slow)
                # Strategies average over ranks; the weights of samples add up to 1 over all of them.
                (losses.total * self.runtime.world_size).backward()
            seen.append(losses.metrics)
            totals.append(losses.total.detach())
            self._compiled |= passes

        self.windows += self.loader.windows_in_step(self.progress.stage_step)
        self.box.issue("gradient_norm", Phase.SYNC, number, stage)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        # Reduced already, so every rank judges the same number and all skip the same step.
        finite = self._judged(gradients)
        self._own_finite.append(torch.stack(totals).sum().isfinite())
        seen = [counted(metrics, finite) for metrics in seen]
        for metrics in seen:
            self.meters.add(metrics)
        averages, distributed = self.stage.averages, self.runtime.control_group is not None
        if averages is not None and distributed:
            self.box.issue("reduce(task_losses)", Phase.SYNC, number, stage)
        follow(averages, seen, distributed)
        return finite

    def _judged(self, gradients: list[Tensor]) -> Tensor:
        """Clip reduced gradients in place; () whether their norm is finite. Collective: all ranks, for fsdp."""
        return self._judge.judge(self.progress, self.strategy.gradient_norm(gradients), locals_of(gradients))

    def read_gradients(self) -> None:
        """Bring `progress` up to date with what gradients were, and name the steps that were skipped.

        Waits for the device. Raises TrainingError when too many steps in a row were not finite.
        """
        in_row, skipped, own = self.progress.skipped_in_row, [], []
        norms = self._judge.read(self.progress)
        first = self.progress.step - len(norms) + 1
        if not all(map(math.isfinite, norms)):
            own = [first + at for at, finite in enumerate(torch.stack(self._own_finite).tolist()) if not finite]
        self._own_finite.clear()
        if own:
            note_bad_loss(self.runtime.rank, self.runtime.world_size, own)
        for step, norm in enumerate(norms, first):
            self.gradient_norm = norm
            if math.isfinite(norm):
                in_row = 0
                continue
            in_row += 1
            skipped.append(str(step))
            if in_row >= self.config.max_skipped_steps:
                raise TrainingError(
                    f"{in_row} steps in a row had a gradient norm that is not finite, the last at step {step}",
                    hint="lower stages.optim.learning_rate, set engine.precision=float32, or check the data for NaN",
                )
        if skipped:
            logger.warning("left out steps whose gradient norm was not finite: %s", ", ".join(skipped))

    def _next(self, batches: Iterator[tuple[Batch, ...]], number: int) -> tuple[Batch, ...]:
        """The next micro-batch. A loader has no end; one that ends has another number of batches than its peers."""
        try:
            device, dtype = self.runtime.device, self._dtype
            return tuple(batch.to(device, dtype, non_blocking=True) for batch in next(batches))
        except StopIteration:
            raise DataError(
                f"the loader of rank {self.runtime.rank} ended at step {number}, and other ranks may have more batches",
                hint="every rank must get the same number of batches: a loader repeats its data and never ends",
            ) from None

    def _update(self, finite: Tensor, number: int) -> None:
        self.box.record(Phase.OPTIMIZER, number, self.progress.stage_index)
        optim.update(self.optimizer, finite)
        if self.ema is not None:
            self.ema.update(self.progress.stage_step + 1)

    def warm_up(self) -> None:
        """Run one pass whose gradients are thrown away, where the strategy's first reduction differs from later ones.

        Always on the batch of step 0, so that a resumed process lays its reductions out like an uninterrupted one.
        """
        if not self.strategy.needs_warm_up:
            return
        self.box.record(Phase.INIT, self.progress.step, self.progress.stage_index, deadline_seconds=COMPILE_SECONDS)
        self.loader.load_state_dict({"step": 0})
        group = self._next(iter(self.loader), 0)
        with autocast(self.precision, self.runtime.device):
            self.strategy.module(group).total.backward()
        self.optimizer.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """The live tensors that a checkpoint holds; loading into them restores the engine."""
        model = {f"model/{n}": p.detach() for n, p in self.stage.named_parameters()}
        optimizer = optim.optimizer_tensors(self.optimizer, self.parameters)
        averages = self.ema.tensors if self.ema is not None else {}
        tasks = self.stage.averages
        return (
            model
            | {f"optimizer/{n}": t for n, t in optimizer.items()}
            | {f"ema/{n}": t for n, t in averages.items()}
            | ({"stage/task_averages": tasks.values} if tasks is not None else {})
        )
