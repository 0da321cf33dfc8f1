"""Recipes and shipped models on a CUDA device that does not exist (tests.support.fake_cuda): nothing on the wrong
device, no step that waits for the device or copies memory that is not pinned, no type that CUDA has no kernel for.

What this cannot see is in docs/first-gpu-run.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ups.config.recipe import resolve
from ups.registry import STAGES

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
OPERATORS = ROOT / "tests" / "support" / "fake_cuda" / "operators.txt"
TINY = str(ROOT / "recipes" / "tiny.yaml")
ASKING = f"{TINY},stages.0.optim.type=sgd"
FSDP = f"{TINY},engine.strategy=fsdp,engine.precision=bfloat16,engine.activation_checkpointing=true"
MIX, OTHERS = f"{TINY},plant=mix", f"{TINY},plant=others"


def on_fake_cuda(folder: Path, *names: str) -> dict[str, Any]:
    """Recipe or model -> stage or task -> what a GPU would suffer from."""
    command = [sys.executable, "-m", "tests.support.fake_cuda", str(folder), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    # A new one needs a kernel in a CUDA build of torch. It has one if, after `import torch.distributed.fsdp`,
    # torch._C._dispatch_has_computed_kernel_for_dispatch_key(NAME, "CUDA") is true; no GPU is needed to ask.
    assert {*found.pop("operators")} <= {*OPERATORS.read_text().split()}
    return found


def check_stages(stages: dict[str, dict[str, list[str]]]) -> None:
    """Raise if a stage suffers from anything; rows of the log, validations and checkpoints may wait."""
    assert stages
    for name, found in stages.items():
        assert not found["error"], (name, found)
        assert not found["step"], (name, found)
        assert not found["module"], (name, found)
        assert all(line.startswith("waits") for line in found["between"]), (name, found)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the tiny recipe, as it is and in other ways, in one process."""
    return on_fake_cuda(tmp_path_factory.mktemp("fake_cuda"), TINY, ASKING, FSDP, MIX, OTHERS)


def test_a_recipe_runs_on_a_gpu_without_waiting_for_it(found: dict[str, Any]) -> None:
    check_stages(found[TINY])


def test_a_recipe_runs_sharded_recomputed_and_in_bfloat16(found: dict[str, Any]) -> None:
    check_stages(found[FSDP])


def test_an_optimizer_that_must_ask_waits_once(found: dict[str, Any]) -> None:
    (stage,) = found[ASKING].values()
    assert len(stage["step"]) == 1
    assert stage["step"][0].startswith("waits: _local_scalar_dense: training/optim.py")


@pytest.mark.parametrize(
    ("plant", "where", "words"),
    [
        (MIX, "error", "found at least two devices, cuda:0 and cpu"),
        (OTHERS, "step", "waits: _local_scalar_dense: "),
        (OTHERS, "step", "pageable: _to_copy from cpu to cuda: "),
        (OTHERS, "step", "rejected: mm of {torch.int64}"),
        (OTHERS, "step", "random: cumsum: "),
        (OTHERS, "module", "planted.factor"),
    ],
    ids=["device mix", "host read", "pageable copy", "type", "order", "module"],
)
def test_what_is_planted_is_found(found: dict[str, Any], plant: str, where: str, words: str) -> None:
    (stage,) = found[plant].values()
    assert any(words in line for line in stage[where]), stage


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_runs_on_a_gpu_without_waiting_for_it(tmp_path: Path, recipe: Path) -> None:
    check_stages(on_fake_cuda(tmp_path, str(recipe))[str(recipe)])


def test_recipes_have_every_stage() -> None:
    used = {stage.type for path in RECIPES for stage in resolve(path).recipe.stages}
    assert used >= {*STAGES.names()} - {"autoencode"}


@pytest.mark.long
def test_a_shipped_model_rolls_out_on_a_gpu(tmp_path: Path) -> None:
    tasks = on_fake_cuda(tmp_path, "ups-joint")["ups-joint"]
    assert len(tasks) == 9
    for task, lines in tasks.items():
        # The network waits for nothing: only what brings frames and error bars to the host does.
        known = ("waits: ", "random: cumsum: inference/calibration.py")
        assert all(line.startswith(known) for line in lines), (task, lines)
        assert not [line for line in lines if ": models/" in line and "models/error_model.py" not in line], (
            task,
            lines,
        )
