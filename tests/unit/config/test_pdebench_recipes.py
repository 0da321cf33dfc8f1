"""The recipes for the real PDEBench sets are sound, and every file that they fetch is a published one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ups.cli.main import run
from ups.config.recipe import resolve
from ups.data.fetch import find
from ups.run.directory import check_ranks

RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.mark.parametrize(("name", "num_tasks"), [("pdebench_2", 2), ("pdebench_11", 11)])
def test_a_recipe_for_published_data_is_sound(
    name: str, num_tasks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = RECIPES / f"{name}.yaml"
    assert run(["config", "check", str(path)]) == 0
    assert f"{num_tasks} tasks" in capsys.readouterr().out
    recipe = resolve(path).recipe
    check_ranks(recipe, 2)
    for task in recipe.data.tasks:
        assert task.source is not None
        published = {file.path for file in find(task.source.dataset or "").files}
        for one in [task.path] if isinstance(task.path, str) else task.path:
            folder, _, file = one.rpartition("/")
            assert folder == f"data/{task.source.dataset}"
            assert file in published
    assert "NOT TRAINED YET" in path.read_text()
