"""Every field of a recipe explains itself, and editors and other languages can use the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ups.config.explain import sections_in
from ups.config.json_schema import own_schema, recipe_schema
from ups.config.recipe import resolve
from ups.config.schema import Recipe
from ups.config.setting import Section
from ups.config.yaml_subset import parse

ROOT = Path(__file__).parents[3]


def fields(kind: type[Section], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in kind.model_fields.items():
        yield f"{path}{name}", field
        for inner in sections_in(field.annotation):
            yield from fields(inner, f"{path}{name}.")


FIELDS = dict(fields(Recipe))


@pytest.mark.parametrize("name", FIELDS)
def test_field_has_help_and_unit(name: str) -> None:
    field = FIELDS[name]
    assert field.description, "say in one line what it does"
    assert "\n" not in field.description
    assert field.description.endswith(".")
    assert field.json_schema_extra["unit"], "declare it with setting(..., unit=...)"
    if name.endswith("_seconds"):
        assert field.json_schema_extra["unit"] == "seconds"
    if name.endswith("_steps"):
        assert field.json_schema_extra["unit"] == "steps"


def test_every_section_says_what_it_is_for() -> None:
    for kind in {inner for field in FIELDS.values() for inner in sections_in(field.annotation)}:
        assert kind.__doc__


def test_the_schema_for_editors_accepts_sound_recipes_and_underlines_mistakes() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(recipe_schema())
    validator.check_schema(recipe_schema())
    sound = parse((ROOT / "recipes/tiny.yaml").read_text(), "tiny").value
    assert list(validator.iter_errors(sound)) == []
    assert list(validator.iter_errors(resolve(ROOT / "recipes/tiny.yaml").recipe.model_dump(mode="json"))) == []
    assert list(validator.iter_errors({"include": "tiny.yaml", "run": {"seed": 1}})) == []
    for broken in (
        {**sound, "modle": {}},
        {**sound, "run": {"seed": 1}},
        {**sound, "model": {"width": "wide"}},
        {**sound, "stages": [{"type": "operater", "steps": 1}]},
        {key: value for key, value in sound.items() if key != "data"},
    ):
        assert list(validator.iter_errors(broken)) != []


def test_the_schema_in_the_documentation_is_the_one_in_the_code() -> None:
    stored = json.loads((ROOT / "docs/recipe.schema.json").read_text())
    assert stored == own_schema(), "run: python -m ups.config.json_schema > docs/recipe.schema.json"
