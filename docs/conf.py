"""The site: `sphinx-build -W docs site` (extra `docs`). Pages are Markdown that also reads on its own.

The parts of the site are the sections of README.md. The references of commands, recipe fields and Python names are
written into `docs/generated` before each build. Nothing is loaded from elsewhere: furo uses fonts of the system.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import click
import typer

import ups

DOCS = Path(__file__).parent
GENERATED = DOCS / "generated"
PARTS = ("Start", "Guides", "Reference", "Evidence")

project = "Universal Physics Stack"
version = release = ups.__version__
root_doc = "README"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["figures"]
myst_heading_anchors = 4
default_role = "code"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 100
autodoc_member_order = "bysource"
suppress_warnings = ["misc.highlighting_failure"]  # transcripts and settings with `...`
html_theme = "furo"
html_title = project
html_extra_path = ["../llms.txt"]
html_theme_options = {"navigation_with_keys": True}


def setup(app: Any) -> None:
    """Called by Sphinx."""
    write_references()
    app.connect("source-read", prepare)
    app.connect("autodoc-process-docstring", literal_stars)
    app.connect("build-finished", add_index)


def prepare(app: Any, name: str, source: list[str]) -> None:
    """Tables of contents for the index pages; files of the sample package; names instead of links to other files."""
    text = re.sub(r"<!-- file: (\S+) -->\n(.*)", with_content, source[0])
    for label, target in re.findall(r"\[([^\]]+)\]\(((?:\.\./)+[^)#]*)[^)]*\)", text):
        if not ((DOCS / name).parent / target).resolve().is_relative_to(DOCS):
            text = re.sub(rf"\[{re.escape(label)}\]\({re.escape(target)}[^)]*\)", label, text)
    if name == "README":
        for part in PARTS:
            pages = re.findall(r"\]\(([\w/-]+)\.md\)", re.split(rf"^## {part}$", text, flags=re.M)[1].split("\n## ")[0])
            pages += [f"generated/{one}" for one in ("commands", "recipe", "python") if part == "Reference"]
            text += contents(part, dict.fromkeys(pages))
    elif name == "decisions/README":
        text += contents("", sorted(page.stem for page in (DOCS / "decisions").glob("0*.md")))
    source[0] = text


def with_content(link: re.Match[str]) -> str:
    """The content of a file under its name."""
    return f"{link[2]}\n\n```python\n{(DOCS.parent / link[1]).read_text()}```"


def contents(caption: str, pages: Any) -> str:
    """A table of contents that shows in the side bar only."""
    return "\n\n```{toctree}\n:hidden:\n" + (f":caption: {caption}\n" if caption else "") + "\n".join(pages) + "\n```\n"


def literal_stars(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain text: a star is a star, and a line `name: meaning` begins a paragraph."""
    named = re.compile(r"`?\w+`?(, `?\w+`?)*: ")
    lines[:] = [text for line in lines for text in ([""] if named.match(line) else []) + [line.replace("*", r"\*")]]


def add_index(app: Any, error: Exception | None) -> None:
    """The start page under the name that servers look for."""
    start = Path(app.outdir) / "README.html"
    if error is None and start.exists():
        shutil.copy(start, start.with_name("index.html"))


def write_references() -> None:
    """The pages that are made from the program."""
    GENERATED.mkdir(exist_ok=True)
    (GENERATED / "commands.md").write_text(commands())
    (GENERATED / "recipe.md").write_text(recipe())
    (GENERATED / "python.md").write_text(python())


def commands() -> str:
    """Every command with its arguments and options."""
    from ups.cli.main import COMMANDS

    text = "# Commands\n\nAs `ups COMMAND --help` says it. [Exit codes](../exit-codes.md).\n"
    for row in COMMANDS:
        text += command(f"ups {row.name}", typer.main.get_command(row.app()), 2)
    return text


def command(name: str, one: Any, level: int) -> str:
    text = f"\n{'#' * level} {name}\n\n{plain(one.help)}\n"
    if isinstance(one, click.Group) or hasattr(one, "commands"):
        return text + "".join(command(f"{name} {key}", inner, level + 1) for key, inner in one.commands.items())
    rows = []
    for parameter in one.params:
        names = ", ".join(f"`{word}`" for word in parameter.opts + parameter.secondary_opts)
        kind = parameter.param_type_name == "argument"
        rows.append(f"| {f'`{parameter.name.upper()}`' if kind else names} | {plain(getattr(parameter, 'help', ''))} |")
    return text + ("\n| argument or option | meaning |\n|---|---|\n" + "\n".join(rows) + "\n" if rows else "")


def recipe() -> str:
    """Every field of a recipe, section by section."""
    schema = json.loads((DOCS / "recipe.schema.json").read_text())
    text = "# Recipe fields\n\nOur own; `ups config schema` adds installed ones. [Recipes](../recipes.md).\n"
    sections = {"The recipe": schema} | schema.get("$defs", {})
    for name, section in sections.items():
        fields = section.get("properties")
        if not fields:
            continue
        text += f"\n## {name}\n\n{plain(section.get('description'))}\n\n| field | default | meaning |\n|---|---|---|\n"
        for key, field in fields.items():
            default = json.dumps(field["default"]) if "default" in field else ""
            unit = f" ({field['unit']})" if field.get("unit") else ""
            text += f"| `{key}` | {f'`{default}`' if default else ''} | {plain(field.get('description'))}{unit} |\n"
    return text


def python() -> str:
    """The public names of `import ups`."""
    text = "# Python\n\nThe names of `import ups`. [The library](../library.md) shows how they are used.\n"
    for name in sorted(set(ups.__all__) - {"__version__", "Recipe"}, key=str.lower):
        kind = "autoclass" if isinstance(getattr(ups, name), type) else "autofunction"
        members = "   :members:\n" if kind == "autoclass" else ""
        text += f"\n## `ups.{name}`\n\n```{{eval-rst}}\n.. {kind}:: ups.{name}\n{members}```\n"
    return text


def plain(text: str | None) -> str:
    """Help text as one line of a Markdown table."""
    return " ".join((text or "").split()).replace("|", r"\|").replace("<", r"\<").replace("*", r"\*")
