"""One small training run on the toy stage, for every test that needs one: in ranks or in the test process."""

from __future__ import annotations

import hashlib
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.support.toy import ToyLoader, ToyStage
from ups.config.schema import CheckpointConfig, EngineConfig
from ups.config.stage import OperatorStageConfig
from ups.distributed.agreement import Status
from ups.distributed.runtime import Runtime
from ups.distributed.strategies import gathered, spread
from ups.training.checkpoint import Checkpointer
from ups.training.engine import Engine, Hook
from ups.training.hooks import SaveHook
from ups.training.progress import StopRequests


@dataclass
class Trial:
    """What a run varies; plain values, so that it travels to a rank as JSON."""

    strategy: str = "auto"
    precision: str = "float32"
    float32_fraction: float = 0.0
    optimizer: str = "adamw"
    micro_batch_size: int | None = None
    steps: int = 6
    run_dir: str = ""
    interval: int = 2
    asynchronous: bool = True
    batch_size: int = 8
    max_skipped_steps: int = 20
    learning_rate: float = 1e-2
    ema: bool = True
    activation_checkpointing: bool = False
    offload: bool = False
    kill_at: int = 0
    kill_rank: int = 0
    terminate_at: int = 0
    nan_at: list[int] = field(default_factory=list)
    nan_rank: int = 0
    width: int = 16
    device: str = "cpu"
    compile: bool = False


class Act(Hook):
    """A hook that does something to its own rank after a step."""

    def __init__(self, trial: Trial, rank: int) -> None:
        self.trial, self.rank = trial, rank
        self.losses: list[float] = []

    def after_step(self, engine: Engine, agreed: Status) -> None:
        self.losses.append(engine.meters.reduce().get("loss", float("nan")))
        if self.rank == self.trial.kill_rank:
            if engine.progress.step == self.trial.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if engine.progress.step == self.trial.terminate_at:
                os.kill(os.getpid(), signal.SIGTERM)


def engine_config(trial: Trial) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "strategy": trial.strategy,
            "device": trial.device,
            "compile": trial.compile,
            "precision": trial.precision,
            "float32_fraction": trial.float32_fraction,
            "threads": 1,
            "timeout_seconds": 30,
            "ema": {"enabled": trial.ema, "decay": 0.9},
            "max_skipped_steps": trial.max_skipped_steps,
            "activation_checkpointing": trial.activation_checkpointing,
            "offload": trial.offload,
        }
    )


def train(arguments: dict[str, Any]) -> dict[str, Any]:
    """Train a toy stage as `Trial(**arguments)` says, resuming from `run_dir` if it has a checkpoint."""
    trial = Trial(**arguments)
    with Runtime.start(engine_config(trial)) as runtime:
        return train_on(runtime, trial)


def train_on(runtime: Runtime, trial: Trial) -> dict[str, Any]:
    """`train` on a runtime that is already there, for several runs in one process."""
    config = engine_config(trial)
    length = OperatorStageConfig.model_validate(
        {"steps": trial.steps, "optim": {"type": trial.optimizer, "learning_rate": trial.learning_rate}}
    )
    stage = ToyStage(width=trial.width)
    planted = set(trial.nan_at)
    if runtime.rank == trial.nan_rank and planted:
        stage.hurt = lambda batch: float("nan") if batch.stage_step in planted else 1.0
    strategy = spread(stage, runtime, config)
    loader = ToyLoader(runtime.place, batch_size=trial.batch_size, micro_batch_size=trial.micro_batch_size)
    act = Act(trial, runtime.rank)
    with StopRequests() as stop_requests:
        engine = Engine(
            runtime,
            strategy,
            loader,
            config=config,
            length=length,
            stop_requests=stop_requests,
        )
        resumed = 0
        if trial.run_dir:
            checkpointer = Checkpointer(runtime, Path(trial.run_dir), asynchronous=trial.asynchronous)
            saved = checkpointer.find()
            if saved is not None:
                checkpointer.load(saved[0], engine.state_tensors())
                engine.progress = saved[1]
                resumed = saved[1].step
            engine.hooks.append(SaveHook(checkpointer, CheckpointConfig(interval_steps=trial.interval)))
        engine.hooks.append(act)
        stopped = engine.run()
    return {
        "stopped": stopped,
        "resumed": resumed,
        "progress": engine.progress.to_json(),
        "losses": act.losses,
        "windows": [[s, n, w] for s, n, w in loader.seen if s >= resumed],
        "hash": state_hash(engine),
        "parameters": full_parameters(engine),
    }


def state_hash(engine: Engine) -> str:
    """SHA-256 over the bytes of weights, optimizer and average of this rank."""
    digest = hashlib.sha256()
    for name, tensor in sorted(engine.state_tensors().items()):
        mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        digest.update(name.encode() + mine.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def full_parameters(engine: Engine) -> list[float]:
    """All weights in one list, gathered where they are sharded. Collective: all ranks."""
    whole = []
    for _, parameter in sorted(engine.strategy.stage.named_parameters()):
        whole.append(gathered(parameter).flatten().double().cpu())
    return torch.cat(whole).tolist()
