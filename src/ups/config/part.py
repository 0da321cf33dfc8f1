"""A section of a recipe whose `type` names a registered part: a model, a stage, a tracker.

The base class of a kind stands in the schema; which classes a value can be is asked of the registry when a recipe is
read, so a part of another package is checked, explained and shown in the JSON schema as ours are.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from ups.config.setting import Section
from ups.errors import PluginError
from ups.registry import Registry


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
        found = {}
        for name in sorted(cls.registry.names(), key=lambda name: name != cls.default_type):
            try:
                found[name] = cls.settings_of(name)
            except PluginError:  # a broken package disturbs only who names its part
                continue
        return found

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
        if not choices:
            return {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
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
