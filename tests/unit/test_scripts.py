"""A script registers parts without a package; a record runs only what the user of this machine has passed before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ups import registry
from ups.config.recipe import resolve
from ups.config.sweep import axes_of
from ups.errors import ConfigError, PluginError
from ups.library.sweep import Sweep
from ups.registry import LOSSES, SCRIPT, record_scripts, use_recorded_scripts, use_script

LOSS = """
from ups.registry import LOSSES

@LOSSES.register("l1")
def l1(prediction):
    return prediction.error.abs().flatten(1).mean(1)
"""
RECIPE = """
run: {name: x}
data: {tasks: [{name: a, path: a.zarr}]}
stages: [{type: operator, steps: 1, loss: l1}]
"""


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(registry, "_scripts", {})
    yield
    for one in registry.REGISTRIES:
        for origin in one.origins():
            if origin.distribution.startswith(SCRIPT):
                one.unregister(origin.name)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "loss.py"
    path.write_text(LOSS)
    return path


def as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_scripts", {})
    LOSSES.unregister("l1")


def test_a_script_adds_a_loss_that_a_recipe_can_name(script: Path, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    with pytest.raises(ConfigError, match="expected one of relative_l2, nrmse, mse"):
        resolve(tmp_path / "r.yaml")
    use_script(script)
    assert resolve(tmp_path / "r.yaml").recipe.stages[0].model_dump()["loss"] == "l1"
    origin = LOSSES.origin("l1")
    assert (origin.distribution, len(origin.version)) == ("script loss.py", 12)


def test_the_runs_of_a_sweep_start_with_the_same_script(script: Path, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    use_script(script)
    sweep = Sweep(str(tmp_path / "r.yaml"), [], axes_of(["run.seed=[0, 1]"]), scripts=[str(script)])
    assert sweep._command[-2:] == ["--plugin", str(script)]


def test_a_run_directory_brings_its_scripts(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_script(script)
    (tmp_path / "config.yaml").write_text(RECIPE)
    record_scripts(tmp_path / "plugins.json")
    as_in_a_new_process(monkeypatch)
    assert resolve(tmp_path / "config.yaml").recipe.stages[0].model_dump()["loss"] == "l1"


def test_a_record_from_elsewhere_starts_nothing(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    planted = tmp_path / "planted.py"
    planted.write_text(f"open({str(ran)!r}, 'w')")
    script, _ = registry._read_script(planted)
    (tmp_path / "plugins.json").write_text(json.dumps([{"path": script.path, "sha256": script.sha256}]))
    (tmp_path / "config.yaml").write_text(RECIPE)
    with pytest.raises(PluginError, match="was never passed to ups on this machine"):
        resolve(tmp_path / "config.yaml")
    assert not ran.exists()


def test_a_bundle_never_starts_a_script(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_script(script)
    record_scripts(tmp_path / "plugins.json")
    (tmp_path / "bundle.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(RECIPE)
    as_in_a_new_process(monkeypatch)
    with pytest.raises(ConfigError, match="expected one of relative_l2"):
        resolve(tmp_path / "config.yaml")


def test_a_script_that_was_edited_is_refused_until_it_is_passed_again(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_script(script)
    record_scripts(tmp_path / "plugins.json")
    as_in_a_new_process(monkeypatch)
    script.write_text(LOSS + "# edited")
    with pytest.raises(PluginError, match="it was edited"):
        use_recorded_scripts(tmp_path / "plugins.json")
    use_script(script)
    use_recorded_scripts(tmp_path / "plugins.json")
    assert "l1" in LOSSES.names()


@pytest.mark.parametrize(
    ("content", "message"),
    [("1 / 0", "failed: ZeroDivisionError"), ("def", "failed: SyntaxError"), (None, "cannot be read: No such file")],
)
def test_a_broken_script_says_what_is_wrong(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(PluginError, match=message):
        use_script(path)


def test_a_damaged_record_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "plugins.json").write_text("[{}]")
    with pytest.raises(PluginError, match=r"plugins\.json cannot be read"):
        use_recorded_scripts(tmp_path / "plugins.json")
