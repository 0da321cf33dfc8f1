"""Before a restart recipe, statistics and data are looked at again, and nothing is read that tells nothing new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import ups.data.open
import ups.run.directory
from tests.support.mixture import mixture_recipe, write_mixture
from ups.config.recipe import ResolvedRecipe, resolve
from ups.errors import DataChangedError, RecipeChangedError, StatisticsChangedError
from ups.library.train import prepared
from ups.record.identity import RunIdentity
from ups.run.directory import check_inputs


@pytest.fixture
def resolved(tmp_path: Path) -> ResolvedRecipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(mixture_recipe(tmp_path / "run", write_mixture(tmp_path))))
    return resolve(path)


@pytest.fixture
def run(resolved: ResolvedRecipe, tmp_path: Path) -> tuple[Path, RunIdentity]:
    with prepared(resolved, tmp_path / "run", 1) as identity:
        return tmp_path / "run", identity


def test_every_task_is_opened_once_before_ranks_start(
    resolved: ResolvedRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, open_now, names = ups.data.open.open_task, set(), []

    def counted(config: Any) -> Any:
        reader = real(config)
        close = reader.close
        monkeypatch.setattr(reader, "close", lambda: (open_now.discard(config.name), close()), raising=True)
        names.append(config.name)
        open_now.add(config.name)
        return reader

    monkeypatch.setattr(ups.data.open, "open_task", counted)
    with prepared(resolved, tmp_path / "run", 1):
        assert names == [task.name for task in resolved.recipe.data.tasks]
        assert not open_now, "ranks are started while this process holds the data open"


def test_a_recipe_that_nobody_touched_is_not_resolved_again(
    resolved: ResolvedRecipe, run: tuple[Path, RunIdentity], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ups.run.directory, "resolve", None)
    check_inputs(run[0], resolved.recipe, run[1])


def test_what_was_changed_is_seen_by_who_checks_again(
    resolved: ResolvedRecipe, run: tuple[Path, RunIdentity], tmp_path: Path
) -> None:
    run_dir, identity = run
    config, statistics = run_dir / "config.yaml", run_dir / "statistics.json"
    before = config.read_text()

    config.write_text(before.replace("keep: ", "keep: 1"))  # how a run is done may change
    check_inputs(run_dir, resolved.recipe, identity)
    config.write_text(before.replace("seed: 3", "seed: 4"))
    with pytest.raises(RecipeChangedError, match="was edited"):
        check_inputs(run_dir, resolved.recipe, identity)
    config.write_text(before)

    numbers = statistics.read_text()
    statistics.write_text(numbers + " ")
    with pytest.raises(StatisticsChangedError):
        check_inputs(run_dir, resolved.recipe, identity)
    statistics.write_text(numbers)
    check_inputs(run_dir, resolved.recipe, identity)

    shard = next(p for p in sorted((tmp_path / "flow2d.zarr" / "train" / "state" / "c").rglob("*")) if p.is_file())
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(DataChangedError, match="'flow2d'"):
        check_inputs(run_dir, resolved.recipe, identity)


def test_data_in_another_place_is_checked_there(
    resolved: ResolvedRecipe, run: tuple[Path, RunIdentity], tmp_path: Path
) -> None:
    """The place of the data may change while a run continues: the edited recipe says where to look."""
    run_dir, identity = run
    (tmp_path / "flow2d.zarr").rename(tmp_path / "moved.zarr")
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace("flow2d.zarr", "moved.zarr"))
    check_inputs(run_dir, resolved.recipe, identity)
