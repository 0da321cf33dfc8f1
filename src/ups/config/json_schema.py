"""The JSON schema of recipes, as editors want it: from the pydantic models, plus what the loader adds."""

from __future__ import annotations

from typing import Any

from ups.config.schema import Recipe

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
