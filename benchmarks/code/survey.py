"""How heavy the source is, and everything that a user can type or import.

    python benchmarks/code/survey.py weight             # lines, files, function lengths, imports, dependencies
    python benchmarks/code/survey.py surface            # one line for each command, option, field, name, cause, heading

Both take `--checkout PATH` and read that checkout instead of this one. Two outputs of `surface` are compared by `diff`:

    diff <(python benchmarks/code/survey.py surface --checkout ../before) <(python benchmarks/code/survey.py surface)
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import io
import re
import statistics
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def docstring_lines(tree: ast.Module) -> set[int]:
    """Line numbers of all docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, *DEFINITIONS)) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines that hold code: neither blank, nor only a comment, nor a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(tree))


def own_imports(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Modules of ours that these nodes import."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "ups":
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "ups")


def imports_inside_functions(tree: ast.Module) -> int:
    """Import statements of our own modules inside functions, each counted once."""
    outer = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    statements = {id(child): child for node in outer for child in ast.walk(node)}
    return len(list(own_imports(iter(statements.values()))))


def has_cycle(arrows: set[tuple[str, str]]) -> bool:
    """Whether these dependencies form a cycle."""
    arrows = set(arrows)
    while arrows:
        sources = {source for source, _ in arrows}
        leaves = {arrow for arrow in arrows if arrow[1] not in sources}
        if not leaves:
            return True
        arrows -= leaves
    return False


def weight(checkout: Path) -> None:
    """Print what the source weighs."""
    source = checkout / "src/ups"
    files = sorted(source.rglob("*.py"))
    lines = code = inside = 0
    lengths: list[int] = []
    arrows: set[tuple[str, str]] = set()
    for path in files:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines += len(text.splitlines())
        code += code_lines(text, tree)
        inside += imports_inside_functions(tree)
        lengths += [
            (node.end_lineno or node.lineno) - node.lineno + 1 for node in ast.walk(tree) if isinstance(node, FUNCTIONS)
        ]
        home = path.relative_to(source).parts[0].removesuffix(".py")
        if home != "__init__":  # its names are found on first use
            targets = {module.split(".")[1] for module in own_imports(ast.walk(tree)) if "." in module}
            arrows |= {(home, target) for target in targets - {home}}
    lengths.sort()
    print(f"lines                                {lines:,}")
    print(f"lines of code                        {code:,}  (no blanks, comments, docstrings)")
    print(f"files                                {len(files)}")
    print(f"files below 50 lines                 {sum(len(path.read_text().splitlines()) < 50 for path in files)}")
    print(f"function lines, median               {statistics.median(lengths):.0f}")
    print(f"function lines, 99th percentile      {lengths[int(0.99 * len(lengths))]}")
    print(f"own imports inside functions         {inside}")
    print(f"dependencies between modules         {len(arrows)}")
    print(f"a cycle among them                   {'yes' if has_cycle(arrows) else 'no'}")


def commands(checkout: Path) -> Iterator[str]:
    """Each command with its arguments and options."""
    import typer

    table = importlib.import_module("ups.cli.main").COMMANDS

    def walk(command: Any, typed: str) -> Iterator[str]:
        yield f"command {typed}"
        for parameter in command.params:
            yield f"command {typed} {'/'.join([*parameter.opts, *parameter.secondary_opts])}"
        for name, child in getattr(command, "commands", {}).items():
            yield from walk(child, f"{typed} {name}")

    for row in table:
        module, _, name = row.module.partition(":")
        app = getattr(importlib.import_module(module if "." in module else f"ups.cli.{module}"), name or "app")
        yield from walk(typer.main.get_command(app), f"ups {row.name}")


def recipe_fields(checkout: Path) -> Iterator[str]:
    """Each field of a recipe, by the definition that holds it."""
    import json

    schema = json.loads((checkout / "docs/recipe.schema.json").read_text())
    for owner, definition in [("Recipe", schema), *schema.get("$defs", {}).items()]:
        for name in definition.get("properties", {}):
            yield f"recipe field {owner}.{name}"


def public_names(checkout: Path) -> Iterator[str]:
    """Each public name, the members of public classes, and each registered component."""
    ups = importlib.import_module("ups")
    for name in ups.__all__:
        value = getattr(ups, name)
        yield f"name ups.{name}"
        if inspect.isclass(value):
            members = [member for member in vars(value) if not member.startswith("_")]
            yield from (f"name ups.{name}.{member}" for member in members if not member.startswith("model_"))
        elif inspect.isfunction(value):
            yield from (f"name ups.{name}({parameter})" for parameter in inspect.signature(value).parameters)
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    for group, entries in project["entry-points"].items():
        yield from (f"component {group} {name}" for name in entries)
    yield from (f"extra {name}" for name in project["optional-dependencies"])


def causes_and_codes(checkout: Path) -> Iterator[str]:
    """Cause names with their exit codes, and environment variables that the source reads."""
    errors = importlib.import_module("ups.errors")
    for name, value in errors.EXIT_CODES.items():
        yield f"exit code {name} {value}"
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, errors.UpsError):
            yield f"error {name} {getattr(value, 'cause', '')}"
    text = "\n".join(path.read_text() for path in (checkout / "src/ups").rglob("*.py"))
    yield from (f"variable {name}" for name in set(re.findall(r"\bUPS_[A-Z][A-Z_]+\b", text)))
    causes = importlib.import_module("ups.record.causes").CAUSES
    yield from (f"cause {name}" for name in causes)


def documented(checkout: Path) -> Iterator[str]:
    """Headings of the documentation: what it says that the program does."""
    for path in sorted((checkout / "docs").glob("*.md")):
        for heading in re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE):
            yield f"page {path.name}: {heading}"


def surface(checkout: Path) -> None:
    """Print everything that a user can type, import or look up, sorted."""
    parts = (commands, recipe_fields, public_names, causes_and_codes, documented)
    for line in sorted({line for part in parts for line in part(checkout)}):
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("weight", "surface"))
    parser.add_argument("--checkout", type=Path, default=Path(__file__).parents[2])
    options = parser.parse_args()
    sys.path.insert(0, str(options.checkout.resolve() / "src"))
    {"weight": weight, "surface": surface}[options.what](options.checkout.resolve())


if __name__ == "__main__":
    main()
