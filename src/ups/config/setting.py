"""The base of every recipe section, and the one way to declare a field: default, help, unit, limits."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

REQUIRED: Any = ...


class Section(BaseModel):
    """A part of a recipe: unknown names are refused, and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def setting(default: Any, help: str, *, unit: str = "1", **limits: Any) -> Any:
    """A field of a section. `help` is one line: effect first; `unit` is '1' where there is none."""
    return Field(default, description=help, json_schema_extra={"unit": unit}, **limits)


def section(kind: Any, help: str) -> Any:
    """A nested section whose default is the section's own defaults."""
    return Field(default_factory=kind, description=help, json_schema_extra={"unit": "1"})
