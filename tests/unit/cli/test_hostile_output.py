"""Untrusted text through the commands: control characters are shown, never sent; only `styled` makes styles."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tests.support.mixture import write_mixture
from tests.unit.inference.test_bundle import recommit
from ups.cli import output
from ups.cli.main import run
from ups.errors import DataError
from ups.record.manifest import COMMITTED_NAME

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r\x7f\x1b[1;31mred"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def opened(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Not a fixture: the capture of pytest would take its place again."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return stream


def unsafe(text: str) -> list[str]:
    return [c for c in text if not c.isprintable() and c != "\n"]


def test_styles_are_sent_and_other_sequences_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened(monkeypatch)
    output.say(f"{output.styled('head', 'bold')} {EVIL}")
    text = terminal.getvalue()
    assert text.startswith("\x1b[1mhead\x1b[0m \\x1b]0;owned\\x07\\x1b[2J")
    assert not unsafe(text.removeprefix("\x1b[1mhead\x1b[0m "))


@pytest.mark.parametrize("how", ["say", "note", "table", "error", "json"])
def test_every_way_to_print_escapes(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    terminal = opened(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    if how == "table":
        output.say(output.table([[EVIL + "\n", "a\tb"], ["x", EVIL]]))
        assert terminal.getvalue().count("\n") == 2
    elif how == "error":
        output.print_error(DataError(EVIL, hint=EVIL), as_json=True)
    elif how == "json":
        output.report({EVIL: [EVIL, "\ud800"]})
        assert json.loads(terminal.getvalue()) == {EVIL: [EVIL, "\ud800"]}
    else:
        getattr(output, how)(EVIL)
    assert terminal.getvalue()
    assert not unsafe(terminal.getvalue())


def test_text_that_looks_like_the_mark_of_a_style_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened(monkeypatch)
    output.say("\x1b0123456789abcdef[1m")
    assert not unsafe(terminal.getvalue())


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_store_cannot_write_to_the_terminal_through_inspect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    store = Path(write_mixture(tmp_path)[0]["path"])
    path = store / "zarr.json"
    document = json.loads(path.read_text())
    task = document["attributes"]["ups"]["task"]
    task["equation"], task["time_unit"] = EVIL + "\nidentity  forged", EVIL[:32]
    for part in (*task["fields"], *task["axes"], *task["parameters"]):
        part["unit"] = EVIL[:32]
    path.write_text(json.dumps(document))
    if (store / COMMITTED_NAME).exists():
        recommit(store)
    assert run(["data", "inspect", str(store), *options]) == 0
    text = capsys.readouterr().out
    assert "owned" in text
    assert not unsafe(text)
    assert not [line for line in text.splitlines() if line.lstrip().startswith("identity  forged")]


@pytest.mark.parametrize("name", ["a\x1b[31m", "\x9b31m", "a\nb"])
def test_names_in_a_store_that_are_none_are_refused_in_plain_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    store = Path(write_mixture(tmp_path)[0]["path"])
    path = store / "zarr.json"
    sound = path.read_text()
    for part in ("task", "field"):
        document = json.loads(sound)
        task = document["attributes"]["ups"]["task"]
        (task if part == "task" else task["fields"][0])["name"] = name
        path.write_text(json.dumps(document))
        assert run(["data", "inspect", str(store)]) == 4
        assert not unsafe(capsys.readouterr().err)
