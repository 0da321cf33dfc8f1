"""`ups plan` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from ups.cli.main import run
from ups.testing.mixture import mixture_recipe, write_mixture

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
    found = json.loads(capsys.readouterr().out)
    (stage,) = found["stages"]
    assert found["strategy"] == "fsdp"
    assert stage["fits"]
    assert stage["largest_micro_batch"] == 2
    assert stage["memory_bytes"]["optimizer"] == pytest.approx(2 * stage["memory_bytes"]["parameters"], rel=0.1)
    assert found["price"] == pytest.approx(2 * 2.5 * found["hours"])
    assert not Path(recipe).with_name("run").exists()


def test_what_cannot_be_planned_is_refused(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", recipe, "--gpu", "h1000"]) == 3
    assert "known: a10, a100-40g" in capsys.readouterr().err
    assert run(["plan", recipe, "--gpu", "h100", "--measure"]) == 3
    assert run(["plan", recipe, "--gpus", "3", "--gpu", "h100"]) == 3
    assert "cannot be cut evenly over 3 ranks" in capsys.readouterr().err
