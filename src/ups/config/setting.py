"""The base of every recipe section, and the one way to declare a field: default, help, unit, limits."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ups.config.secret import EXPECTED, REFERENCE_PATTERN, is_reference, looks_like_reference

REQUIRED: Any = ...


class Section(BaseModel):
    """A part of a recipe: unknown names are refused, and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _take_former_names(cls, value: Any) -> Any:
        """A setting under the name that it had in an earlier version, as recipes of old runs have it."""
        if not isinstance(value, dict):
            return value
        renamed = {former: name for name, field in cls.model_fields.items() if (former := former_name(field))}
        if not renamed.keys() & value.keys():
            return value
        both = [
            f"{former} is now called {name}: give only {name}"
            for former, name in renamed.items()
            if {former, name} <= value.keys()
        ]
        if both:
            raise ValueError(both[0])
        return {renamed.get(name, name): item for name, item in value.items()}

    @model_validator(mode="after")
    def _secrets_are_references(self) -> Self:
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            texts = value if isinstance(value, list) else [value]
            declared = is_secret(field)
            for text in texts:
                if not isinstance(text, str):
                    continue
                if declared and not is_reference(text):
                    raise ValueError(f"{name} is a secret: {EXPECTED}, never the secret itself")
                if not declared and looks_like_reference(text):
                    raise ValueError(f"{name} does not take ${{...}} references: only fields that hold a secret do")
        return self


def setting(
    default: Any, help: str, *, unit: str = "1", may_change: bool = False, formerly: str = "", **limits: Any
) -> Any:
    """A field of a section. `help` is one line: effect first; `unit` is '1' where there is none.

    may_change: a run may continue with another value, because it says how the run is done and not what it learns.
    formerly: the name that the field had in an earlier version; recipes of old runs still have it.
    """
    return Field(default, description=help, json_schema_extra=_extra(unit, may_change, formerly), **limits)


def section(kind: Any, help: str, *, may_change: bool = False) -> Any:
    """A nested section whose default is the section's own defaults; `may_change` holds for all of its fields."""
    return Field(default_factory=kind, description=help, json_schema_extra=_extra("1", may_change))


def secret(default: Any, help: str) -> Any:
    """A field of type `str` (or `str | None`) that holds a reference to a secret: `${env:NAME}`, never the secret."""
    extra: dict[str, Any] = {"unit": "1", "secret": True, "may_change": True, "pattern": REFERENCE_PATTERN}
    return Field(default, description=help, json_schema_extra=extra)


def is_secret(field: Any) -> bool:
    """Whether a pydantic field was declared with `secret`."""
    return _declared(field, "secret")


def may_change(field: Any) -> bool:
    """Whether a run may continue with another value of this pydantic field."""
    return _declared(field, "may_change")


def _extra(unit: str, may_change: bool, formerly: str = "") -> dict[str, Any]:
    said = {"unit": unit, "may_change": may_change, "formerly": formerly}
    return {name: value for name, value in said.items() if value}


def former_name(field: Any) -> str:
    """The name that this pydantic field had in an earlier version, '' if it has always had its name."""
    extra = field.json_schema_extra
    return str(extra.get("formerly", "")) if isinstance(extra, dict) else ""


def _declared(field: Any, name: str) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get(name))
