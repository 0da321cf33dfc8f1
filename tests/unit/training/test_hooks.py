"""Policies: when a run saves, evaluates and logs, and what a row says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.support.toy import ToyLoader, ToyStage
from ups.config.schema import CheckpointConfig, EngineConfig
from ups.config.stage import OperatorStageConfig
from ups.distributed.environment import RankEnvironment
from ups.distributed.runtime import Runtime
from ups.distributed.strategies import spread
from ups.plan.operations import OperationTrace
from ups.record.checkpoints import list_checkpoints, read_progress
from ups.training.checkpoint import Checkpointer
from ups.training.engine import Engine, Hook
from ups.training.hooks import EvaluateHook, LogHook, SaveHook, in_order

CONFIG = EngineConfig.model_validate({"device": "cpu", "threads": 1})


class Sink:
    def __init__(self) -> None:
        self.rows: list[Mapping[str, object]] = []

    def log(self, row: Mapping[str, object]) -> None:
        self.rows.append(row)


@pytest.fixture
def engine():  # type: ignore[no-untyped-def]
    with Runtime.start(CONFIG, RankEnvironment()) as runtime:
        loader = ToyLoader(runtime.place)
        yield Engine(
            runtime,
            spread(ToyStage(), runtime, CONFIG),
            loader,
            config=CONFIG,
            length=OperatorStageConfig(steps=7),
        )


def test_a_run_is_saved_at_the_interval_and_at_its_end(engine: Engine, tmp_path: Path) -> None:
    checkpointer = Checkpointer(engine.runtime, tmp_path, keep=10)
    engine.hooks += [SaveHook(checkpointer, CheckpointConfig(interval_steps=3))]
    engine.run()
    assert [step for step, _ in list_checkpoints(tmp_path)] == [7, 6, 3]
    ends = {s: read_progress(p)["progress"]["stage_finished"] for s, p in list_checkpoints(tmp_path)}
    assert ends == {7: True, 6: False, 3: False}


def test_the_last_step_is_saved_once_with_the_average_as_weights(engine: Engine, tmp_path: Path) -> None:
    checkpointer = Checkpointer(engine.runtime, tmp_path, keep=10)
    engine.hooks += [SaveHook(checkpointer, CheckpointConfig(interval_steps=7))]
    engine.run()
    assert [step for step, _ in list_checkpoints(tmp_path)] == [7]
    state = {name: torch.zeros_like(t) for name, t in engine.state_tensors().items()}
    checkpointer.load(list_checkpoints(tmp_path)[0][1], state)
    assert torch.equal(state["model/table"], state["ema/table"])


def test_a_request_to_save_is_granted_between_intervals(engine: Engine, tmp_path: Path) -> None:
    engine.hooks += [SaveHook(Checkpointer(engine.runtime, tmp_path, keep=10), CheckpointConfig(interval_steps=100))]
    engine.stop_requests.ask_to_save()
    engine.run()
    assert [step for step, _ in list_checkpoints(tmp_path)] == [7, 1]


def test_validation_sees_the_average_and_training_goes_on_with_the_weights(engine: Engine) -> None:
    assert engine.ema is not None
    ema, parameters = engine.ema, engine.parameters
    seen: list[bool] = []

    def evaluate(running: Engine) -> Mapping[str, float]:
        seen.append(torch.equal(ema.tensors["table"], parameters["table"]))
        assert not torch.is_grad_enabled()
        assert not running.strategy.module.training
        return {"valid/x": 1.0}

    sink = Sink()
    engine.hooks += [EvaluateHook(evaluate, 3, sink)]
    after: list[bool] = []

    class Look(Hook):
        def after_step(self, running: Engine, agreed: object) -> None:
            after.append(torch.equal(ema.tensors["table"], parameters["table"]))

        def at_end(self, running: Engine) -> None:
            return

    engine.hooks.append(Look())  # type: ignore[arg-type]
    engine.run()
    assert seen == [True, True, True]  # after steps 3 and 6, and at the end
    assert not any(after)
    assert [row["step"] for row in sink.rows] == [3, 6, 7]
    assert engine.strategy.module.training


def test_rows_come_at_the_interval_and_after_the_last_step(engine: Engine) -> None:
    sink = Sink()
    engine.hooks += [LogHook(3, "operator", sink, attempt=2)]
    engine.run()
    assert [row["step"] for row in sink.rows] == [3, 6, 7]
    row = sink.rows[0]
    assert set(row) >= {"stage", "loss", "grad_norm", "learning_rate", "steps_per_second", "windows_per_second"}
    assert set(row) >= {"skipped", "time", "train/line/loss", "train/plane/loss"}
    assert (row["stage_name"], row["stage_steps"], row["attempt"]) == ("operator", 7, 2)
    assert "flops_per_second" not in row


def test_arithmetic_per_second_is_that_of_the_first_step_next_to_the_peak(engine: Engine) -> None:
    sink, trace = Sink(), OperationTrace()
    engine.around_first_step = trace
    engine.hooks += [
        LogHook(3, "operator", sink, flops=lambda: sum(o.flops for o in trace.operations), peak_flops=1e12)
    ]
    engine.run()
    row, (count,) = sink.rows[1], {sum(o.flops for o in trace.operations)}
    assert count > 0
    assert row["flops_per_second"] == pytest.approx(count * row["steps_per_second"])
    assert row["flops_of_peak"] == pytest.approx(row["flops_per_second"] / 1e12)


def test_the_order_is_save_evaluate_log() -> None:
    save, evaluate, log = object(), object(), object()
    assert in_order(save, evaluate, log) == [save, evaluate, log]  # type: ignore[arg-type]
    assert in_order(None, evaluate, None) == [evaluate]  # type: ignore[arg-type]
