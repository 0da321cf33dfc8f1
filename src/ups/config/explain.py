"""Says in plain words what is wrong with a recipe: where, which field, which value, what is expected, nearest name.

Takes pydantic's list of errors and the places where values were written; knows nothing about files. The words of
cross-field checks are the schema's own.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ups.buckets.client import holds_secret
from ups.config.setting import PartName, PartSection, Section, is_secret, unit_of
from ups.config.yaml_subset import Document, FieldPath, Origin, Value, dotted, quoted, scalar_text
from ups.errors import ConfigError, PluginError

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a section (name: value lines)",
    "model_type": "a section (name: value lines)",
    "model_attributes_type": "a section (name: value lines)",
    "none_required": "null",
}
_LIMITS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
_SHOWN_CHARACTERS = 60
_MAX_REPORTED = 10


class RecipeError(ConfigError):
    """A file with one or more mistakes; the message is the first, `others` are one line each."""

    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, mistakes: Sequence[ConfigError]) -> RecipeError:
        """All mistakes as one error, at most ten of them."""
        first = cls(mistakes[0].message, hint=mistakes[0].hint)
        first.others = tuple(mistake.one_line() for mistake in mistakes[1:_MAX_REPORTED])
        return first


_Kind = TypeVar("_Kind", bound=Section)


def validated(schema: type[_Kind], document: Document) -> _Kind:
    """A document as a section. Raises RecipeError, with a line for each mistake."""
    try:
        # Strict: "96" is not 96 and yes is not true; a guess would be hashed and trained as if it had been meant.
        return schema.model_validate(document.value, strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    # Outside the handler, so that no traceback in a log carries the values that pydantic keeps.
    raise RecipeError.of(explain(problems, schema, document.value, document.origins))


def explain(
    errors: Sequence[ErrorDetails],
    schema: type[Section],
    data: Value,
    origins: Mapping[FieldPath, Origin],
) -> list[ConfigError]:
    """One readable error per mistake, in the order in which they stand in the recipe."""
    grouped: dict[FieldPath, list[ErrorDetails]] = {}
    for error in errors:
        grouped.setdefault(_real_path(error, data), []).append(error)
    explainer = _Explainer(schema, data, origins)
    reported: list[tuple[Origin, ConfigError]] = []
    for path, group in grouped.items():
        # `str | list[str]` complains once as text and once per entry: the entry is what the person got wrong.
        if any(other[: len(path)] == path and len(other) > len(path) and _is_union(group) for other in grouped):
            continue
        reported.append(explainer.describe(path, group))
    files = {origin.file: number for number, origin in enumerate(origins.values())}
    reported.sort(key=lambda entry: (files.get(entry[0].file, 0), entry[0].line))
    return [error for _, error in reported]


def _is_union(group: Sequence[ErrorDetails]) -> bool:
    return all(error["type"] in _EXPECTED for error in group) and isinstance(group[0]["loc"][-1], str)


def _real_path(error: ErrorDetails, data: Value) -> FieldPath:
    """The field path of an error: pydantic mixes names of union members into its own."""
    path: list[str | int] = []
    here: Any = data
    last = len(error["loc"]) - 1
    for number, part in enumerate(error["loc"]):
        entry = isinstance(here, list) and isinstance(part, int) and part < len(here)
        if entry or (isinstance(here, dict) and part in here):
            here = here[part]
            path.append(part)
        elif number == last and error["type"] == "missing":
            path.append(part)
    return tuple(path)


class _Explainer:
    def __init__(self, schema: type[Section], data: Value, origins: Mapping[FieldPath, Origin]) -> None:
        self.schema, self.data, self.origins = schema, data, origins

    def describe(self, path: FieldPath, group: Sequence[ErrorDetails]) -> tuple[Origin, ConfigError]:
        """Where it is, and the error for one field."""
        error = group[0]
        kind, context = error["type"], error.get("ctx", {})
        if kind == "value_error":
            return self._own_words(path, str(context.get("error", error["msg"])))
        if kind in ("union_tag_invalid", "union_tag_not_found"):
            path = (*path, "type")
        what, hint = self._words(path, group, kind, context)
        origin = self._origin(path)
        shown = "" if kind in ("missing", "union_tag_not_found") else self._shown(path)
        name = dotted(path) or "recipe"
        return origin, ConfigError(f"{origin.before}{name}{shown}: {what}", hint=hint)

    def _words(
        self, path: FieldPath, group: Sequence[ErrorDetails], kind: str, context: Mapping[str, Any]
    ) -> tuple[str, str]:
        value, field = lookup(self.data, path), field_at(self.schema, self.data, path)
        if kind == "extra_forbidden":
            return self._unknown(path)
        if kind == "missing":
            return "is missing", _help(field)
        if kind in _LIMITS:
            key, words = _LIMITS[kind]
            return f"expected {words} {_number(context[key])}{_unit(field)}", _help(field)
        if kind in ("too_short", "too_long"):
            word, key = ("at least", "min_length") if kind == "too_short" else ("at most", "max_length")
            return f"expected {word} {context[key]} {'entry' if context[key] == 1 else 'entries'}", _help(field)
        if kind == "literal_error":
            choices = _choices(field)
            expected_words = one_of(choices) or "the name of a part that is installed or passed by --plugin"
            return f"expected {expected_words}", _nearest(value, choices) or _help(field)
        if kind in ("union_tag_invalid", "union_tag_not_found"):
            choices = _types(sections_at(self.schema, self.data, path[:-1], choose=False))
            if kind == "union_tag_not_found":
                return f"is missing: expected {one_of(choices)}", "say which kind this is"
            return f"expected {one_of(choices)}", _nearest(value, choices)
        expected = list(dict.fromkeys(_EXPECTED[e["type"]] for e in group if e["type"] in _EXPECTED))
        if not expected:
            return " ".join(group[0]["msg"].split()).rstrip(".").lower(), _help(field)
        # A field that takes words besides, as `auto` next to true and false.
        besides = _choices(field) if any(e["type"] == "literal_error" for e in group) else []
        hidden = field is not None and is_secret(field)
        how = "" if hidden else _how_to_write(value, expected) or _nearest(value, besides)
        return f"expected {' or '.join([*expected, *besides])}", how or _help(field)

    def _unknown(self, path: FieldPath) -> tuple[str, str]:
        parent, name = path[:-1], str(path[-1])
        names = [n for kind in sections_at(self.schema, self.data, parent) for n in kind.model_fields]
        what = f"no such field in {dotted(parent)}" if parent else "no such section"
        of_another = [k for k in sections_at(self.schema, self.data, parent, choose=False) if name in k.model_fields]
        if of_another:
            return what, f"it belongs to type {one_of(_types(of_another[:1]))}"
        if near := _nearest(name, names):
            return what, near
        paths = places_of(self.schema)
        close = difflib.get_close_matches(name, paths, n=1, cutoff=0.8)
        if close:
            return what, f"did you mean {paths[close[0]]}?"
        return what, f"known here: {', '.join(names)}"

    def _own_words(self, path: FieldPath, message: str) -> tuple[Origin, ConfigError]:
        """A check written in the schema: point at the field it names first, if that one is in the recipe."""
        value = lookup(self.data, path)
        if not isinstance(value, dict | list):
            origin = self._origin(path)
            return origin, ConfigError(
                f"{origin.before}{dotted(path)}{self._shown(path)}: {message}",
                hint=_help(field_at(self.schema, self.data, path)),
            )
        named = path
        for word in re.findall(r"[a-z_][a-z0-9_]*(?:\.[a-z0-9_]+)*", message):
            parts = tuple(int(part) if part.isdigit() else part for part in word.split("."))
            if (*path, *parts) in self.origins:
                named = (*path, *parts)
                break
        origin = self._origin(named)
        return origin, ConfigError(f"{origin.before}{dotted(path)}{': ' if path else ''}{message}")

    def _origin(self, path: FieldPath) -> Origin:
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins[path]

    def _shown(self, path: FieldPath) -> str:
        field = field_at(self.schema, self.data, path)
        if field is not None and is_secret(field):
            return " = (hidden)"
        value = lookup(self.data, path)
        if isinstance(value, str) and "://" in value and (re.search("[@?#]", value) or holds_secret(value)):
            return " = (hidden)"  # an address with a password, or signed
        return f" = {_short(value)}"


def lookup(data: Value, path: FieldPath) -> Value:
    """What stands at a path; None if there is nothing."""
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _short(value: Value) -> str:
    """A value as it would stand in the recipe, cut to fit in a line."""
    if isinstance(value, dict) and value:
        return "{...}"
    if isinstance(value, list) and value:
        return f"[{len(value)} entries]" if len(value) > 1 else "[1 entry]"
    text = quoted(value) if isinstance(value, str) else scalar_text(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and not value.is_integer() else f"{int(value)}"


def _unit(field: FieldInfo | None) -> str:
    unit = unit_of(field) if field else "1"
    return "" if unit == "1" else f" {unit}"


def _help(field: FieldInfo | None) -> str:
    return field.description or "" if field else ""


def _how_to_write(value: Value, expected: list[str]) -> str:
    """A hint for the usual slips: numbers in quotes, 1e4 for a count, yes for true, a number as a name."""
    if value is None:
        return "leave the field out to take its default, or give it a value"
    if "a list" in expected and isinstance(value, dict):
        return "start each entry with '- '"
    if "a section (name: value lines)" in expected and isinstance(value, list):
        return "remove the '-' before the names"
    if "a whole number" in expected and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return f"write {int(value)}"
    if isinstance(value, str) and {"a whole number", "a number"} & set(expected):
        plain = value.replace("_", "").replace(",", "")
        return f"write {plain}, without quotes" if re.fullmatch(r"[-+]?[0-9.]+([eE][-+]?[0-9]+)?", plain) else ""
    if "true or false" in expected and isinstance(value, str):
        word = value.lower()
        return "write true" if word in ("yes", "on", "y") else "write false" if word in ("no", "off", "n") else ""
    if "text" in expected and isinstance(value, bool | int | float):
        return f"write '{scalar_text(value)}', in quotes"
    return ""


def one_of(choices: Sequence[Any]) -> str:
    """Choices as words: `a`, `a or b`, `one of a, b, c`."""
    words = [str(choice) for choice in choices]
    return f"one of {', '.join(words)}" if len(words) > 2 else " or ".join(words)


def _nearest(value: Value, choices: Sequence[Any]) -> str:
    if not isinstance(value, str):
        return ""
    close = difflib.get_close_matches(value.lower(), [str(c) for c in choices], n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else ""


def _choices(field: FieldInfo | None) -> list[Any]:
    """The words that a field takes: those of a `Literal`, or the names of the parts that it can name."""
    if field is None:
        return []
    return [*literals(field.annotation), *_part_names(field.metadata)]


def _types(sections: Sequence[type[Section]]) -> list[str]:
    """The types that sections of a kind are written with."""
    return [name for kind in sections for name in literals(kind.model_fields["type"].annotation)]


def _part_names(marks: Sequence[Any]) -> list[str]:
    return [name for mark in marks if isinstance(mark, PartName) for name in mark.registry.names()]


def literals(annotation: Any) -> tuple[Any, ...]:
    """The choices of a `Literal` inside an annotation."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) is Annotated:
        return (*literals(get_args(annotation)[0]), *_part_names(get_args(annotation)[1:]))
    return tuple(choice for part in get_args(annotation) for choice in literals(part))


def sections_in(annotation: Any, value: Value = None) -> list[type[Section]]:
    """Every section class that a value of this annotation can be; for a mapping the one that its `type` names.

    Of a kind of parts, those that can be imported.
    """
    if isinstance(annotation, type) and issubclass(annotation, PartSection) and annotation.is_base():
        name = annotation.type_of(value) if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in annotation.registry.names():
            return list(annotation.kinds().values())
        with contextlib.suppress(PluginError):  # reported when the recipe is validated
            return [annotation.settings_of(name)]
        return []
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    if get_origin(annotation) in (Annotated, Union, types.UnionType, list):
        return [kind for part in get_args(annotation) for kind in sections_in(part, value)]
    return []


def sections_at(schema: type[Section], data: Value, path: FieldPath, *, choose: bool = True) -> list[type[Section]]:
    """The section classes that can stand at a path; `choose` narrows a union by the `type` written in the recipe."""
    annotations: list[Any] = [schema]
    for number, name in enumerate(path):
        if isinstance(name, str):  # an entry of a list has the annotation of the list
            above = lookup(data, path[:number])
            kinds = [kind for annotation in annotations for kind in sections_in(annotation, above)]
            annotations = [kind.model_fields[name].annotation for kind in kinds if name in kind.model_fields]
    value = lookup(data, path) if choose else None
    return [kind for annotation in annotations for kind in sections_in(annotation, value)]


def field_at(schema: type[Section], data: Value, path: FieldPath) -> FieldInfo | None:
    """The declaration of the field at a path; for an entry of a list, that of the list."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    if not path:
        return None
    for kind in sections_at(schema, data, path[:-1]):
        if path[-1] in kind.model_fields:
            return kind.model_fields[str(path[-1])]
    return None


def places_of(schema: type[Section], prefix: str = "") -> dict[str, str]:
    """For each field name of the schema, the first path that ends in it; lists are written as `stages.0`."""
    paths: dict[str, str] = {}
    for name, field in schema.model_fields.items():
        here = f"{prefix}{name}"
        paths.setdefault(name, here)
        index = ".0" if get_origin(field.annotation) is list else ""
        for kind in sections_in(field.annotation):
            paths = places_of(kind, f"{here}{index}.") | paths
    return paths
