"""A recipe from a file, plain values or another recipe; changes in Python mean what `--set` means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import ups
from tests.support.mixture import mixture_recipe
from ups.config.recipe import resolve
from ups.errors import ConfigError
from ups.library.recipe import resolve_recipe


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    return mixture_recipe(tmp_path / "run", [{"name": "a", "path": "a.zarr"}])


@pytest.fixture
def file(tmp_path: Path, document: dict[str, Any]) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_a_file_its_values_and_its_recipe_are_the_same(file: Path, document: dict[str, Any]) -> None:
    recipe = ups.load_recipe(file)
    assert isinstance(recipe, ups.Recipe)
    texts = {resolve_recipe(source, {}).text for source in (file, str(file), document, recipe)}
    assert texts == {resolve(file).text}


def test_changes_are_those_of_set(file: Path, tmp_path: Path) -> None:
    changes = {"stages__0__optim__learning_rate": 1e-5, "engine__precision": "float64", "run__dir": tmp_path / "b"}
    words = ["stages.0.optim.learning_rate=1e-5", "engine.precision=float64", f"run.dir={tmp_path / 'b'}"]
    for source in (file, ups.load_recipe(file)):
        assert resolve_recipe(source, changes).text == resolve(file, words).text
    assert ups.load_recipe(file, **{"run.seed": np.int64(4)}).run.seed == 4
    tasks = [{"name": "b", "path": Path("b.zarr")}]
    assert ups.load_recipe(file, data__tasks=tasks).data.tasks[0].path == "b.zarr"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"engine__precison": "float64"}, "did you mean"),
        ({"run__seed": "four"}, "seed"),
        ({"run__seed": float("nan")}, "run__seed"),
        ({"run__seed": object()}, "nothing that a recipe holds"),
        ({"stages__7__steps": 1}, "no entry '7'"),
    ],
)
def test_a_wrong_change_is_named(file: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ups.load_recipe(file, **changes)
    assert words in caught.value.one_line()


def test_what_is_no_recipe_is_refused() -> None:
    with pytest.raises(ConfigError, match="not int"):
        ups.load_recipe(3)  # type: ignore[arg-type]
