"""The JSON schema of recipes, as editors want it: from the pydantic models, plus what the loader adds.

`ups config schema` prints it with the parts of all installed packages. `python -m ups.config.json_schema` prints that
of this package alone, which is docs/recipe.schema.json.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from ups.config.schema import Recipe
from ups.registry import REGISTRIES

_INCLUDE = {
    "description": "Recipes that this one builds on, relative to this file; this file has the last word.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}],
}


def recipe_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a recipe file, `include:` and all."""
    schema = Recipe.model_json_schema()
    _name_parts(schema, schema["$defs"])
    schema["$defs"] = dict(sorted(schema["$defs"].items()))
    required = schema.pop("required")
    # With an include, a section may hold only what it changes, and the rest is not a mistake.
    schema["if"] = {"not": {"required": ["include"]}}
    schema["then"] = {
        "required": required,
        "properties": {
            name: {"required": needed}
            for name, part in schema["properties"].items()
            if (needed := _definition(schema, part).pop("required", None))
        },
    }
    schema["properties"] = {"include": _INCLUDE, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "ups recipe"}


def own_schema() -> dict[str, Any]:
    """The same without the parts of other packages: it does not depend on what is installed."""
    with contextlib.ExitStack() as stack:
        for registry in REGISTRIES:
            for origin in registry.origins():
                if not origin.is_ours:
                    stack.enter_context(registry.without(origin.name))
        return recipe_schema()


def _name_parts(schema: Any, definitions: dict[str, Any]) -> None:
    """Moves the settings of each part, which pydantic writes out in place, to the definitions, under its class name."""
    if isinstance(schema, dict) and "oneOf" in schema and "discriminator" in schema:
        mapping = schema["discriminator"]["mapping"]
        for number, part in enumerate(schema["oneOf"]):
            name, kind = str(part.get("title", "Part")), str(part["properties"]["type"]["const"])
            if definitions.setdefault(name, part) != part:
                definitions[name := f"{name}_{kind}"] = part  # two packages, one class name
            mapping[kind] = f"#/$defs/{name}"
            schema["oneOf"][number] = {"$ref": mapping[kind]}
        return
    for inner in list(schema.values()) if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _name_parts(inner, definitions)


def _definition(schema: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    name = str(part.get("$ref", "")).removeprefix("#/$defs/")
    definition: dict[str, Any] = schema["$defs"].get(name, {})
    return definition


if __name__ == "__main__":
    print(json.dumps(own_schema(), indent=2))  # noqa: T201
