"""Every start of Python goes through one function: without -P, files of the current directory would be imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ups
from ups.record.processes import module_command

ROOT = Path(ups.__file__).parent
# Options of other programs; and scripts of rented machines, which export PYTHONSAFEPATH: their first Python may be too
# old for -P.
ALLOWED = {
    ("record/processes.py", "-m"),
    ("launch/job.py", "-c"),
    ("launch/job.py", "-m"),
    ("launch/kubernetes.py", "-c"),  # bash
}


def _texts(source: str) -> Iterator[str]:
    """String constants of a module that are no docstrings."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def starts(source: str) -> set[str]:
    """How a module says that Python is to be started: the words -m and -c, and lines of a shell with them."""
    return {
        word
        for text in _texts(source)
        for word in ("-m", "-c")
        if text == word or (re.search(rf"\bpython3? {word} ", text) and "usage: " not in text)
    }


def test_no_module_starts_python_by_itself() -> None:
    commands = {(str(path.relative_to(ROOT)), word) for path in ROOT.rglob("*.py") for word in starts(path.read_text())}
    assert commands == ALLOWED, "build the command with ups.record.processes.module_command"


@pytest.mark.parametrize("line", ['[sys.executable, "-m", "ups"]', '[python, "-c", text]', 'f"python3 -m ups {verb}"'])
def test_a_planted_start_is_found(line: str) -> None:
    assert starts(f"command = {line}\n")


def test_the_command_leaves_the_current_directory_out() -> None:
    assert module_command("ups", "train", python="python3") == ["python3", "-P", "-m", "ups", "train"]
