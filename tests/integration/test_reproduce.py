"""A bundle is retrained from what it says about its training: bitwise, and every planted difference has a name."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ups
from tests.support.command_line import ups_here
from ups.errors import BundleError, ConfigError
from ups.inference.bundle import load_bundle, write_bundle
from ups.library import reproduce as module
from ups.library.reproduce import Reproduction
from ups.library.train import _start_here, train_resolved
from ups.record.run_dir import CONFIG_NAME

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
WAVE = Path(__file__).parent / "runs" / "data" / "wave1d.zarr"
SMALL = {"type": "multiscale", "widths": [16, 32], "blocks": [1, 1], "num_heads": 2, "propagator": False}


def task(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "path": f"data/{name}.zarr", **more}


def solved(name: str) -> dict[str, Any]:
    return task(name, source={"type": "generate", "trajectories": [6, 2, 2], "resolution": 16})


def recipe(name: str, *tasks: dict[str, Any], **engine: Any) -> dict[str, Any]:
    """Three steps on these tasks."""
    return {
        "version": 1,
        "run": {"name": name, "seed": 3},
        "data": {"tasks": list(tasks), "batch_size": 2},
        "model": SMALL,
        "stages": [{"type": "operator", "steps": 3}],
        "engine": {"device": "cpu", **engine},
    }


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the bundle of a run on a steady and a transient task, and nothing else of that run."""
    folder = tmp_path_factory.mktemp("desk")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("advection1d", "darcy2d"):
            ups.generate_data(name, "data", trajectories=(6, 2, 2), resolution=16, processes=1)
        shutil.copytree(WAVE, "waves.zarr")
        for names in (["advection1d"], ["darcy2d"], ["wave1d", "advection1d"]):
            tasks = [solved(one) if one != "wave1d" else {"name": one, "path": "waves.zarr"} for one in names]
            run = ups.fit(recipe("-".join(names), *tasks), progress=False)
            assert run.bundle is not None
            shutil.copytree(run.bundle, "-".join(names))
        shutil.rmtree("runs")
        shutil.rmtree("data")
    return folder


@pytest.fixture
def here(desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same in a directory of the test, where trainings run in this process, with the same bits."""
    shutil.copytree(desk, tmp_path / "desk")
    monkeypatch.chdir(tmp_path / "desk")
    monkeypatch.setattr(module, "train_resolved", partial(train_resolved, start=_start_here))
    return tmp_path / "desk"


def named(result: Reproduction) -> dict[str, list[tuple[str, str, str]]]:
    """Kind -> (name, before, now) of every difference."""
    kinds: dict[str, list[tuple[str, str, str]]] = {}
    for row in result.differences:
        kinds.setdefault(row["kind"], []).append((row["name"], row["before"], row["now"]))
    return kinds


def rewritten(bundle: str, made_with: dict[str, str], config: str = "") -> str:
    """The same bundle, which says something else about its training."""
    loaded = load_bundle(bundle)
    info = replace(loaded.info, made_with=loaded.info.made_with | made_with if made_with else {})
    texts = {"config_text": config or (loaded.path / CONFIG_NAME).read_text(), "card": "# another\n"}
    return str(write_bundle(Path(f"{bundle}-rewritten"), loaded.stepper, info, **texts))


@pytest.mark.parametrize("name", ["advection1d", "darcy2d"])
def test_a_bundle_of_solver_data_is_retrained_bitwise_from_nothing_else(here: Path, name: str) -> None:
    result = ups.reproduce(name)
    assert (result.verdict, result.num_differing, result.differences) == ("bitwise", 0, [])
    assert result.reproduced
    assert result.scores
    assert all(row["before"] == row["now"] for row in result.scores)
    weights = [Path(place, "model.safetensors").read_bytes() for place in (name, result.bundle)]
    assert weights[0] == weights[1]
    assert load_bundle(name).info.made_with == load_bundle(result.bundle).info.made_with
    # A second call finds the finished run.
    assert ups.reproduce(name).verdict == "bitwise"


def test_a_bundle_of_own_data_needs_them_by_name_and_is_retrained_by_a_supervised_run(desk: Path) -> None:
    shutil.rmtree(desk / "runs", ignore_errors=True)
    refused = ups_here(desk, "reproduce", "wave1d-advection1d")
    assert refused.returncode == 3
    assert "--data wave1d=PATH" in refused.stderr
    done = ups_here(desk, "reproduce", "wave1d-advection1d", "--data", "wave1d=waves.zarr", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["verdict"], answer["differences"], answer["reproduced"]) == ("bitwise", [], True)
    assert not ups_here(desk, "reproduce", "wave1d-advection1d", "--data", "wave1d=waves.zarr").stderr.count("error")
    shutil.rmtree(desk / "runs")


def test_another_seed_is_named_and_within_the_noise_that_seeds_make(here: Path) -> None:
    result = ups.reproduce("advection1d", seeds=2, changes=["run.seed=11"])
    assert named(result) == {"seed": [("run.seed", "3", "11")]}
    assert result.num_differing > 0
    assert result.verdict in ("within seed noise", "beyond seed noise")
    assert all(row["std"] > 0 and row["deviations"] >= 0 for row in result.scores)
    assert sorted(one.name for one in Path("runs").iterdir()) == [
        "advection1d-reproduced", "advection1d-reproduced-seed12", "advection1d-reproduced-seed13",
    ]  # fmt: skip


def test_another_setting_and_version_are_named_and_without_seeds_nothing_is_claimed(here: Path) -> None:
    before = rewritten("advection1d", {"version torch": "2.12.0"})
    result = ups.reproduce(before, changes=["stages.0.optim.learning_rate=1e-2"])
    assert result.verdict == "not bitwise"
    assert not result.reproduced
    kinds = named(result)
    assert [name for name, _, _ in kinds["setting"]] == ["stages.0.optim.learning_rate"]
    assert [(name, was) for name, was, _ in kinds["version"]] == [("version torch", "2.12.0")]
    assert all(row["deviations"] is None for row in result.scores)


def test_other_data_are_named_with_what_was_asked_of_the_solver(here: Path) -> None:
    ups.generate_data("advection1d", "elsewhere", trajectories=(6, 2, 2), resolution=16, seed=7, processes=1)
    done = ups_here(here, "reproduce", "advection1d", "--data", "advection1d=elsewhere/advection1d.zarr")
    assert done.returncode == 9, done.stderr
    assert "data differs: solver advection1d: seed was 0 and is 7" in done.stdout
    assert "data differs: data advection1d was " in done.stdout
    assert "seed noise is not known: --seeds 3 measures it" in done.stdout
    assert "not known" in done.stdout


def test_a_bundle_of_an_earlier_version_is_retrained_from_its_recipe(here: Path) -> None:
    result = ups.reproduce(rewritten("darcy2d", {}), changes=["engine.threads=1"])
    assert result.verdict == "bitwise"
    assert {row["before"] for row in result.differences} == {"not recorded"}
    assert {"version torch", "ranks", "solver darcy2d: seed"} <= {row["name"] for row in result.differences}


@pytest.mark.parametrize(
    ("field", "text"),
    [("task", '"--out=/etc"'), ("task", "[]"), ("task", "{"), ("trajectories", '"all"'), ("trajectories", "7"),
     ("resolution", "99999999"), ("resolution", '"16"'), ("num_frames", "1e999"), ("planted", "1"), ("ranges", "[1]")],
)  # fmt: skip
def test_a_hostile_solver_request_is_an_error(here: Path, field: str, text: str) -> None:
    with pytest.raises((BundleError, ConfigError)):
        ups.reproduce(rewritten("advection1d", {f"solver advection1d: {field}": text}))
    assert not Path("runs").exists()


def test_nothing_that_the_recipe_of_a_foreign_bundle_names_is_opened(here: Path) -> None:
    text = Path("advection1d/config.yaml").read_text()
    planted = text.replace("path: data/advection1d.zarr", f"path: {here}/planted.zarr")
    planted = re.sub(r"(keep: \d+\n.*\n  mirror: )null", r"\1s3://planted/x", planted)
    planted = planted.replace("cache_dir: null", "cache_dir: planted")
    assert planted.count("planted") == 3
    says = load_bundle("advection1d").info.made_with
    result = ups.reproduce(rewritten("advection1d", {**says, "ranks": "9999"}, planted), changes=["data.batch_size=2"])
    assert result.verdict == "bitwise" or {row["name"] for row in result.differences} == {"ranks"}
    assert not list(here.rglob("planted*"))
    started = text.replace("start_from: null", "start_from: /private/weights")
    assert started != text
    with pytest.raises(ConfigError, match="weights that it does not hold"):
        ups.reproduce(rewritten("advection1d", says, started))
