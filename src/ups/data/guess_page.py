"""A guessed description as a file for people: every line that is a guess says so, and why."""

from __future__ import annotations

from typing import Any

from ups.config.yaml_subset import scalar_text
from ups.data.guess import Guess
from ups.record.text import printable

_HEAD = """\
# What the arrays of {source} mean. Written by `ups init`; what stands here overrides what the file says.
# A line marked "guess" is not in the file: look at it. "check" marks those that most likely need you.
# All fields: docs/own-data.md
"""
_LATER = """\
# Known symmetries are used to show each sample in several positions: translation, reflection, rotation90, galilean.
symmetries: []
# For people; never guessed.
equation: ""
"""


def description_page(guess: Guess, source: str) -> str:
    """The text of a task.yaml."""
    values = guess.description.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    for shown, axis in zip(values["axes"], guess.description.axes, strict=True):
        shown["boundary"] = axis.boundary  # also where it is the default: a person may know better
    lines = [_HEAD.format(source=printable(source))]
    lines.append(f"name: {scalar_text(values['name'])}\n")
    for section in ("fields", "axes"):
        lines += [f"{section}:\n", *_entries(guess, section, values[section]), "\n"]
    lines.append(f"# What each dimension of the arrays is, in their order.\n{_line(guess, 'dims', values.get('dims'))}")
    lines.append("\n")
    for name in ("steady", "dt", "time_unit", "times", "cut_frames"):
        if name in values:
            lines.append(_line(guess, name, values[name]))
    lines.append("\n")
    if values.get("parameters"):
        lines += ["parameters:\n", *_entries(guess, "parameters", values["parameters"])]
    else:
        lines.append("parameters: [] # the file has no number for each trajectory, or for all\n")
    if guess.notes:
        lines += [f"# {printable(note)}\n" for note in guess.notes]
    lines.append("\n")
    if not values.get("steady"):
        lines.append(_line(guess, "conserved", values.get("conserved", [])))
    lines.append(_LATER)
    return "".join(lines)


def guess_lines(guess: Guess) -> list[tuple[str, str, str]]:
    """(field, value, why) of each line that is a guess or of interest, for a person."""
    values = guess.description.model_dump(mode="json")
    rows: list[tuple[str, str, str]] = []
    for path, why in guess.reasons.items():
        if not why:
            continue
        mark = "" if path in guess.sure else "check: " if path in guess.uncertain else "guess: "
        value = "" if path.endswith(".name") else _value_text(_at(values, path))
        rows.append((_shown_path(path, values), value, mark + printable(why)))
    return rows


def _shown_path(path: str, values: dict[str, Any]) -> str:
    parts = path.split(".")
    if len(parts) < 3:
        return path
    kind = {"fields": "field", "axes": "axis", "parameters": "parameter"}[parts[0]]
    name = values[parts[0]][int(parts[1])]["name"]
    return f"{kind} {name}" + ("" if parts[2] == "name" else f" {parts[2]}")


def _at(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = values[int(part)] if part.isdigit() else values.get(part)
    return values


def _value_text(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_value_text(item) for item in value) + "]"
    if value in ("y", "n"):
        return str(value)  # a name here and to YAML 1.2; only what other programs read too needs quotes
    return scalar_text(value)


def _entries(guess: Guess, section: str, entries: list[dict[str, Any]]) -> list[str]:
    lines = []
    for number, entry in enumerate(entries):
        for place, (name, value) in enumerate(entry.items()):
            lead = "  - " if place == 0 else "    "
            lines.append(lead + _line(guess, name, value, f"{section}.{number}.{name}"))
    return lines


def _line(guess: Guess, name: str, value: Any, path: str = "") -> str:
    path = path or name
    why = guess.reasons.get(path, "")
    mark = "" if path in guess.sure else "check: " if path in guess.uncertain else "guess: "
    comment = f" # {mark}{printable(why)}" if why else ""
    return f"{name}: {_value_text(value)}{comment}\n"
