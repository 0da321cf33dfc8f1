"""`ups.load_recipe`: a recipe from a file, a run directory or plain values, with changes given in Python."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ups.config.recipe import ResolvedRecipe, plain_data, recipe_file, resolve, resolve_data
from ups.config.schema import Recipe
from ups.errors import ConfigError

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
    from ups.run.directory import run_dir_of

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
