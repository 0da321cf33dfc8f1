"""What a recipe learns, as opposed to how a run of it is done: the difference of two recipes, and one hash.

A setting that says how a run is done is declared with `may_change=True`; everything else is part of the identity. The
place of the data is not (a store may be moved): its content is, and that is checked with the data.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from ups.config.schema import Recipe
from ups.config.setting import Section, former_name, may_change, meaning_of_none
from ups.config.yaml_subset import ABSENT, Value, shown_value


def changes_between(a: Any, b: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """(field, value in a, value in b) for each leaf of two recipes that differs; ABSENT for what one of them lacks."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = list(a) + [key for key in b if key not in a]
        pairs = [(str(key), a.get(key, ABSENT), b.get(key, ABSENT)) for key in keys]
    elif isinstance(a, list) and isinstance(b, list):
        size = max(len(a), len(b))
        pairs = [(str(i), a[i] if i < len(a) else ABSENT, b[i] if i < len(b) else ABSENT) for i in range(size)]
    else:
        same = type(a) is type(b) and a == b
        return [] if same else [(path, a, b)]
    return [change for key, old, new in pairs for change in changes_between(old, new, f"{path}.{key}" if path else key)]


def learned(recipe: Recipe) -> dict[str, Value]:
    """The fields of a recipe that decide what a run learns, as plain values."""
    values: dict[str, Value] = _learned(recipe, recipe.model_dump(mode="json"))
    return values


def recipe_identity(recipe: Recipe) -> str:
    """SHA-256 of what a recipe learns.

    A version of ups with more settings, or with settings under new names, gives the same stored file the same identity:
    values that a stored file may leave unsaid are left out, and a renamed setting counts under its former name. A
    changed default gives another one; who compares identities must then compare the files.
    """
    text = json.dumps(
        _learned(recipe, recipe.model_dump(mode="json"), brief=True), sort_keys=True, separators=(",", ":")
    )
    return hashlib.sha256(text.encode()).hexdigest()


def first_difference(old: Recipe, new: Recipe) -> str:
    """'' if both learn the same, else the first field that differs, with both values."""
    changes = changes_between(learned(old), learned(new))
    if not changes:
        return ""
    field, before, now = changes[0]
    return f"{field} was {shown_value(before)} and is {shown_value(now)}"


def other_length(old: Recipe, new: Recipe) -> tuple[str, float, float] | None:
    """(field, length before, length now) if only the length of the last stage differs, else None."""
    changes = changes_between(learned(old), learned(new))
    if len(changes) != 1:
        return None
    field, before, now = changes[0]
    last = len(old.stages) - 1
    numbers = all(isinstance(value, int | float) for value in (before, now))
    if field not in (f"stages.{last}.steps", f"stages.{last}.budget_seconds") or not numbers:
        return None
    return field, before, now


def _learned(value: Any, plain: Any, *, brief: bool = False) -> Any:
    """What is learned; brief: without what is the default, under the oldest names."""
    if isinstance(value, list):
        return [_learned(item, other, brief=brief) for item, other in zip(value, plain, strict=True)]
    if not isinstance(value, Section):
        return plain
    values = {}
    for name, field in type(value).model_fields.items():
        if may_change(field):
            continue
        part = getattr(value, name)
        said = _learned(part, plain[name], brief=brief)
        default = said == {} if isinstance(part, Section) else part == meaning_of_none(field)
        if not brief:
            values[name] = said
        elif name == "type" or not default:
            values[former_name(field) or name] = said
    return values
