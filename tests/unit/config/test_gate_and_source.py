"""`gate` and `source` of a recipe: mistakes are said before anything starts, and neither changes what is learned."""

from pathlib import Path
from typing import get_args

import pytest

from ups.config.description import TaskDescription
from ups.config.identity import recipe_identity
from ups.config.recipe import ResolvedRecipe, resolve
from ups.config.schema import FindingKind
from ups.errors import ConfigError

RECIPE = """
run: { name: a }
data:
  tasks:
    - { name: advection1d, path: data/advection1d.zarr }
stages: [{ type: operator, steps: 1 }]
"""


def resolved(tmp_path: Path, *changes: str) -> ResolvedRecipe:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return resolve(tmp_path / "recipe.yaml", changes)


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("{metric: speed, at_most: 1}", "there is no metric of this name"),
        ("{metric: trmse}", "one limit"),
        ("{metric: trmse, at_most: 1, at_least: 0}", "one limit"),
        ("{metric: trmse, at_most: .inf}", "at_most"),
        ("{metric: trmse, at_most: 1, relative_to: luck}", "relative_to"),
        ("{metric: drift, at_most: 1, relative_to: best}", "not compared with references"),
        ("{metric: trmse, at_most: 1, tasks: [b]}", "data has no task 'b'"),
        ("{metric: trmse, at_most: 1, tasks: []}", "tasks"),
    ],
)
def test_a_condition_that_makes_no_sense_is_refused(tmp_path: Path, condition: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(tmp_path, f"gate=[{condition}]")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{type: download}", "type"),
        ("{type: generate, task: weather}", "there is no solver 'weather'"),
        ("{type: generate, trajectories: [1, 2]}", "trajectories"),
        ("{type: generate, trajectories: [0, 2, 2]}", "at least one to train on"),
        ("{type: generate, files: a.npy}", "'files' has no meaning"),
        ("{type: import}", "needs files"),
        ("{type: import, files: a.npy, seed: 3}", "'seed' has no meaning"),
        ("{type: fetch, dataset: pdebench/burgers1d, mirror: 'https://me:word@host/'}", "mirror must not hold a name"),
    ],
)
def test_a_source_that_makes_no_sense_is_refused(tmp_path: Path, source: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(tmp_path, f"data.tasks.0.source={source}")


def test_a_task_that_is_called_otherwise_needs_the_name_of_its_solver(tmp_path: Path) -> None:
    changes = ["data.tasks.0.name=mine", "data.tasks.0.source={type: generate}"]
    with pytest.raises(ConfigError, match="there is no solver 'mine'"):
        resolved(tmp_path, *changes)
    assert resolved(tmp_path, *changes, "data.tasks.0.source.task=burgers1d").recipe.data.tasks[0].source is not None


def test_neither_changes_what_is_learned_and_the_resolved_recipe_keeps_both(tmp_path: Path) -> None:
    changes = ["gate=[{metric: trmse, at_most: 1}]", "data.tasks.0.source={type: generate}"]
    plain, changed = resolved(tmp_path), resolved(tmp_path, *changes, "data.tasks.0.allow=[constant_frame]")
    assert recipe_identity(plain.recipe) == recipe_identity(changed.recipe)
    (tmp_path / "config.yaml").write_text(changed.text)
    assert resolve(tmp_path / "config.yaml").text == changed.text


def test_the_description_of_a_source_becomes_part_of_the_recipe(tmp_path: Path) -> None:
    described = (
        "name: waves\nfields: [{name: u}]\naxes: [{name: x, boundary: periodic}]\ndims: [trajectory, time, x]\ndt: 1\n"
    )
    (tmp_path / "task.yaml").write_text(described)
    text = RECIPE.replace(
        "advection1d.zarr }", "w.zarr, source: {type: import, files: w.npy, description: task.yaml} }"
    )
    (tmp_path / "recipe.yaml").write_text(text)
    resolved = resolve(tmp_path / "recipe.yaml")
    assert str(tmp_path / "task.yaml") in resolved.files
    source = resolved.recipe.data.tasks[0].source
    assert source is not None
    assert isinstance(source.description, TaskDescription)
    (tmp_path / "task.yaml").write_text(described.replace("periodic", "open ended"))
    with pytest.raises(ConfigError, match=r"task.yaml:3.*boundary"):
        resolve(tmp_path / "recipe.yaml")


def test_findings_are_called_as_the_validation_calls_them() -> None:
    from ups.data.validate import KINDS

    assert set(get_args(FindingKind)) == set(KINDS)
