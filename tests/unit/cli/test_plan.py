"""`ups plan` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.support.mixture import mixture_recipe, write_mixture
from ups.cli.main import run

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("plan")
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(mixture_recipe(folder / "run", write_mixture(folder))))
    return str(path)


def test_a_plan_says_what_a_run_costs(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", recipe, "--gpus", "2", "--gpu", "h100", "--price-per-hour", "2.5"]
    assert run(arguments) == 0
    text = capsys.readouterr().out
    for word in ("2 x h100", "ddp", "usable: fits", "communication", "Young's interval", "price", "estimates"):
        assert word in text
    assert run([*arguments, "--json", "--set", "engine.strategy=fsdp"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (stage,) = plan["stages"]
    assert plan["strategy"] == "fsdp"
    assert stage["fits"]
    assert stage["largest_micro_batch"] == 2
    assert stage["memory_bytes"]["optimizer"] == pytest.approx(2 * stage["memory_bytes"]["parameters"], rel=0.1)
    assert plan["price"] == pytest.approx(2 * 2.5 * plan["hours"])
    assert not Path(recipe).with_name("run").exists()


def test_what_cannot_be_planned_is_refused(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", recipe, "--gpu", "h1000"]) == 3
    assert "known: a10, a100-40g" in capsys.readouterr().err
    assert run(["plan", recipe, "--gpu", "h100", "--measure"]) == 3
    shards = ["--set", "engine.strategy=fsdp", "--set", "engine.shard_ranks=2"]
    assert run(["plan", recipe, "--gpus", "3", "--gpu", "h100", *shards]) == 3
    assert "engine.shard_ranks (2) does not divide 3 ranks" in capsys.readouterr().err


# The calculations of benchmarks/engine/plan_by_hand.md: communication and the part of it that is not hidden (ms), the
# interval of Young (s), the part of the time that is work that lasts.
BY_HAND = {
    8: (2.48, 0.0, 2399.0, 0.9981),
    64: (3.73, 0.0, 848.0, 0.9876),
    1024: (4.80, 0.46, 212.0, 0.9843),
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words of the plan of benchmarks/engine/plan_by_hand.md: 78,876,480 weights, a batch of 1,024."""
    folder = tmp_path_factory.mktemp("wide")
    changes = ["model={type: latent_operator, width: 1024, depth: 4, num_heads: 16}", "data.batch_size=1024"]
    changes += ["stages.0.steps=10000", "checkpoint.interval_steps=500"]
    recipe = yaml.safe_load((Path(__file__).parents[3] / "recipes" / "tiny.yaml").read_text())
    for task in recipe["data"]["tasks"]:
        task["path"] = str(folder / f"{task['name']}.zarr")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert run(["data", "generate", "advection1d", "darcy2d", "--small", "--out", str(folder)]) == 0
    words = ["plan", str(folder / "recipe.yaml"), "--gpu", "h100", "--price-per-hour", "2.5", "--json"]
    return [*words, *(word for change in changes for word in ("--set", change))]


@pytest.mark.parametrize("gpus", [8, pytest.param(64, marks=pytest.mark.long), 1024])
def test_a_plan_agrees_with_a_calculation_by_hand(
    wide: list[str], capsys: pytest.CaptureFixture[str], gpus: int
) -> None:
    capsys.readouterr()
    assert run([*wide, "--gpus", str(gpus)]) == 0
    plan = json.loads(capsys.readouterr().out)
    (stage,) = plan["stages"]
    step, memory = stage["step"], stage["memory_bytes"]
    sent, exposed, young, effective = BY_HAND[gpus]
    assert stage["parameters"] == 78_876_480
    assert (memory["parameters"], memory["optimizer"]) == (
        pytest.approx(0.3155e9, rel=0.1),
        pytest.approx(0.631e9, rel=0.1),
    )
    assert step["communication_seconds"] == pytest.approx(sent / 1000, rel=0.1)
    assert step["not_hidden_seconds"] == pytest.approx(exposed / 1000, rel=0.1)
    arithmetic = step["forward_seconds"] + step["backward_seconds"] + step["update_seconds"]
    assert step["seconds"] == pytest.approx(arithmetic + exposed / 1000, rel=0.01)
    saves, failures = plan["checkpoints"], plan["failures"]
    assert (saves["bytes"], saves["save_seconds"]) == (pytest.approx(1.262e9, rel=0.1), pytest.approx(1.262, rel=0.1))
    assert failures["hours_between"] == pytest.approx(50_677 / gpus, rel=0.01)
    assert saves["young_interval_steps"] * step["seconds"] == pytest.approx(young, rel=0.1)
    assert 1 - failures["effective_part"] == pytest.approx(1 - effective, rel=0.1)
    assert plan["price"] == pytest.approx(2.5 * gpus * 10_000 * step["seconds"] / 3600 / effective, rel=0.01)


def test_a_checkpoint_of_shards_is_as_large_as_the_whole_model(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`fully_shard` pads tensors with fewer rows than ranks: that is sent, and not saved."""
    words = ["plan", recipe, "--gpus", "8", "--gpu", "h100", "--json", "--set", "data.batch_size=8"]
    plans = []
    for strategy in ("ddp", "fsdp"):
        assert run([*words, "--set", f"engine.strategy={strategy}"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    whole, sharded = (one["checkpoints"]["bytes"] for one in plans)
    assert sharded == pytest.approx(whole, rel=0.02)
    (stage,) = plans[1]["stages"]
    padded = 8 * stage["memory_bytes"]["parameters"]
    assert padded > 4 * stage["parameters"]
    assert stage["step"]["sent_bytes"] >= 7 / 8 * 3 * padded


def test_a_plan_for_the_cpu_has_no_failures_of_gpus(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", recipe, "--gpus", "2"]) == 0
    text = capsys.readouterr().out
    assert "no rate is known for this CPU" in text
    assert "Young" not in text
    assert "which is all that one rank gets of a batch" in text
    assert run(["plan", recipe, "--gpus", "2", "--json", "--failure-hours", "1000"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["failures"]["hours_between"] == pytest.approx(1000), "two ranks, one machine"
    assert plan["hosts"] == 1
    assert plan["stages"][0]["memory_bytes"]["usable"] <= plan["device"]["memory_bytes"] / 2
