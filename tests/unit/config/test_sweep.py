"""The runs of a sweep: values are YAML, names hold them, and a name is of one run only."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ups.config.recipe import resolve
from ups.config.sweep import Cell, axes_of, cells
from ups.config.yaml_subset import parse
from ups.errors import ConfigError

ROOT = Path(__file__).parents[3]
RUN_DIR = Path("/work/runs/tiny")


def runs(*over: str, mirror: str | None = None) -> list[Cell]:
    return cells(axes_of(over), "tiny", RUN_DIR, mirror)


def test_values_are_yaml_so_that_lists_and_sections_are_values() -> None:
    cells = runs("model.widths=[[8, 16], [4, 8, 16]]", "model.noise={}".format("[{a: 1, b: [x, 'y, z']}, null]"))
    assert [cell.values for cell in cells] == [
        {"model.widths": widths, "model.noise": noise}
        for widths in ([8, 16], [4, 8, 16])
        for noise in ({"a": 1, "b": ["x", "y, z"]}, None)
    ]
    # What `--set` gets is read back as the same value.
    for cell in cells:
        changes = dict(change.split("=", 1) for change in cell.changes)
        assert {name: parse(changes[name], "").value for name in cell.values} == cell.values


def test_fields_change_together() -> None:
    cells = runs("model.width,model.num_heads=[[8, 1], [16, 2]]", "run.seed=[0, 1]")
    assert [tuple(cell.values.values()) for cell in cells] == [(8, 1, 0), (8, 1, 1), (16, 2, 0), (16, 2, 1)]
    assert cells[3].name == "tiny-width_16-num_heads_2-seed_1"
    assert cells[3].run_dir == RUN_DIR.with_name(cells[3].name)


def test_a_recipe_takes_the_changes() -> None:
    for cell in runs("stages.0.optim.learning_rate=[1e-3, 2.5e-5]", "data.tasks.0.path=['a b.zarr', [x.h5, y.h5]]"):
        recipe = resolve(ROOT / "recipes" / "tiny.yaml", cell.changes).recipe
        assert recipe.run.name == cell.name
        assert recipe.run.dir == str(cell.run_dir)
        assert recipe.data.tasks[0].path == cell.values["data.tasks.0.path"]


def test_names_are_short_safe_and_hold_the_values() -> None:
    odd = ["a/b.zarr", "a-b.zarr", "ä", "true", True, 1, "1", 1.5, -2, 1e-05, None, [1, 2], "1_2", [1], [[1], 2]]
    odd += [{}, [], "x" * 300, "../../etc", "a b", {"type": "unet", "width": 8}]
    cells = runs(f"data.tasks.0.path={json.dumps(odd)}")
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(odd)
    assert all(re.fullmatch(r"tiny-path_[A-Za-z0-9_.-]{1,33}", name) for name in names), names
    for value, name in ((1, "1"), (1.5, "1.5"), (-2, "-2"), (True, "true"), ([1, 2], "1_2")):
        assert f"tiny-path_{name}" in [cell.name for cell in cells if cell.values["data.tasks.0.path"] == value]
    assert any(name.startswith("tiny-path_type-unet-width-8-") for name in names)


def test_a_name_does_not_depend_on_the_other_runs() -> None:
    few, many = runs("model.width=[8]", "run.seed=[0, 1]"), runs("model.width=[4, 8, {a: 1}]", "run.seed=[2, 1, 0]")
    assert {cell.name for cell in few} < {cell.name for cell in many}


def test_fields_with_the_same_last_word_are_told_apart() -> None:
    assert runs("stages.0.steps=[1]", "stages.1.steps=[2]")[0].name == "tiny-0.steps_1-1.steps_2"


def test_long_names_stay_within_what_a_run_may_be_called() -> None:
    cells = runs(*(f"model.{'field' * 4}{n}=['{'x' * 30}', '{'y' * 30}']" for n in range(4)))
    assert len({cell.name for cell in cells}) == 16
    assert max(len(cell.name) for cell in cells) == 128


def test_each_run_has_its_own_place_in_a_bucket() -> None:
    cells = runs("run.seed=[0, 1]", mirror="s3://bucket/runs/")
    assert [change for cell in cells for change in cell.changes if "mirror" in change] == [
        'checkpoint.mirror="s3://bucket/runs/tiny-seed_0"',
        'checkpoint.mirror="s3://bucket/runs/tiny-seed_1"',
    ]


def test_a_section_does_not_take_back_a_field_in_it() -> None:
    (cell,) = runs("model.width=[8]", "model=[{type: latent_operator}]")
    assert [change.split("=")[0] for change in cell.changes[:2]] == ["model", "model.width"]


@pytest.mark.parametrize(
    ("over", "words"),
    [
        (["run.seed"], "is not FIELD="),
        (["run.seed=3"], "is not FIELD="),
        (["run.seed=0,1"], "is not FIELD="),
        (["run.seed=[]"], "is not FIELD="),
        (["=[1]"], "is not FIELD="),
        (["a,=[[1, 2]]"], "is not FIELD="),
        (["run.seed=[1, 2"], "--over run.seed"),
        (["a,b=[[1, 2], [3]]"], r"expected a list of 2 values, got \[3\]"),
        (["a,b=[1, 2]"], "expected a list of 2 values, got 1"),
        (["run.seed=[1]", "run.seed=[2]"], "'run.seed' cannot be swept"),
        (["a,a=[[1, 2]]"], "is not FIELD="),
        (["run.name=[x, y]"], "'run.name' cannot be swept"),
        (["run.seed=[1, 1]"], "two runs of the sweep have the same values: tiny-seed_1"),
        ([f"f{n}={list(range(10))}" for n in range(5)], "100,000 runs"),
    ],
)
def test_what_is_no_sweep_is_refused(over: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        runs(*over)
