"""The YAML that recipes are written in: read with line numbers and limits, written in one canonical form.

A bundle has a recipe too, and may come from anybody. So this reads parser events and builds plain values itself: no
tags, no aliases, no duplicate keys, bounded size, depth and number of values. `yaml.compose` would be
shorter, but its C code crashes on deeply nested text. Scalars follow YAML 1.2 (`no` is text, `1e-3` is a number). What
the values mean is left to `schema.py`; where they come from to `recipe.py`.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ups.errors import ConfigError
from ups.record.files import safe_read

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_VALUES = 25_000
MAX_NUMBER_CHARACTERS = 64

Value = Any  # None | bool | int | float | str | list[Value] | dict[str, Value]
FieldPath = tuple[str | int, ...]

_INTEGER = re.compile(r"[-+]?[0-9]+")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")
_BASED = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS: dict[str, Value] = dict.fromkeys(("", "~", "null", "Null", "NULL"))
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
# Everything YAML allows in a stream, minus surrogates; a byte order mark is dropped when the file is decoded.
_NOT_TEXT = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
# Written without quotes: nothing that YAML 1.1 or 1.2 could read as anything but this text.
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+-]*( [A-Za-z0-9_./+-]+)*")
_YAML_1_1_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


@dataclass(frozen=True)
class Origin:
    """Where a value was written: a file and a line, or an override (line 0)."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    @property
    def before(self) -> str:
        """What a message about the value begins with: 'r.yaml:3: ', or '--set '."""
        return f"{self}: " if self.line else f"{self} "


@dataclass
class Document:
    """A parsed file: plain values, and for each path the place where it was written."""

    value: Value
    origins: dict[FieldPath, Origin] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Value, name: str) -> Document:
        """Plain values that were read from no file; `name` stands for it in messages."""
        return cls(value, dict.fromkeys(paths_in(value), Origin(name, 0)))


def paths_in(value: Value, path: FieldPath = ()) -> Iterator[FieldPath]:
    """The path of a value and of everything inside it."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from paths_in(item, (*path, key))


def dotted(path: FieldPath) -> str:
    """A field path as people write it: `stages.0.optim`."""
    return ".".join(str(part) for part in path)


def yaml_text(file: str, named_by: str = "", *, missing: str = "") -> str:
    """The text of a YAML file. Only regular files are opened: a pipe would hang.

    named_by: the place that names it, for messages. missing: what to do if there is no such file.
    """
    where = f"{named_by}{file}"
    try:
        if os.path.isdir(file):
            raise ConfigError(f"{where}: is a directory", hint="name a YAML file, or a run directory with config.yaml")
        content = safe_read(Path(file), MAX_BYTES, follow_link=True)
    except FileNotFoundError:
        raise ConfigError(f"{where}: no such file", hint=_nearest_file(file) or missing) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{where}:{line}: is not UTF-8 text (byte 0x{content[error.start]:02x})", hint="save it as UTF-8"
        ) from None


def _nearest_file(file: str) -> str:
    folder = os.path.dirname(file)
    try:
        names = [name for name in os.listdir(folder or ".")[:10_000] if name.endswith((".yaml", ".yml"))]
    except OSError:
        return ""
    # By stem: the shared ending would make every recipe look like every other.
    stems = {os.path.splitext(name)[0]: name for name in names}
    close = difflib.get_close_matches(os.path.splitext(os.path.basename(file))[0], stems, n=1, cutoff=0.6)
    return f"did you mean {os.path.join(folder, stems[close[0]])}?" if close else ""


def parse(text: str, file: str, *, first_line: int = 1) -> Document:
    """Read one YAML document; `first_line` 0 means that the text is not a file and lines mean nothing."""
    bad = _NOT_TEXT.search(text)
    if bad:
        line = text.count("\n", 0, bad.start()) + first_line if first_line else 0
        raise ConfigError(f"{Origin(file, line)}: character U+{ord(bad[0]):04X} is not allowed in a recipe")
    return _Builder(text, file, first_line).build()


class _Builder:
    """Turns parser events into values; every limit is checked before the next event is asked for."""

    def __init__(self, text: str, file: str, first_line: int) -> None:
        self.text, self.file, self.first_line = text, file, first_line
        self.document = Document(None)
        self.num_values = 0
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        self.events: Iterator[yaml.Event] = yaml.parse(text, Loader=loader)

    def build(self) -> Document:
        try:
            self._stream()
        except yaml.MarkedYAMLError as error:
            raise self._explained(error) from None
        return self.document

    def _stream(self) -> None:
        next(self.events)  # start of the stream
        event = next(self.events)
        if isinstance(event, yaml.StreamEndEvent):
            return
        self.document.value = self._value(next(self.events), ())
        next(self.events)  # end of the document
        event = next(self.events)
        if not isinstance(event, yaml.StreamEndEvent):
            self._refuse(event, "a second document starts here ('---')", "a recipe is one document")

    def _origin(self, event: yaml.Event) -> Origin:
        mark = event.start_mark
        return Origin(self.file, mark.line + self.first_line if self.first_line and mark is not None else 0)

    def _refuse(self, event: yaml.Event, what: str, hint: str) -> NoReturn:
        raise ConfigError(f"{self._origin(event)}: {what}", hint=hint)

    def _value(self, event: yaml.Event, path: FieldPath) -> Value:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            self._refuse(event, f"more than {MAX_VALUES:,} values", "a recipe is a page of text, not data")
        if len(path) > MAX_DEPTH:
            self._refuse(event, f"nested more than {MAX_DEPTH} levels deep", "no recipe is that deep; check brackets")
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        if anchor is not None:
            what = f"alias '*{anchor}'" if isinstance(event, yaml.AliasEvent) else f"anchor '&{anchor}'"
            self._refuse(event, f"{what} is not allowed", "repeat the value, or share it with 'include:'")
        if tag is not None:
            shown = tag.replace("tag:yaml.org,2002:", "!!")
            self._refuse(event, f"tag '{shown}' is not allowed", "a recipe holds plain values only: remove the tag")
        self.document.origins[path] = self._origin(event)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(path)
        assert isinstance(event, yaml.ScalarEvent)
        return self._scalar(event)

    def _mapping(self, path: FieldPath) -> dict[str, Value]:
        values: dict[str, Value] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent) or event.tag is not None or event.anchor is not None:
                self._refuse(event, "a field name must be plain text", "write 'name: value'")
            key = self._text(event)
            if key == "<<":
                self._refuse(event, "merge key '<<' is not allowed", "share values with 'include:'")
            if key in values:
                first = self.document.origins[(*path, key)]
                where = f" (first on line {first.line})" if first.line else ""
                self._refuse(event, f"{dotted((*path, key))}: is set twice{where}", "keep one of them")
            line = self._origin(event)
            values[key] = self._value(next(self.events), (*path, key))
            # A section is found where its name stands, not where its first field does.
            self.document.origins[(*path, key)] = line
        return values

    def _sequence(self, path: FieldPath) -> list[Value]:
        values: list[Value] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            values.append(self._value(event, (*path, len(values))))
        return values

    def _text(self, event: yaml.ScalarEvent) -> str:
        text: str = event.value
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            self._refuse(event, "half of a surrogate pair is not a character", "write the character itself")
        return text

    def _scalar(self, event: yaml.ScalarEvent) -> Value:
        text = self._text(event)
        if event.style in ("'", '"', "|", ">"):
            return text
        if _LEADING_ZERO.fullmatch(text):
            self._refuse(
                event,
                f"{text} is octal to some YAML readers and decimal to others",
                f"write {text.replace('_', '').lstrip('+-0') or '0'}, or '{text}' in quotes for text",
            )
        value = plain_scalar(text)
        if isinstance(value, float) and math.isinf(value) and "inf" not in text.lower():
            self._refuse(event, f"{text} is too large for a number", "the largest is about 1.8e308")
        return value

    def _explained(self, error: yaml.MarkedYAMLError) -> ConfigError:
        what, hint = _plain_words(str(error.problem or "is not YAML"))
        opened = "is not closed" in what and error.context_mark is not None
        mark = error.context_mark if opened else error.problem_mark
        lines = self.text.split("\n")
        number = min(mark.line, len(lines) - 1) if mark is not None else 0
        where = Origin(self.file, number + self.first_line if self.first_line else 0)
        if self.first_line and re.match(r" *\t", lines[number]):
            return ConfigError(f"{where}: tab in the indentation", hint="indent with spaces")
        return ConfigError(f"{where}: {what}", hint=hint)


def _plain_words(problem: str) -> tuple[str, str]:
    """The parser's complaint in plain words: what is wrong, what to do. Both of PyYAML's parsers are covered."""
    if "mapping values are not allowed" in problem:
        return "a ':' where only a value can stand", "put the value in quotes, or add the ':' missing in the line above"
    if "could not find expected ':'" in problem or "did not find expected key" in problem:
        return "expected 'name: value'", "check the indentation and the ':' of this line and the one above"
    if "expected <block end>" in problem or "did not find expected '-' indicator" in problem:
        return "this line does not fit the indentation above it", "align it with its neighbors"
    if "expected ',' or" in problem:
        return "a bracket is not closed, or a comma is missing", "close every [ with ] and every { with }"
    if "end of stream" in problem or "document end" in problem or "document start" in problem:
        return "a quote or bracket is not closed", "close it; a recipe is one YAML document"
    if "cannot start any token" in problem:
        return "a value starts with a character that YAML keeps for itself", "put the value in quotes"
    if "undefined tag handle" in problem:
        return "a tag ('!...') is not allowed", "a recipe holds plain values only: remove the tag"
    return f"is not YAML: {problem}", "check this line"


def plain_scalar(text: str) -> Value:
    """The value of an unquoted scalar by the rules of YAML 1.2."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > MAX_NUMBER_CHARACTERS:
        return text
    if _INTEGER.fullmatch(text):
        return int(text)
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    special = _SPECIAL_FLOAT.fullmatch(text)
    if special:
        return math.nan if special[3] else float(f"{special[1]}inf")
    return text


def dump(value: Value) -> str:
    """Plain values as canonical YAML: block style, order kept, one way to write each value."""
    lines: list[str] = []
    _dump(value, 0, "", lines)
    return "\n".join(lines) + "\n"


def _dump(value: Value, indent: int, prefix: str, lines: list[str]) -> None:
    """Append `value`; `prefix` ('- ' chains) opens its first line in place of indentation."""
    if not isinstance(value, dict | list) or not value:
        lines.append(f"{prefix}{scalar_text(value)}")
        return
    pad = " " * indent
    entries = (
        [(f"{scalar_text(key)}:", item) for key, item in value.items()]
        if isinstance(value, dict)
        else [("-", item) for item in value]
    )
    for head, item in entries:
        start = f"{prefix or pad}{head}"
        if isinstance(item, dict | list) and item:
            if head == "-":
                _dump(item, indent + 2, f"{start} ", lines)
            else:
                lines.append(start)
                _dump(item, indent + 2, "", lines)
        else:
            lines.append(f"{start} {scalar_text(item)}")
        prefix = ""


def scalar_text(value: Value) -> str:
    """One scalar (or an empty list or mapping) as canonical YAML."""
    if value is None:
        return "null"
    if value is True or value is False:
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _float_text(value)
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _YAML_1_1_WORDS and len(value) <= 200
        return value if plain else quoted(value)
    return "[]" if isinstance(value, list) else "{}"


def _float_text(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    text = repr(value)
    mantissa, sign, exponent = text.partition("e")
    # 1e-05 is text to YAML 1.1 readers, 1.0e-05 is a number to all.
    return f"{mantissa}.0e{exponent}" if sign and "." not in mantissa else text


def quoted(text: str) -> str:
    """Text in double quotes, on one line, with escapes that every YAML reader knows."""
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    code = ord(character)
    if character.isprintable() and code not in (0xFFFE, 0xFFFF):
        return character
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


# What a recipe lacks, where two are compared.
ABSENT = object()


def shown_value(value: Any) -> str:
    """A value of a recipe as it would be written there, on one line."""
    if value is ABSENT:
        return "(absent)"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(shown_value(item) for item in value) + "]"
    return scalar_text(value)
