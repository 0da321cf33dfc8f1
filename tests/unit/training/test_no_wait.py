"""A step that is left out leaves everything as it was (that no step waits for the device: test_fake_cuda.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.toy import ToyStage
from tests.unit.training.test_engine import Do, build, runtime  # noqa: F401
from ups.distributed.runtime import Runtime
from ups.registry import OPTIMIZERS
from ups.training.engine import Engine
from ups.training.optim import optimizer_tensors


@pytest.fixture
def plain_adamw() -> Iterator[None]:
    """An optimizer of a plugin that is torch's AdamW, but not the fused one, which alone looks at `found_inf`."""

    @OPTIMIZERS.register("plain_adamw", config=None)
    def build_it(config: Any, parameters: Any, matrices: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters.values(), lr=config.learning_rate, foreach=True)

    yield
    OPTIMIZERS.unregister("plain_adamw")


@pytest.mark.usefixtures("plain_adamw")
@pytest.mark.parametrize(
    "optim", [{"type": name} for name in ("adamw", "muon", "sgd", "plain_adamw")], ids=lambda o: o["type"]
)
@pytest.mark.parametrize("hurt", [math.nan, math.inf])
def test_a_step_that_is_not_finite_leaves_weights_and_state_bitwise(
    runtime: Runtime,  # noqa: F811
    optim: dict[str, str],
    hurt: float,
) -> None:
    engine = build(runtime, optim=optim | {"clip_ratio": 2.0}, engine={"ema": {"enabled": True}})
    stage = engine.strategy.stage
    assert isinstance(stage, ToyStage)
    stage.hurt = lambda batch: hurt if batch.stage_step == 2 else 1.0
    states: list[dict[str, torch.Tensor]] = []

    def keep(engine: Engine, _: object) -> None:
        weights = {name: parameter.detach() for name, parameter in stage.named_parameters()}
        state = optimizer_tensors(engine.optimizer, engine.parameters)
        states.append({name: tensor.clone() for name, tensor in (weights | state).items()})

    engine.hooks.append(Do(keep))
    engine.run()
    before, after = states[1], states[2]
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        # By bits: -0.0 is not 0.0.
        assert tensor.numpy().tobytes() == after[name].numpy().tobytes(), name
    assert any(not torch.equal(states[2][name], states[3][name]) for name in before)
    assert engine.progress.skipped == 1
