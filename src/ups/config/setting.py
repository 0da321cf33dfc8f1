"""The base of every recipe section, the one way to declare a field (default, help, unit, limits), secrets, and sections
whose `type` names a registered part: a model, a stage, a tracker.

Of a secret, only a reference (`${env:NAME}`) is ever written; the value is fetched where it is used. The reference
stays text in the recipe, its resolved form, its hash and the run directory, so that none of them holds a secret.

The base class of a kind of part is in the schema. Which classes a value can be is asked of the registry when a recipe
is read, so a part of another package is checked, explained and shown in the JSON schema as ours are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from ups.errors import ConfigError, MachineError, PluginError
from ups.registry import Registry

REFERENCE_PATTERN = r"^\$\{env:[A-Za-z_][A-Za-z0-9_]{0,127}\}$"
_REFERENCE = re.compile(REFERENCE_PATTERN)
EXPECTED = "expected a reference to an environment variable, written ${env:NAME}"


def is_reference(text: str) -> bool:
    """Whether `text` is a well-formed reference, and nothing else."""
    return _REFERENCE.fullmatch(text) is not None


def reveal(reference: str, environment: Mapping[str, str] | None = None) -> str:
    """The secret behind a reference; call it where the secret is used, and keep the result out of files and logs."""
    if not is_reference(reference):
        raise ConfigError(f"a secret: {EXPECTED}", hint="never write the secret itself into a recipe")
    name = reference.removeprefix("${env:").removesuffix("}")
    value = (os.environ if environment is None else environment).get(name, "")
    if not value:
        raise MachineError(f"environment variable '{name}' is not set or empty", hint=f"export {name}=...")
    return value


REQUIRED: Any = ...


class Section(BaseModel):
    """A part of a recipe: unknown names are refused, and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @classmethod
    def former_names(cls) -> dict[str, str]:
        """Former name -> present name of the settings: stored recipes have them."""
        return {former: name for name, field in cls.model_fields.items() if (former := former_name(field))}

    @model_validator(mode="after")
    def _secrets_are_references(self) -> Self:
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            declared = is_secret(field)
            for text in value if isinstance(value, list) else [value]:
                if not isinstance(text, str):
                    continue
                if declared and not is_reference(text):
                    raise ValueError(f"{name} is a secret: {EXPECTED}, never the secret itself")
                if not declared and "${" in text:
                    raise ValueError(f"{name} does not take ${{...}} references: only fields that hold a secret do")
        return self


def setting(
    default: Any,
    help: str,
    *,
    unit: str = "1",
    may_change: bool = False,
    formerly: str = "",
    unsaid: Any = None,
    **limits: Any,
) -> Any:
    """A field of a section. `help` is one line: effect first; `unit` is '1' where there is none.

    may_change: a run may continue with another value, because it says how the run is done and not what it learns.
    formerly: the name that the field had in an earlier version; recipes of old runs still have it. unsaid: what stored
    recipes and bundles mean that lack the field, where that is not the default.
    """
    return Field(default, description=help, json_schema_extra=_extra(unit, may_change, formerly, unsaid), **limits)


def section(kind: Any, help: str, *, may_change: bool = False) -> Any:
    """A nested section whose default is the section's own defaults; `may_change` holds for all of its fields."""
    return Field(default_factory=kind, description=help, json_schema_extra=_extra("1", may_change))


def secret(default: Any, help: str) -> Any:
    """A field of type `str` (or `str | None`) that holds a reference to a secret: `${env:NAME}`, never the secret."""
    extra: dict[str, Any] = {"unit": "1", "secret": True, "may_change": True, "pattern": REFERENCE_PATTERN}
    return Field(default, description=help, json_schema_extra=extra)


def is_secret(field: Any) -> bool:
    """Whether a pydantic field was declared with `secret`."""
    return bool(_declared(field).get("secret"))


def may_change(field: Any) -> bool:
    """Whether a run may continue with another value of this pydantic field."""
    return bool(_declared(field).get("may_change"))


def former_name(field: Any) -> str:
    """The name that this pydantic field had in an earlier version, '' if it has always had its name."""
    return str(_declared(field).get("formerly", ""))


def meaning_of_none(field: Any) -> Any:
    """What a stored section means that lacks this pydantic field: its default, unless versions before had another."""
    return _declared(field).get("unsaid", field.get_default(call_default_factory=True))


def was_added(field: Any) -> bool:
    """Whether stored sections that lack this pydantic field mean something else than its default."""
    return "unsaid" in _declared(field)


def unit_of(field: Any) -> str:
    """The unit of a pydantic field; '1' where there is none."""
    return str(_declared(field).get("unit", "1"))


def _declared(field: Any) -> dict[str, Any]:
    extra = field.json_schema_extra
    return extra if isinstance(extra, dict) else {}


def _extra(unit: str, may_change: bool, formerly: str = "", unsaid: Any = None) -> dict[str, Any]:
    said = {"unit": unit, "may_change": may_change, "formerly": formerly}
    extra = {name: value for name, value in said.items() if value}
    return extra if unsaid is None else {**extra, "unsaid": unsaid}


class PartSection(Section):
    """Base of the bases. A base of a kind sets `registry`; `default_type` is what a section without `type` means."""

    registry: ClassVar[Registry]
    default_type: ClassVar[str | None] = None

    @classmethod
    def is_base(cls) -> bool:
        """Whether this is the base of a kind, and not the settings of one part."""
        return "registry" in cls.__dict__

    @classmethod
    def type_of(cls, value: dict[str, Any]) -> Any:
        """The type that a section names, or the default."""
        return value.get("type", cls.default_type)

    @classmethod
    def kinds(cls) -> dict[str, type[Self]]:
        """The settings of every part of this kind that can be imported, by name; the default comes first."""
        kinds = {}
        for name in sorted(cls.registry.names(), key=lambda name: name != cls.default_type):
            try:
                kinds[name] = cls.settings_of(name)
            except PluginError:  # a broken plugin fails only recipes that use it
                continue
        return kinds

    @classmethod
    def settings_of(cls, name: str) -> type[Self]:
        """The settings of one part. Raises ConfigError for an unknown name, PluginError for a part that is broken."""
        config = cls.registry.config(name)
        if config is None:  # announced without an entry point of its own: a decorated factory may carry it
            config = getattr(cls.registry.factory(name), "config", None)
        if not (isinstance(config, type) and issubclass(config, cls) and name in _types(config)):
            origin = cls.registry.origin(name)
            raise PluginError(
                f"the settings of {cls.registry.word} '{name}' of {origin} are not a {cls.__name__} with "
                f"`type: Literal[{name!r}]`",
                hint=f"announce such a class in the entry point group ups.{cls.registry.kind}.config",
            )
        return config

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if not cls.is_base():
            return handler(source)
        return core_schema.no_info_plain_validator_function(
            cls._chosen, serialization=core_schema.simple_ser_schema("any")
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        if not cls.is_base():
            return handler(schema)
        choices = [handler(kind.__pydantic_core_schema__) for kind in cls.kinds().values()]
        # `json_schema.py` gives each choice a name, and fills in which type it is.
        return {"discriminator": {"mapping": {}, "propertyName": "type"}, "oneOf": choices}

    @classmethod
    def _chosen(cls, value: Any) -> PartSection:
        """The section that a mapping with `type` describes."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, dict):
            raise PydanticKnownError("model_attributes_type")
        name = cls.type_of(value)
        if name is None and "type" not in value:
            raise PydanticKnownError("union_tag_not_found", {"discriminator": "'type'"})
        if not isinstance(name, str) or name not in cls.registry.names():
            expected = ", ".join(f"'{known}'" for known in cls.registry.names())
            raise PydanticKnownError(
                "union_tag_invalid", {"discriminator": "'type'", "tag": str(name)[:100], "expected_tags": expected}
            )
        # Strict, as a recipe is: "96" is not 96.
        return cls.settings_of(name).model_validate({**value, "type": name}, strict=True)


class PartName:
    """Annotation of a field that names a part without settings: `Annotated[str, PartName(LOSSES)]`."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": list(self.registry.names()), "type": "string"}

    def _check(self, name: str) -> str:
        if name not in self.registry.names():
            expected = " or ".join(f"'{known}'" for known in self.registry.names())
            raise PydanticKnownError("literal_error", {"expected": expected})
        return name


def _types(config: type[PartSection]) -> tuple[Any, ...]:
    field = config.model_fields.get("type")
    annotation = field.annotation if field is not None else None
    return get_args(annotation) if get_origin(annotation) is Literal else ()
