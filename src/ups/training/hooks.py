"""When to save, evaluate and log. The mechanisms are elsewhere; the order is fixed here, the same on all ranks.

Save comes first, so that an evaluation that fails costs no trained step; log comes last, so that a row says what the
other two did.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from ups.config.schema import CheckpointConfig
from ups.distributed.agreement import Status
from ups.errors import PluginError
from ups.record.blackbox import Phase
from ups.registry import HOOKS
from ups.training.checkpoint import Checkpointer
from ups.training.engine import Engine, Hook

Evaluate = Callable[[Engine], Mapping[str, float]]
SAVE_DEADLINE_SECONDS = 3600.0
EVALUATE_DEADLINE_SECONDS = 3600.0


class RowSink(Protocol):
    """Takes rows of metrics; see `ups.tracking.metrics_file`."""

    def log(self, row: Mapping[str, object]) -> None: ...


class SaveHook(Hook):
    """Saves at the interval, when the ranks agreed to save or leave, and at the end of a stage."""

    def __init__(self, checkpointer: Checkpointer, config: CheckpointConfig) -> None:
        self._checkpointer = checkpointer
        self._interval = config.interval_steps

    def after_step(self, engine: Engine, agreed: Status) -> None:
        progress = engine.progress
        if progress.total_steps and progress.stage_step >= progress.total_steps and not agreed.stop:
            return  # at_end saves this step, with the average as weights
        if agreed.stop or agreed.save or progress.stage_step % self._interval == 0:
            self._save(engine, wait=bool(agreed.stop))

    def at_end(self, engine: Engine) -> None:
        self._save(engine, wait=True)

    def _save(self, engine: Engine, *, wait: bool) -> None:
        progress = engine.progress
        # The loop only hands a save over and is back at once; the last one of a stage is waited for. What a save really
        # takes is therefore told: otherwise the last one would look slow compared with the others.
        engine.box.issue(
            "save",
            Phase.SAVE,
            progress.step,
            progress.stage_index,
            deadline_seconds=SAVE_DEADLINE_SECONDS,
            usual_seconds=self._checkpointer.longest_seconds,
        )
        engine.read_gradients()
        save = self._checkpointer.save_now if wait else self._checkpointer.save
        save(engine.state_tensors(), progress)
        for hook in engine.hooks:
            hook.after_checkpoint(engine)


class EvaluateHook(Hook):
    """Runs a validation with the averaged weights, at the interval and at the end of a stage."""

    def __init__(self, evaluate: Evaluate, interval_steps: int | None, sink: RowSink | None) -> None:
        self._evaluate = evaluate
        self._interval = interval_steps
        self._sink = sink

    def after_step(self, engine: Engine, agreed: Status) -> None:
        progress = engine.progress
        last = bool(progress.total_steps) and progress.stage_step >= progress.total_steps
        if self._interval and progress.stage_step % self._interval == 0 and not last and not agreed.stop:
            if engine.ema is None:
                self._run(engine)
            else:
                with engine.ema.in_place():
                    engine.strategy.weights_changed()
                    self._run(engine)
                engine.strategy.weights_changed()

    def at_end(self, engine: Engine) -> None:
        self._run(engine)

    def _run(self, engine: Engine) -> None:
        progress = engine.progress
        engine.box.issue(
            "evaluate", Phase.EVALUATE, progress.step, progress.stage_index, deadline_seconds=EVALUATE_DEADLINE_SECONDS
        )
        module = engine.strategy.module
        module.eval()
        with torch.no_grad(), engine.strategy.whole():
            scores = self._evaluate(engine)
        module.train()
        if self._sink is not None:
            self._sink.log({"step": progress.step, "stage": progress.stage_index, **scores, "time": time.time()})


class LogHook(Hook):
    """Writes a row of metrics at the interval, at a stop and after the last step. Only rank 0 has a sink.

    flops: arithmetic of a step, of all ranks, known after the first one; 0: not counted. peak_flops: of all devices a
    second, 0: not known.
    """

    def __init__(
        self,
        interval_steps: int,
        stage_name: str,
        sink: RowSink | None,
        *,
        attempt: int = 0,
        flops: Callable[[], float] = float,
        peak_flops: float = 0.0,
    ) -> None:
        self._interval = interval_steps
        self._stage_name = stage_name
        self._sink = sink
        self._attempt, self._flops, self._peak_flops = attempt, flops, peak_flops
        self._since: tuple[int, int, float] | None = None  # step, windows, time of the last row

    def after_step(self, engine: Engine, agreed: Status) -> None:
        progress = engine.progress
        if self._since is None:
            # The first step of a process warms up: it would spoil the first rate.
            self._since = (progress.step, engine.windows, time.monotonic())
        last = bool(progress.total_steps) and progress.stage_step >= progress.total_steps
        if progress.stage_step % self._interval == 0 or last or agreed.stop:
            self._row(engine)

    def _row(self, engine: Engine) -> None:
        progress = engine.progress
        engine.box.issue("reduce(metrics)", Phase.SYNC, progress.step, progress.stage_index)
        means = engine.meters.reduce()
        engine.read_gradients()
        engine.box.loss = means.get("loss", float("nan"))
        now = time.monotonic()
        step, windows, since = self._since or (progress.step, engine.windows, now)
        seconds = now - since if progress.step > step and now > since else math.inf
        self._since = (progress.step, engine.windows, now)
        if self._sink is None:
            return
        flops = self._flops() * (progress.step - step) / seconds
        self._sink.log(
            {
                "step": progress.step,
                "stage": progress.stage_index,
                "stage_name": self._stage_name,
                "stage_step": progress.stage_step,
                "stage_steps": progress.total_steps,
                **means,
                "grad_norm": engine.gradient_norm,
                "learning_rate": engine.learning_rate,
                "steps_per_second": (progress.step - step) / seconds,
                "windows_per_second": (engine.windows - windows) / seconds,
                **({"flops_per_second": flops} if flops else {}),
                **({"flops_of_peak": flops / self._peak_flops} if flops and self._peak_flops else {}),
                "skipped": progress.skipped,
                "peak_memory_mib": peak_memory_mib(engine.runtime.device),
                "attempt": self._attempt,
                "time": time.time(),
            }
        )


def peak_memory_mib(device: torch.device) -> float:
    """The most memory that this process has held so far: on the device if that has its own, else in the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def named_hooks(names: Sequence[str]) -> list[Hook]:
    """The hooks of plugins that a recipe names (`engine.hooks`)."""
    hooks = [HOOKS.factory(name)() for name in names]
    for name, hook in zip(names, hooks, strict=True):
        if not isinstance(hook, Hook):
            raise PluginError(
                f"hook '{name}' of {HOOKS.origin(name)} is a {type(hook).__name__}, not a Hook",
                hint="derive it from ups.training.engine.Hook",
            )
    return hooks


def in_order(save: SaveHook | None, evaluate: EvaluateHook | None, log: LogHook | None) -> Sequence[Hook]:
    """The hooks of a run: save, evaluate, log."""
    return [hook for hook in (save, evaluate, log) if hook is not None]
