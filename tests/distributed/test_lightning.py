"""Stages under Lightning learn what our engine learns: the same losses, on one rank and two, and after a restart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import ups
from tests.support.checkout import path_with
from tests.support.mixture import MODELS, mixture_recipe, write_mixture
from tests.support.parity import whole_weights
from ups.config.recipe import resolve
from ups.config.schema import Recipe
from ups.distributed.agreement import Status
from ups.distributed.runtime import Runtime
from ups.errors import ConfigError
from ups.run.assemble import assemble, open_data
from ups.training.engine import Engine, Hook
from ups.training.progress import Progress

pytest.importorskip("lightning")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]

STEPS = 20
OPTIM = {"type": "muon", "learning_rate": 1e-3, "clip_ratio": 2.0}
BALANCED = {"type": "operator", "steps": STEPS, "loss": "nrmse", "balance": 0.5, "optim": OPTIM}
FLOW = {"type": "corrector", "kind": "flow", "steps": 4}


class Losses(Hook):
    """A hook of the engine that adds up what the micro-batches of each step have lost; it hears that from the stage."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self._sum = 0.0

    def listen(self, stage: Any) -> None:
        stage.register_forward_hook(lambda _module, _given, losses: self._add(float(losses.total.detach())))

    def _add(self, loss: float) -> None:
        self._sum += loss

    def after_step(self, engine: Engine, agreed: Status) -> None:
        self.seen.append(self._sum)
        self._sum = 0.0

    def at_end(self, engine: Engine) -> None:
        """Nothing is left to do."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lightning")
    tasks = write_mixture(folder)
    plain = mixture_recipe(
        folder / "run",
        tasks,
        data={"tasks": tasks, "batch_size": 8},
        model=MODELS["multiscale"],
        stages=[BALANCED, FLOW],
        engine={"device": "cpu", "threads": 1, "precision": "float64", "micro_batch_size": 2},
    )
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(json.loads(json.dumps(plain))))
    return path


@pytest.fixture(scope="module")
def ours(recipe: Path) -> tuple[list[list[float]], Any]:
    """Losses of each stage, and weights at the end, by our engine on one rank."""
    return trained(resolve(recipe).recipe)


def trained(recipe: Recipe) -> tuple[list[list[float]], Any]:
    losses, before = [], None
    with Runtime.start(recipe.engine) as runtime, open_data(recipe) as opened:
        for index in range(len(recipe.stages)):
            hook = Losses()
            kept = before

            def take(stage: Any, kept: Any = kept) -> None:
                if kept is not None:
                    stage.stepper.load_state_dict(kept)

            with assemble(recipe, opened, runtime, Progress(stage_index=index), hooks=[hook], change=take) as parts:
                parts.engine.begin()
                hook.listen(parts.stage)
                parts.engine.run()
                before = parts.stepper.state_dict()
                weights = whole_weights(parts.engine).numpy()
            losses.append(hook.seen)
    return losses, weights


def under_lightning(recipe: Path, out: Path, *words: str) -> tuple[list[list[float]], Any]:
    command = [sys.executable, "-m", "tests.support.lightning_program", str(recipe), str(out), *words]
    environment = (
        os.environ | path_with() | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.with_suffix(".json").read_text()), np.load(out.with_suffix(".npy"))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_it_learns_what_our_engine_learns(recipe: Path, tmp_path: Path, ours: Any, ranks: int) -> None:
    losses, weights = under_lightning(recipe, tmp_path / "out", str(ranks))
    for mine, wanted in zip(losses, ours[0], strict=True):
        assert mine == pytest.approx(wanted, rel=1e-6)
    assert np.linalg.norm(weights - ours[1]) <= 1e-9 * np.linalg.norm(ours[1])


@pytest.mark.long
def test_it_goes_on_from_a_checkpoint(recipe: Path, tmp_path: Path, ours: Any) -> None:
    losses, weights = under_lightning(recipe, tmp_path / "out", "1", "7")
    assert losses[0] == pytest.approx(ours[0][0], rel=1e-6)
    assert np.linalg.norm(weights - ours[1]) <= 1e-9 * np.linalg.norm(ours[1])


def test_what_it_has_learned_becomes_a_bundle(recipe: Path, tmp_path: Path) -> None:
    from lightning.pytorch import Trainer

    from ups.inference.bundle import load_bundle
    from ups.integrations.lightning import TRAINER, StageData, StageModule, write_bundle

    found = resolve(recipe, ["stages.0.steps=2"]).recipe
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with open_data(found) as opened:
        module = StageModule(found, opened)
        trainer = Trainer(max_steps=2, accelerator="cpu", precision="64-true", **quiet, **TRAINER)
        trainer.fit(module, StageData(found, opened, module))
        path = write_bundle(found, opened, module, tmp_path / "bundle")
        learned = dict(module.stepper.named_parameters())
        for name, tensor in load_bundle(path).stepper.named_parameters():
            np.testing.assert_array_equal(tensor.detach().numpy(), learned[name].detach().float().numpy())
    assert ups.Simulator.load(path).tasks
    assert "Lightning" in (path / "card.md").read_text()

    # A stage that starts from a bundle has its weights; one that starts from a stage wants the module of that.
    again = resolve(recipe, ["stages.0.steps=2", f"stages.0.start_from={path}"]).recipe
    with open_data(again) as opened:
        started = StageModule(again, opened).stepper
        for name, tensor in load_bundle(path).stepper.named_parameters():
            np.testing.assert_array_equal(tensor.detach().numpy(), started.get_parameter(name).detach().float().numpy())
        trainer = Trainer(max_steps=2, accelerator="cpu", precision="64-true", **quiet, **TRAINER)
        module = StageModule(again, opened, 1)
        with pytest.raises(ConfigError, match=r"stages\.1 starts from the weights of an earlier stage"):
            trainer.fit(module, StageData(again, opened, module))
