"""`ups.load_recipe`: a recipe from a file, a run directory or plain values, with changes given in Python."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ups.config.recipe import ResolvedRecipe, plain_data, recipe_file, resolve, resolve_data
from ups.config.schema import Recipe
from ups.errors import ConfigError, UpsError
from ups.record.checkpoints import list_checkpoints, read_progress
from ups.record.manifest import is_committed
from ups.record.text import path_text
from ups.run.directory import earlier_stage, run_dir_of

RecipeLike = str | os.PathLike[str] | Recipe | Mapping[str, Any]


def load_recipe(recipe: RecipeLike, **overrides: Any) -> Recipe:
    """A checked recipe. `recipe`: a file, a run directory, plain values, or a recipe that is to be changed.

    A change names its field with `__` for the dot of the recipe: `stages__0__steps=100`, `engine__precision="float64"`.
    Raises ConfigError that says which field is wrong, and where.
    """
    return resolve_recipe(recipe, overrides).recipe


def resolve_recipe(recipe: RecipeLike, overrides: Mapping[str, Any]) -> ResolvedRecipe:
    """The recipe with its canonical text and hash; what `load_recipe`, `train` and `fit` begin with."""
    changes = [override_text(name, value) for name, value in overrides.items()]
    if isinstance(recipe, Recipe):
        return resolve_data(plain_data(recipe), changes)
    if isinstance(recipe, Mapping):
        return resolve_data(_plain(recipe, "the recipe"), changes)
    if not isinstance(recipe, str | os.PathLike):
        raise ConfigError(
            f"a recipe is a file, a mapping or a Recipe, not {type(recipe).__name__}",
            hint="ups.load_recipe('recipes/tiny.yaml')",
        )
    return resolve(recipe_file(recipe), changes)


def override_text(name: str, value: Any) -> str:
    """One change as `ups train --set` takes it: `a__b=1` -> `a.b=1`."""
    return f"{name.replace('__', '.')}={json.dumps(_plain(value, name))}"


def run_dir_for(recipe: RecipeLike, resolved: ResolvedRecipe) -> Path:
    """Where the run of a recipe lives: the run directory that was given, `run.dir`, or runs/<name>."""
    return run_dir_of(resolved, os.fspath(recipe) if isinstance(recipe, str | os.PathLike) else "")


def _plain(value: Any, name: str) -> Any:
    """The value as JSON has it: paths as text, tuples as lists."""
    try:
        return json.loads(json.dumps(value, default=_text_of, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {error}", hint="recipes hold numbers, texts, lists and sections") from None


def _text_of(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    item = getattr(value, "item", None)  # a number of numpy or torch
    if callable(item):
        return item()
    raise TypeError(f"{type(value).__name__} is nothing that a recipe holds")


def stage_alone(resolved: ResolvedRecipe, run_dir: Path, stage: str, changes: list[str]) -> ResolvedRecipe:
    """The recipe of stage `stage` (its type, or its number from 0) alone. run_dir: of the run that has the others.

    changes: of the whole recipe as `ups train --set` takes them; a change of the run's name or place is of the new run.
    """
    recipe = resolved.recipe
    index = _index(recipe, stage)
    own_dir = f"{run_dir}-{stage}"
    document: Any = plain_data(recipe)
    start = _start(recipe, run_dir, index)
    document["stages"] = [document["stages"][index] | ({} if start is None else {"start_from": start})]
    document["run"] |= {"name": Path(own_dir).name, "dir": own_dir}
    own = [change for change in changes if change.partition(".")[0].strip() == "run"]
    return resolve_data(document, own, name=f"stage '{stage}' of the recipe")


def without_place(changes: list[str]) -> list[str]:
    """The changes but those of the run's name and place."""
    return [c for c in changes if c.partition("=")[0].strip() not in ("run.dir", "run.name")]


def _index(recipe: Recipe, stage: str) -> int:
    types = [one.type for one in recipe.stages]
    if stage.isascii() and stage.isdigit() and int(stage) < len(types):
        return int(stage)
    if types.count(stage) == 1:
        return types.index(stage)
    numbered = ", ".join(f"{number} ({name})" for number, name in enumerate(types))
    what = "several stages" if stage in types else "no stage"
    raise ConfigError(f"the recipe has {what} '{stage[:40]}'", hint=f"say which by its number: {numbered}")


def _start(recipe: Recipe, run_dir: Path, index: int) -> str | None:
    """What the stage starts from: the checkpoint with which an earlier one ended, or what the recipe says."""
    named = earlier_stage(recipe, index)
    before = index - 1 if named is None else named
    if before < 0 or (recipe.stages[index].start_from and named is None):
        return recipe.stages[index].start_from
    for _, path in list_checkpoints(run_dir):
        with contextlib.suppress(UpsError, OSError):
            progress = read_progress(path)["progress"]
            if progress.get("stage_index") == before and progress.get("stage_finished") and is_committed(path):
                return str(path)
    raise ConfigError(
        f"{path_text(run_dir)} has no checkpoint with which its stage {before} ('{recipe.stages[before].type}') ended",
        hint="train the whole recipe first, without --stage",
    )
