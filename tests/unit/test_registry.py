"""Parts are found by name, wherever they come from; a broken one is named and disturbs no other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch

import ups.registry as registry
from tests.support.small_bundle import make_bundle
from tests.support.small_model import LINE, PLANE, statistics_of
from ups.config.json_schema import own_schema, recipe_schema
from ups.config.model import FnoConfig, ModelConfig
from ups.config.recipe import resolve
from ups.config.setting import setting
from ups.data.open import open_paths, recognized
from ups.errors import BundleError, ConfigError, DataError, PluginError
from ups.evaluation.accumulate import Accumulator
from ups.inference.bundle import load_bundle
from ups.models.build import build_model
from ups.registry import METRICS, MODELS, OURS, READERS, STAGES, TASKS, TRACKERS
from ups.run.software import parts
from ups.solvers.request import make_request
from ups.solvers.tasks import BENCH_TASKS, find_task

SMALLEST = """
run: {name: r}
data: {tasks: [{name: a, path: a.zarr}]}
model: {type: latent_operator}
stages: [{type: operator, steps: 1}]
"""


class HeatConfig(ModelConfig):
    """A foreign model."""

    type: Literal["heat"] = setting("heat", "Which model to build.")
    strength: float = setting(1.0, "How strongly it smooths.", ge=0, le=2)


def package(folder: Path, name: str, entry_points: str, code: str) -> None:
    """An installed distribution in `folder`: metadata and one module."""
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory whose packages count as installed; everything that the registries remember is forgotten."""

    def forget() -> None:
        registry._entry_points.cache_clear()
        registry._announced.cache_clear()

    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield tmp_path
    forget()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(SMALLEST)
    return path


def test_our_own_parts_come_from_our_entry_points() -> None:
    assert set(MODELS.names()) >= {"latent_operator", "multiscale", "fno", "unet"}
    assert set(STAGES.names()) >= {"autoencode", "operator"}
    assert {MODELS.origin(name).distribution for name in ("latent_operator", "multiscale", "fno", "unet")} == {OURS}
    assert MODELS.origin("fno").where == "ups.models.fno:build"


def test_names_import_no_code() -> None:
    code = "import sys, ups.registry as r; [one.names() for one in r.REGISTRIES]; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_settings_of_our_parts_are_read_without_torch() -> None:
    code = (
        "import sys, ups.registry as r\n"
        "for one in (r.MODELS, r.STAGES, r.TRACKERS): [one.config(name) for name in one.names()]\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_part_that_is_unregistered_is_gone_everywhere(recipe: Path) -> None:
    resolve(recipe, ["model.type=unet"])
    with MODELS.without("unet"):
        assert "unet" not in MODELS.names()
        with pytest.raises(ConfigError, match=r"model\.type.*expected one of multiscale, fno, latent_operator"):
            resolve(recipe, ["model.type=unet"])
        assert "UnetConfig" not in str(recipe_schema())
        with pytest.raises(ConfigError, match="there is no model 'unet'"):
            MODELS.factory("unet")
    resolve(recipe, ["model.type=unet"])


def test_a_registered_part_is_checked_explained_and_in_the_json_schema_like_ours(recipe: Path) -> None:
    MODELS.register("heat", config=HeatConfig)(lambda config, tasks, context_frames: None)
    try:
        resolved = resolve(recipe, ["model.type=heat", "model.strength=0.5"])
        assert resolved.recipe.model == HeatConfig(strength=0.5)
        assert "type: heat\n" in resolved.text
        assert "  strength: 0.5\n" in resolved.text
        with pytest.raises(ConfigError, match=r"model\.strength = 3: expected at most 2") as caught:
            resolve(recipe, ["model.type=heat", "model.strength=3"])
        assert caught.value.hint == "How strongly it smooths."
        with pytest.raises(ConfigError) as caught:
            resolve(recipe, ["model.type=heat", "model.strenght=1"])
        assert caught.value.hint == "did you mean 'strength'?"
        with pytest.raises(ConfigError) as caught:
            resolve(recipe, ["model.type=haet"])
        assert caught.value.hint == "did you mean 'heat'?"
        schema = recipe_schema()
        assert schema["$defs"]["HeatConfig"]["properties"]["strength"]["maximum"] == 2
        assert schema["properties"]["model"]["discriminator"]["mapping"]["heat"] == "#/$defs/HeatConfig"
        assert "heat" not in str(own_schema()).lower()
        assert recipe_schema() == schema
        with pytest.raises(PluginError, match="built a NoneType, not a Network"):
            build_model(HeatConfig(), [LINE], {"line": statistics_of(LINE)}, 1)
    finally:
        MODELS.unregister("heat")


def test_a_name_is_given_once() -> None:
    with pytest.raises(PluginError, match=r"'fno' cannot be registered: universal-simulator .* has one of this name"):
        MODELS.register("fno", config=FnoConfig)(lambda: None)


def test_a_broken_package_is_named_and_disturbs_nobody_else(site: Path, recipe: Path) -> None:
    points = "[ups.models]\nbent = bent_models:build\n[ups.models.config]\nbent = bent_models:BentConfig\n"
    package(site, "bent-models", points, "import a_package_that_is_not_there\n")
    resolve(recipe)
    assert "bent" not in str(recipe_schema())
    with pytest.raises(PluginError) as caught:
        resolve(recipe, ["model.type=bent"])
    assert caught.value.message == (
        "model 'bent' of bent-models 1.2 cannot be imported from bent_models:build: "
        "ModuleNotFoundError: No module named 'a_package_that_is_not_there'"
    )
    assert (caught.value.cause, caught.value.exit_code) == ("plugin", 3)
    assert MODELS.error("fno") == ""
    assert "a_package_that_is_not_there" in MODELS.error("bent")


@pytest.mark.parametrize("code", ["import sys; sys.exit(7)", "1 / 0", "def f(:"])
def test_whatever_the_code_of_a_plugin_does_is_one_error(site: Path, recipe: Path, code: str) -> None:
    package(site, "odd-models", "[ups.models]\nodd = odd_models:build\n", code)
    with pytest.raises(PluginError, match=r"'odd' of odd-models 1\.2 cannot be imported"):
        resolve(recipe, ["model.type=odd"])
    sys.modules.pop("odd_models", None)


def test_settings_that_are_not_what_a_recipe_can_hold_are_refused(site: Path, recipe: Path) -> None:
    package(site, "loose-models", "[ups.models]\nloose = loose_models:build\n", "def build(): pass")
    with pytest.raises(PluginError, match=r"settings of model 'loose' of loose-models 1\.2 are not a ModelConfig"):
        resolve(recipe, ["model.type=loose"])
    sys.modules.pop("loose_models", None)


def test_a_plugin_cannot_take_a_name_of_ours(site: Path) -> None:
    package(site, "a-thief", "[ups.models]\nfno = a_thief:build\n", "1 / 0")
    assert MODELS.origin("fno").distribution == OURS
    MODELS.factory("fno")


def test_two_plugins_with_one_name_are_both_named(site: Path) -> None:
    for name in ("first-models", "second-models"):
        package(site, name, f"[ups.models]\ntwin = {name.replace('-', '_')}:build\n", "build = print")
    with pytest.raises(PluginError, match=r"first-models 1\.2 and second-models 1\.2 both bring models 'twin'"):
        MODELS.factory("twin")


def test_a_model_for_one_task_and_a_stage_on_latents_are_checked_by_what_parts_declare(recipe: Path) -> None:
    for model in ("unet", "multiscale"):
        with pytest.raises(ConfigError, match=rf"model\.type '{model}' has no latents to train on"):
            resolve(recipe, [f"model.type={model}", "stages=[{type: autoencode, steps: 1}]"])
    tasks = "data.tasks=[{name: a, path: a.zarr}, {name: b, path: b.zarr}]"
    with pytest.raises(ConfigError, match=r"learns one task, and data\.tasks has 2; use multiscale or latent_operator"):
        resolve(recipe, ["model.type=unet", tasks])


def test_a_model_says_which_dimensions_it_takes() -> None:
    class OnlyLines(FnoConfig):
        dims = frozenset({1})

    with pytest.raises(ConfigError, match="takes tasks with 1 spatial dimensions, and task 'plane' has 2"):
        build_model(OnlyLines(), [PLANE], {"plane": statistics_of(PLANE)}, 1)


READER = """
class Format:
    def recognizes(self, path):
        return path.read_bytes()[:4] == b"MINE"
    def open(self, paths, subsampling, **rest):
        return ("opened", [path.name for path in paths])
MINE = Format()
"""


def test_a_reader_of_a_plugin_is_found_by_first_bytes_or_by_name(site: Path) -> None:
    package(site, "mine-reader", "[ups.readers]\nmine = mine_reader:MINE\n", READER)
    path = site / "a.bin"
    path.write_bytes(b"MINE and more")
    assert open_paths(path) == ("opened", ["a.bin"])
    assert open_paths(path, format="mine") == ("opened", ["a.bin"])
    path.write_bytes(b"\x89HDF\r\n\x1a\n")
    assert recognized([path]) == "pdebench"
    sys.modules.pop("mine_reader", None)


def test_two_readers_that_know_a_file_are_asked_about_by_name(site: Path) -> None:
    for name in ("one-reader", "two-reader"):
        package(site, name, f"[ups.readers]\n{name[:3]} = {name.replace('-', '_')}:MINE\n", READER)
    path = site / "a.bin"
    path.write_bytes(b"MINE and more")
    with pytest.raises(DataError, match="recognized by several readers: one, two"):
        open_paths(path)
    for name in ("one_reader", "two_reader"):
        sys.modules.pop(name, None)


def test_a_broken_reader_disturbs_no_other(site: Path) -> None:
    package(site, "bent-reader", "[ups.readers]\nbent = bent_reader:MINE\n", "1 / 0")
    (site / "a.bin").write_bytes(b"nothing known")
    assert recognized([site / "a.bin"]) == "pdebench"
    with pytest.raises(PluginError, match="reader 'bent' of bent-reader"):
        open_paths(site / "a.bin", format="bent")


def test_a_recipe_names_a_reader_that_is_there(recipe: Path) -> None:
    assert resolve(recipe, ["data.tasks.0.format=store"]).recipe.data.tasks[0].format == "store"
    with pytest.raises(ConfigError, match="there is no reader of this name; known here: auto, pdebench, store"):
        resolve(recipe, ["data.tasks.0.format=hdf4"])
    with READERS.without("store"), pytest.raises(ConfigError, match="there is no reader of this name"):
        resolve(recipe, ["data.tasks.0.format=store"])


def test_a_tracker_of_a_plugin_is_part_of_a_recipe(site: Path, recipe: Path) -> None:
    code = (
        "from typing import Literal\n"
        "from ups.config.setting import setting\n"
        "from ups.config.tracker import TrackerConfig\n"
        "class BoardConfig(TrackerConfig):\n"
        "    type: Literal['board'] = setting('board', 'Which tracker this is.')\n"
        "    port: int = setting(1, 'Where it listens.', ge=1)\n"
    )
    points = "[ups.trackers]\nboard = board_tracker:Board\n[ups.trackers.config]\nboard = board_tracker:BoardConfig\n"
    package(site, "board-tracker", points, code)
    trackers = resolve(recipe, ["tracking.trackers=[{type: board, port: 7}]"]).recipe.tracking.trackers
    assert trackers[0].model_dump() == {"type": "board", "port": 7}
    with pytest.raises(ConfigError, match=r"tracking\.trackers\.0\.port = 0: expected at least 1"):
        resolve(recipe, ["tracking.trackers=[{type: board, port: 0}]"])
    assert TRACKERS.error("board").startswith("tracker 'board' of board-tracker 1.2 cannot be imported")
    (row,) = [part for part in parts() if part["kind"] == "trackers" and part["distribution"] != OURS]
    assert row["error"] == TRACKERS.error("board")
    sys.modules.pop("board_tracker", None)


def test_a_tenth_task_is_generated_and_does_not_change_the_benchmark(site: Path) -> None:
    package(site, "ten-tasks", "[ups.tasks]\nheat1d = ten_tasks:heat1d\n", "heat1d = 10")
    assert "heat1d" in TASKS.names()
    assert len(BENCH_TASKS) == 9
    assert "heat1d" not in BENCH_TASKS
    with pytest.raises(PluginError, match="task 'heat1d' of ten-tasks 1.2 is not a SolverTask".replace(".", "[.]")):
        find_task("heat1d")
    sys.modules.pop("ten_tasks", None)


def test_a_task_that_is_unregistered_cannot_be_generated() -> None:
    with TASKS.without("ks1d"), pytest.raises(ConfigError, match="there is no task 'ks1d' to generate"):
        make_request("ks1d")


def stranger(folder: Path, model: dict[str, object], needs: object, network: str) -> Path:
    """A bundle whose description says so, committed again."""
    from tests.unit.inference.test_bundle import recommit

    path = make_bundle(folder / "b")
    data = json.loads((path / "bundle.json").read_text()) | {"needs": needs}
    data["networks"][network] = model
    (path / "bundle.json").write_text(json.dumps(data))
    recommit(path)
    return path


@pytest.mark.parametrize("network", ["operator", "corrector"])
def test_a_bundle_of_a_missing_plugin_names_package_and_version(tmp_path: Path, network: str) -> None:
    needs = [{"kind": "models", "name": "ring", "distribution": "ups-rings", "version": "2.1"}]
    path = stranger(tmp_path, {"type": "ring", "width": 8}, needs, network)
    with pytest.raises(BundleError, match=r"needs model 'ring' of package ups-rings 2\.1, which is not installed"):
        load_bundle(path)


@pytest.mark.parametrize("network", ["operator", "corrector"])
@pytest.mark.parametrize("name", ["os:system", "antigravity", "this", "../evil", "planted"])
def test_no_name_in_a_bundle_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, network: str
) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    needs = [{"kind": "models", "name": name, "distribution": "planted", "version": "planted:run"}]
    with pytest.raises(BundleError, match="which is not installed"):
        load_bundle(stranger(tmp_path, {"type": name}, needs, network))
    assert not {"planted", "antigravity", "this"} & (set(sys.modules) - before)


def test_a_metric_of_a_plugin_is_among_the_scores_and_a_broken_one_is_left_out(site: Path) -> None:
    package(site, "more-metrics", "[ups.metrics]\nmae = more_metrics:mae\nbent = more_metrics:bent\n", METRIC)
    scores = Accumulator(2, ("u",))
    scores.add([0], torch.zeros(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
    assert scores.summary()["mae"] == 1
    assert "bent" not in scores.summary()
    with METRICS.without("brmse"):
        scores = Accumulator(2, ("u",))
        scores.add([0], torch.zeros(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
        assert "brmse" not in scores.summary()
    sys.modules.pop("more_metrics", None)


METRIC = "def mae(prediction, truth): return (prediction - truth).abs().mean(dim=3)\n"
