"""No step waits for the device between two rows of the log, and a step that is left out leaves everything as it was."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.toy import ToyStage
from tests.unit.training.test_engine import Do, build, runtime  # noqa: F401
from ups.distributed.runtime import Runtime
from ups.registry import OPTIMIZERS, STAGES
from ups.training.engine import Engine
from ups.training.optim import optimizer_tensors

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
ASKING = f"{ROOT / 'recipes' / 'burgers1d.yaml'},stages.1.optim.type=sgd"


# With these, a test has every kind of stage and both numbers of dimensions.
SOME = [ROOT / "recipes" / f"{name}.yaml" for name in ("joint", "full_stack")]


def waits_of(folder: Path, *recipes: object) -> dict[str, dict[str, list[str]]]:
    """Recipe -> stage -> what a step waits for."""
    command = [sys.executable, "-m", "tests.support.device_waits", str(folder), *map(str, recipes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, list[str]]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.processes
def test_no_step_waits_for_the_device_unless_its_optimizer_must_ask(tmp_path: Path) -> None:
    found = waits_of(tmp_path, *SOME, ASKING)
    asking = found.pop(ASKING)
    for recipe, stages in found.items():
        assert not any(stages.values()), (recipe, stages)
    assert {name.split()[1] for stages in found.values() for name in stages} >= set(STAGES.names()) - {"autoencode"}
    assert not asking["0 linear"]
    assert len(asking["1 operator"]) == 1
    assert asking["1 operator"][0].startswith("_local_scalar_dense: training/optim.py")


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("recipe", [r for r in RECIPES if r not in SOME], ids=lambda path: path.stem)
def test_no_step_of_a_recipe_waits_for_the_device(tmp_path: Path, recipe: Path) -> None:
    stages = waits_of(tmp_path, recipe)[str(recipe)]
    assert stages
    assert not any(stages.values()), stages


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
