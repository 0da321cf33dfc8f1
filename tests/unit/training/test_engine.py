"""The loop on one rank: the same numbers as a bare loop, steps judged, hooks in order, budgets kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.toy import ToyLoader, ToyStage
from ups.config.schema import EngineConfig
from ups.config.stage import OperatorStageConfig
from ups.distributed.agreement import Status
from ups.distributed.environment import RankEnvironment
from ups.distributed.runtime import Runtime
from ups.distributed.strategies import spread
from ups.errors import TrainingError
from ups.record.blackbox import BlackBox, Phase
from ups.training.engine import Engine, Hook
from ups.training.progress import Budget, Progress

PLAIN = {"device": "cpu", "threads": 1, "ema": {"enabled": False}}


def build(
    runtime: Runtime, *, micro_batch_size: int | None = None, engine: dict[str, Any] | None = None, **length: Any
) -> Engine:
    config = EngineConfig.model_validate(PLAIN | (engine or {}))
    loader = ToyLoader(runtime.place, micro_batch_size=micro_batch_size)
    stage_length = OperatorStageConfig.model_validate({"steps": 4} | length)
    strategy = spread(ToyStage(), runtime, config)
    return Engine(runtime, strategy, loader, config=config, length=stage_length)


@pytest.fixture
def runtime():  # type: ignore[no-untyped-def]
    with Runtime.start(EngineConfig.model_validate(PLAIN), RankEnvironment()) as runtime:
        yield runtime


def flat(engine: Engine) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in engine.strategy.stage.parameters()])


def test_the_engine_is_a_plain_loop_with_exact_averaging(runtime: Runtime) -> None:
    optim = {"type": "sgd", "learning_rate": 0.05, "beta1": 0.0, "weight_decay": 0.0, "clip_norm": 0.5}
    engine = build(runtime, optim=optim | {"warmup_fraction": 0.0, "final_fraction": 1.0})
    stage = ToyStage()
    loader = ToyLoader(runtime.place)
    batches = iter(loader)
    for _ in range(4):
        stage.zero_grad()
        sum(stage(next(batches)).total for _ in range(2)).backward()
        torch.nn.utils.clip_grad_norm_(stage.parameters(), 0.5)
        with torch.no_grad():
            for p in stage.parameters():
                assert p.grad is not None
                p -= 0.05 * p.grad
    assert engine.run() == 0
    bare = torch.cat([p.detach().flatten().double() for p in stage.parameters()])
    assert float((flat(engine) - bare).norm() / bare.norm()) < 1e-7


def test_micro_batches_do_not_change_the_result(runtime: Runtime) -> None:
    whole, cut = build(runtime), build(runtime, micro_batch_size=2)
    whole.run()
    cut.run()
    assert float((flat(whole) - flat(cut)).norm() / flat(whole).norm()) < 1e-6
    assert cut.loader.batches_in_step(0) == 4 * whole.loader.batches_in_step(0)


def test_recomputed_activations_do_not_change_the_result(runtime: Runtime) -> None:
    plain, recomputed = build(runtime), build(runtime, engine={"activation_checkpointing": True})
    plain.run()
    recomputed.run()
    assert torch.equal(flat(plain), flat(recomputed))


def test_bfloat16_keeps_float32_weights_and_learns(runtime: Runtime) -> None:
    engine = build(runtime, engine={"precision": "bfloat16"}, steps=20, optim={"learning_rate": 1e-2})
    losses = record_losses(engine)
    engine.run()
    assert {p.dtype for p in engine.strategy.stage.parameters()} == {torch.float32}
    assert losses[-1] < 0.5 * losses[0]


def record_losses(engine: Engine) -> list[float]:
    losses: list[float] = []
    engine.hooks.append(Do(lambda e, _: losses.append(e.meters.reduce().get("loss", math.nan))))
    return losses


class Do(Hook):
    """A hook made of functions."""

    def __init__(
        self, step: Callable[[Engine, Status], Any] | None = None, end: Callable[[Engine], Any] | None = None
    ) -> None:
        self._step, self._end = step, end

    def after_step(self, engine: Engine, agreed: Status) -> None:
        if self._step is not None:
            self._step(engine, agreed)

    def at_end(self, engine: Engine) -> None:
        if self._end is not None:
            self._end(engine)


def test_a_step_that_is_not_finite_changes_nothing_but_the_count(runtime: Runtime) -> None:
    engine = build(runtime)
    stage = engine.strategy.stage
    assert isinstance(stage, ToyStage)
    stage.hurt = lambda batch: math.inf if batch.stage_step == 2 else 1.0
    seen: list[torch.Tensor] = []
    engine.hooks.append(Do(lambda e, _: seen.append(flat(e))))
    losses = record_losses(engine)
    engine.run()
    assert torch.equal(seen[1], seen[2])
    assert not torch.equal(seen[2], seen[3])
    assert math.isnan(losses[2])
    assert (engine.progress.skipped, engine.progress.skipped_in_row, engine.progress.updates) == (1, 0, 3)


def test_too_many_steps_in_a_row_that_are_not_finite_stop_the_run(runtime: Runtime) -> None:
    engine = build(runtime, engine={"max_skipped_steps": 2}, steps=9)
    stage = engine.strategy.stage
    assert isinstance(stage, ToyStage)
    stage.hurt = lambda batch: math.nan if batch.stage_step in (1, 3, 4) else 1.0
    with pytest.raises(TrainingError, match=r"2 steps in a row .* at step 5"):
        engine.run()


def test_hooks_run_in_order_after_every_step_and_once_at_the_end(runtime: Runtime) -> None:
    engine = build(runtime, steps=2)
    seen: list[str] = []
    engine.hooks += [
        Do(lambda e, _: seen.append("first"), lambda e: seen.append("first end")),
        Do(lambda e, _: seen.append("second"), lambda e: seen.append("second end")),
    ]
    engine.run()
    assert seen == ["first", "second"] * 2 + ["first end", "second end"]


def test_a_request_to_stop_ends_the_loop_after_a_whole_step(runtime: Runtime) -> None:
    engine = build(runtime, steps=9)
    ends: list[str] = []
    engine.hooks.append(
        Do(lambda e, _: e.progress.step == 3 and e.stop_requests.ask_to_stop(15), lambda e: ends.append("end"))
    )
    assert engine.run() == 15
    assert engine.progress.step == 4
    assert not engine.progress.stage_finished
    assert ends == []


def test_the_average_is_the_product_of_a_stage(runtime: Runtime) -> None:
    engine = build(runtime, engine={"ema": {"enabled": True, "decay": 0.5}})
    before: list[torch.Tensor] = []
    engine.hooks.append(Do(lambda e, _: before.append(flat(e))))
    engine.run()
    assert engine.ema is not None
    averages = torch.cat([t.flatten().double() for t in engine.ema.tensors.values()])
    assert torch.equal(averages, flat(engine))
    assert not torch.equal(before[-1], flat(engine))


def test_a_time_budget_fixes_the_length_and_the_schedule_runs_to_its_end(runtime: Runtime) -> None:
    engine = build(runtime, steps=None, budget_seconds=1.0, optim={"learning_rate": 1.0, "clip_norm": 1e-9})
    rates: list[float] = []
    engine.hooks.append(Do(lambda e, _: rates.append(e.learning_rate)))
    engine.run()
    progress = engine.progress
    assert progress.stage_step == progress.total_steps == len(rates) > 5
    assert 0.3 < progress.budget_used_seconds < 5
    assert rates[-1] < 0.05
    assert max(rates) <= 1.0


def test_a_resumed_budget_keeps_the_number_of_steps(runtime: Runtime) -> None:
    engine = build(runtime, steps=None, budget_seconds=1e6)
    engine.progress = Progress(stage_step=3, step=3, total_steps=5)
    engine.run()
    assert engine.progress.stage_step == 5


class Log(BlackBox):
    phases: list[Phase]

    def record(self, phase: Phase, step: int, *args: Any, **options: Any) -> None:
        self.phases.append(phase)

    def issue(self, operation: str, phase: Phase, step: int, *args: Any, **options: Any) -> None:
        self.phases.append(phase)


def test_the_black_box_sees_every_phase_of_a_step(runtime: Runtime) -> None:
    engine = build(runtime, steps=1)
    box = engine.box = Log.unread()
    box.phases = []
    engine.run()
    one = [Phase.DATA, Phase.FORWARD, Phase.BACKWARD]
    assert box.phases == [Phase.DATA, *one, *one, Phase.SYNC, Phase.OPTIMIZER]


def test_the_mean_norm_goes_on_after_a_resume_and_stands_still_in_a_skipped_step(runtime: Runtime) -> None:
    optim = {"clip_norm": 0.0, "clip_ratio": 2.0}
    whole = build(runtime, steps=26, optim=optim)
    whole.run()
    assert whole.progress.mean_norm > 0
    first = build(runtime, steps=26, optim=optim)
    stop_at = 23

    class Enough(Exception):
        pass

    class Stop(Hook):
        def after_step(self, engine: Engine, agreed: Status) -> None:
            if engine.progress.stage_step == stop_at:
                engine.read_gradients()
                raise Enough

        def at_end(self, engine: Engine) -> None:
            return

    first.hooks.append(Stop())
    with pytest.raises(Enough):
        first.run()
    second = build(runtime, steps=26, optim=optim)
    kept = first.state_tensors()
    with torch.no_grad():
        for name, tensor in second.state_tensors().items():
            tensor.copy_(kept[name])
    second.progress = Progress.from_json(first.progress.to_json())
    second.run()
    assert second.progress == whole.progress
    assert torch.equal(flat(second), flat(whole))

    broken = build(runtime, steps=2, optim=optim)
    broken.strategy.stage.hurt = lambda batch: float("nan") if batch.stage_step == 1 else 1.0
    norms: list[float] = []

    class Watch(Hook):
        def after_step(self, engine: Engine, agreed: Status) -> None:
            engine.read_gradients()
            norms.append(engine.progress.mean_norm)

        def at_end(self, engine: Engine) -> None:
            return

    broken.hooks.append(Watch())
    broken.run()
    assert broken.progress.skipped == 1
    assert norms[0] == norms[1] > 0


def test_a_resumed_budget_takes_the_same_steps_where_the_same_was_agreed_on(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    # (part used, new length) at the start of a step, by the number of steps that are done
    script = {0: (0, 0), 1: (20_000, 0), 2: (50_000, 0), 3: (80_000, 12), 7: (400_000, 20), 11: (700_000, 15)}
    monkeypatch.setattr(Budget, "propose", lambda self, progress: script.get(progress.stage_step, (0, 0)))

    class Enough(Exception):
        pass

    def trained(progress: Progress | None = None, start: Engine | None = None, stop_at: int = 0) -> Engine:
        def leave(engine: Engine, _: Status) -> None:
            if engine.progress.stage_step == stop_at:
                engine.read_gradients()
                raise Enough

        engine = build(runtime, steps=None, budget_seconds=1e6)
        if start is not None and progress is not None:
            kept = start.state_tensors()
            with torch.no_grad():
                for name, tensor in engine.state_tensors().items():
                    tensor.copy_(kept[name])
            engine.progress = Progress.from_json(progress.to_json())
        engine.hooks.append(Do(lambda e, _: rates.append(e.learning_rate)))
        if stop_at:
            engine.hooks.append(Do(leave))
            with pytest.raises(Enough):
                engine.run()
        else:
            engine.run()
        return engine

    rates: list[float] = []
    whole = trained()
    assert whole.progress.stage_step == whole.progress.total_steps == 15
    expected = rates.copy()
    for stop_at in (2, 4, 8, 9):
        rates.clear()
        first = trained(stop_at=stop_at)
        second = trained(first.progress, first)
        assert rates == expected
        assert torch.equal(flat(second), flat(whole))
        clocks = {"budget_used_seconds": 0.0, "idle_seconds": 0.0}
        assert replace(second.progress, **clocks) == replace(whole.progress, **clocks)


def test_the_last_part_of_a_stage_may_run_in_float32(runtime: Runtime) -> None:
    def trained(fraction: float, precision: str = "bfloat16") -> tuple[list[str], torch.Tensor]:
        engine = build(runtime, steps=8, engine={"precision": precision, "float32_fraction": fraction})
        seen: list[str] = []
        forward = engine.strategy.stage.forward

        def watched(batch: Any) -> Any:
            seen.append("bfloat16" if torch.is_autocast_enabled("cpu") else "float32")
            return forward(batch)

        engine.strategy.stage.forward = watched  # type: ignore[method-assign]
        engine.run()
        return seen[::2], flat(engine)

    assert trained(0.25)[0] == ["bfloat16"] * 6 + ["float32"] * 2
    assert trained(0.0)[0] == ["bfloat16"] * 8
    whole, weights = trained(1.0)
    assert whole == ["float32"] * 8
    assert torch.equal(weights, trained(0.0, "float32")[1])
