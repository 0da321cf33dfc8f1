"""Files that a recipe names: only YAML is included, slips in it are explained, and a stored recipe names none."""

from __future__ import annotations

from pathlib import Path

import pytest

from ups.config.explain import RecipeError
from ups.config.recipe import resolve
from ups.errors import ConfigError


@pytest.mark.parametrize("name", ["credentials", "config.json", "a.yaml.txt", "x.yaml/../key"])
def test_only_yaml_files_are_included(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.yaml").mkdir()
    (tmp_path / name).write_text("key: value\n")
    (tmp_path / "r.yaml").write_text(f"include: {name}\n")
    with pytest.raises(ConfigError, match=r"expected a file that ends in \.yaml or \.yml"):
        resolve(tmp_path / "r.yaml")


def test_a_slip_in_an_included_recipe_is_explained(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("engine:\n  precison: float32\nmodel:\n  width: 1\n")
    (tmp_path / "r.yaml").write_text("include: base.yaml\nengine: {threads: 2}\n")
    with pytest.raises(RecipeError) as caught:
        resolve(tmp_path / "r.yaml")
    lines = "\n".join([caught.value.one_line(), *caught.value.others])
    assert "base.yaml:2: engine.precison = \"float32\": no such field in engine -> did you mean 'precision'?" in lines
    assert "model.width = 1: expected at least 8" in lines


def test_a_recipe_that_ups_wrote_names_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("token: hunter2\n")
    (tmp_path / "config.yaml").write_text("include: other.yaml\n")
    with pytest.raises(ConfigError, match="names no other file") as caught:
        resolve(tmp_path / "config.yaml", other_files=False)
    assert "hunter2" not in caught.value.one_line()


def test_a_recipe_may_be_a_link(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[3] / "recipes" / "tiny.yaml"
    (tmp_path / "linked.yaml").symlink_to(recipe)
    assert resolve(tmp_path / "linked.yaml").hash == resolve(recipe).hash
