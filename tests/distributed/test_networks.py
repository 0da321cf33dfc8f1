"""A stage that trains one network next to another: two ranks with sharded weights compute what one rank computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.small_model import LINE, SMALL, awake, batch_of, statistics_of
from ups.config.model import LatentOperatorConfig
from ups.config.schema import EngineConfig
from ups.config.stage import OperatorStageConfig
from ups.distributed.runtime import Runtime
from ups.distributed.strategies import spread
from ups.models.build import build_model
from ups.spec.batch import Batch
from ups.testing.ranks import launch
from ups.training.stages import OperatorStage

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


class CorrectorStage(OperatorStage):
    """Trains `corrector` to take back what `operator` does."""

    def trained_modules(self) -> list[nn.Module]:
        return [self.stepper.networks["corrector"]]

    def sample_losses(self, batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        found = []
        for batch in batches:
            given = batch.with_state(batch.state[:, : self.stepper.context_frames])
            with torch.no_grad():
                change = self.stepper.predict(given)
            corrected = change + self.stepper.networks["corrector"](self.stepper.network_input(given))
            found.append({"loss": corrected.square().flatten(1).mean(1)})
        return found


def gradients(arguments: dict[str, Any]) -> dict[str, Any]:
    """Gradient of one batch, the same on every rank, and which weights are sharded."""
    config = EngineConfig.model_validate(
        {"device": "cpu", "threads": 1, "precision": "float64", "strategy": arguments["strategy"]}
    )
    configs = {
        "operator": LatentOperatorConfig.model_validate(SMALL),
        "corrector": LatentOperatorConfig.model_validate({**SMALL, "width": 8, "depth": 1}),
    }
    with Runtime.start(config) as runtime:
        stepper = awake(build_model(configs, [LINE], {"line": statistics_of(LINE)}, 1))
        stage = CorrectorStage(OperatorStageConfig.model_validate({"steps": 1}), stepper, seed=1)
        strategy = spread(stage, runtime, config)
        batch = batch_of(LINE, 2, samples=2, dtype=torch.float64)
        with strategy.micro_batch(is_last=True):
            strategy.module([batch]).total.backward()
        parameters = dict(stage.named_parameters())
        grads = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        return {
            "names": sorted(parameters),
            "sharded": sorted(n for n, p in parameters.items() if isinstance(p, DTensor)),
            "gradients": {n: _whole(g).flatten().tolist() for n, g in sorted(grads.items())},
        }


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_the_second_network_as_one_rank_does(strategy: str) -> None:
    alone = launch(gradients, 1, arguments={"strategy": "single"})[0]
    assert alone["gradients"]
    assert all(name.startswith("stepper.networks.corrector.") for name in alone["gradients"])
    assert any(any(values) for values in alone["gradients"].values())
    for found in launch(gradients, 2, arguments={"strategy": strategy}):
        assert found["names"] == alone["names"]
        assert found["sharded"] == (alone["names"] if strategy == "fsdp" else [])
        assert found["gradients"].keys() == alone["gradients"].keys()
        for name, values in found["gradients"].items():
            assert values == pytest.approx(alone["gradients"][name], rel=1e-9, abs=1e-12), name
