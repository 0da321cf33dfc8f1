"""A stepper holds several networks by name: one makes the step, the others stand next to it and disturb nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.small_model import LINE, SMALL, awake, batch_of, loss_of, small_model, statistics_of, step
from ups.config.model import LatentOperatorConfig, ModelConfig
from ups.config.stage import OperatorStageConfig
from ups.errors import ConfigError
from ups.models.build import build_model
from ups.models.stepper import Stepper, former_name, present_name
from ups.training.stages import OperatorStage

OPERATOR: ModelConfig = LatentOperatorConfig.model_validate(SMALL)
FLOW: ModelConfig = LatentOperatorConfig.model_validate({**SMALL, "width": 8, "depth": 1})


def two_networks(seed: int = 0) -> Stepper:
    configs = {"operator": OPERATOR, "corrector": FLOW}
    return build_model(configs, [LINE], {"line": statistics_of(LINE)}, 1, seed)


class CorrectorStage(OperatorStage):
    """Trains the network next to the operator."""

    def trained_modules(self) -> list[nn.Module]:
        return [self.stepper.networks["corrector"]]


def test_a_second_network_does_not_change_the_first() -> None:
    alone, both = small_model(tasks=(LINE,)), two_networks()
    weights = both.state_dict()
    for name, tensor in alone.state_dict().items():
        assert torch.equal(weights[name], tensor), name
    batch = batch_of(LINE, 1)
    assert torch.equal(step(awake(alone), batch), step(_awake_operator(both), batch))


def _awake_operator(stepper: Stepper) -> Stepper:
    corrector = stepper.networks.pop("corrector")
    awake(stepper)
    stepper.networks["corrector"] = corrector
    return stepper


def test_weights_are_called_by_the_name_of_their_network_and_drawn_from_it() -> None:
    stepper = two_networks()
    names = {
        name.split(".")[1] if name.startswith("networks.") else name.split(".")[0] for name in stepper.state_dict()
    }
    assert names == {"operator", "corrector", "normalization"}
    twin = build_model({"operator": OPERATOR, "corrector": OPERATOR}, [LINE], {"line": statistics_of(LINE)}, 1)
    pairs = zip(twin.networks["operator"].parameters(), twin.networks["corrector"].parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs), "two networks of one kind have draws of their own"


def test_the_units_and_matrices_of_every_network_are_named() -> None:
    stepper = two_networks()
    operator, corrector = stepper.network, stepper.networks["corrector"]
    assert stepper.shard_units() == [*operator.shard_units(), *corrector.shard_units()]
    assert len(stepper.matrices()) == len(operator.matrices()) + len(corrector.matrices())


@pytest.mark.parametrize(("kind", "trained"), [(OperatorStage, "operator"), (CorrectorStage, "corrector")])
def test_a_stage_trains_the_network_that_it_names(kind: type[OperatorStage], trained: str) -> None:
    stage = kind(OperatorStageConfig.model_validate({"steps": 1}), two_networks(), seed=1)
    for name, parameter in stage.named_parameters():
        assert parameter.requires_grad == name.startswith(f"stepper.networks.{trained}."), name
    if trained == "operator":
        loss_of(stage, batch_of(LINE, 2)).backward()
        with_gradient = {n.split(".")[2] for n, p in stage.named_parameters() if p.grad is not None}
        assert with_gradient == {"operator"}


@pytest.mark.parametrize("names", [("corrector",), ("operator", "a.b"), ("operator", "values"), ("operator", "")])
def test_a_name_that_cannot_be_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="network"):
        build_model(dict.fromkeys(names, OPERATOR), [LINE], {"line": statistics_of(LINE)}, 1)


@pytest.mark.parametrize("where", ["", "stepper.", "model/stepper.", "optimizer/stepper.", "ema/stepper."])
def test_names_of_a_single_network_are_known(where: str) -> None:
    former, present = (
        f"{where}network.encoder.network.weight/step",
        f"{where}networks.operator.encoder.network.weight/step",
    )
    assert (former_name(present), present_name(former)) == (former, present)
    assert (former_name(former), present_name(present)) == (former, present)
    for other in (f"{where}networks.corrector.network.weight", f"{where}normalization.network.", "model/w"):
        assert former_name(other) == present_name(other) == other
