"""Every command and option that the documents name exists."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import typer

from tests.docs.words import DOCS, ROOT
from ups.cli.main import COMMANDS

# Pages of decisions name commands of the past.
PAGES = [ROOT / "README.md", *(p for p in sorted(DOCS.rglob("*.md")) if not {"generated", "decisions"} & set(p.parts))]
# A call in a block of code or in backticks, up to a comment, a pipe or the end of the line.
CALL = re.compile(r"(?:^|`|\$ |&& |\| )ups ((?:[a-z][a-z-]*)(?: [^`\n#|&]*)?)", re.M)
OWN = {"--help", "--version", "--verbose", "--json"}


@cache
def commands() -> dict[str, Any]:
    return {row.name: typer.main.get_command(row.app()) for row in COMMANDS}


def unknown(call: str) -> str:
    """What of a call does not exist; '' if all of it does."""
    name, *words = call.split()
    if name not in commands():
        return name
    command = commands()[name]
    while getattr(command, "commands", None) and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return words[0] if re.fullmatch(r"[a-z-]+", words[0]) else ""
        command = command.commands[words.pop(0)]
    known = OWN | {option for one in command.params for option in one.opts + one.secondary_opts}
    for one in getattr(command, "commands", {}).values():
        known |= {option for parameter in one.params for option in parameter.opts + parameter.secondary_opts}
    named = [re.split(r"[=,.;:)\]]", word)[0] for word in words if re.match(r"--[a-z]|-[a-z]$", word)]
    return next((option for option in named if option not in known), "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_exist(page: Any) -> None:
    text = re.sub(r"\\\n\s*", " ", page.read_text())
    assert [(call, wrong) for call in CALL.findall(text) if (wrong := unknown(call))] == []


def test_a_wrong_option_is_noticed() -> None:
    assert unknown("train recipe.yaml --rank 2") == "--rank"
    assert unknown("trian recipe.yaml") == "trian"
    assert unknown("data generate burgers1d --small") == ""
