"""The front door: grouped help, lazy commands, one line and one exit code for whatever goes wrong."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import typer

from ups.cli import main as front
from ups.cli.output import keep_traceback, log_path, print_error, table
from ups.errors import EXIT_CODES, ConfigError, UpsError

ROOT = Path(__file__).parents[3]
UPS = [sys.executable, "-m", "ups.cli.main"]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of our own, added as the documentation of main.py says: a module with an app, and a row."""
    (tmp_path / "planted_command.py").write_text(
        textwrap.dedent(
            """
            import typer
            from ups.cli.options import JsonOption, new_app
            from ups.errors import DataError

            app = new_app()

            @app.command()
            def planted(what: str, json: JsonOption = False) -> None:
                '''Goes wrong as asked.'''
                if what == "known":
                    raise DataError("store.zarr: no attribute 'ups'", hint="ups data inspect store.zarr")
                if what == "unknown":
                    raise ZeroDivisionError("boom")
                if what == "memory":
                    bytearray(1 << 60)
                if what == "interrupt":
                    raise KeyboardInterrupt
                if what == "exit":
                    raise typer.Exit(9)
                if what == "escape":
                    raise DataError("\\x1b[31mred\\x07")
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    row = front.Command("planted", "planted_command", "goes wrong as asked", front.PREPARE)
    monkeypatch.setattr(front, "COMMANDS", (*front.COMMANDS, row))


def test_help_groups_commands_by_what_a_person_wants(capsys: pytest.CaptureFixture[str], planted: None) -> None:
    assert front.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^Get ready\n  config +show, check or compare", text, re.MULTILINE)
    assert re.search(r"^  planted +goes wrong as asked$", text, re.MULTILINE)
    for code, meaning in EXIT_CODES.items():
        assert re.search(rf"^ +{code}  {re.escape(meaning)}$", text, re.MULTILINE)
    assert max(len(line) for line in text.splitlines() if "Tracebacks" not in line) <= 100


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert front.run([]) == 0
    assert capsys.readouterr().out.startswith("ups: train one neural simulator")


def test_every_row_of_the_table_has_its_module() -> None:
    assert [row.name for row in front.COMMANDS if not isinstance(row.app(), typer.Typer)] == []


@pytest.mark.parametrize("name", front.available())
def test_a_command_shows_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert front.run([name, "--help"]) == 0
    assert f"Usage: ups {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["confg"], "error: usage: no such command 'confg'; did you mean 'config'? -> ups --help"),
        (["zzz"], "error: usage: no such command 'zzz' -> ups --help"),
        (["config", "check"], "error: usage: Missing argument 'RECIPE' -> ups config check --help"),
        (["config", "check", "x", "--bogus"], "error: usage: No such option: --bogus -> ups config check --help"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert front.run(arguments) == 2
    assert capsys.readouterr().err == f"{line}\n"


def test_a_group_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert front.run(["config"]) == 2
    assert "Print a recipe in full." in capsys.readouterr().err


def test_a_known_error_is_one_line_and_its_traceback_is_in_the_log(
    capsys: pytest.CaptureFixture[str], planted: None
) -> None:
    assert front.run(["planted", "known"]) == 4
    shown = capsys.readouterr()
    assert shown.err == "error: data: store.zarr: no attribute 'ups' -> ups data inspect store.zarr\n"
    assert shown.out == ""
    log = log_path().read_text()
    assert "Traceback (most recent call last)" in log
    assert "ups planted\n" in log
    assert log_path().stat().st_mode & 0o777 == 0o600


def test_with_json_an_error_is_also_an_object(capsys: pytest.CaptureFixture[str], planted: None) -> None:
    assert front.run(["planted", "known", "--json"]) == 4
    shown = capsys.readouterr()
    error = json.loads(shown.out)["error"]
    assert (error["cause"], error["exit_code"], error["hint"]) == ("data", 4, "ups data inspect store.zarr")
    assert len(shown.err.splitlines()) == 1


def test_an_unknown_error_keeps_its_traceback(capsys: pytest.CaptureFixture[str], planted: None) -> None:
    assert front.run(["planted", "unknown"]) == 1
    shown = capsys.readouterr().err
    assert "planted_command.py" in shown
    assert shown.splitlines()[-1].startswith("error: unexpected ZeroDivisionError: ")
    assert str(log_path()) in shown
    assert "boom" in log_path().read_text()


def test_too_little_memory_is_no_bug(capsys: pytest.CaptureFixture[str], planted: None) -> None:
    assert front.run(["planted", "memory"]) == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: environment: this process got no more memory from the system -> raise its limit")


def test_an_interrupt_and_an_exit_have_their_codes(capsys: pytest.CaptureFixture[str], planted: None) -> None:
    assert front.run(["planted", "interrupt"]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"
    assert front.run(["planted", "exit"]) == 9
    assert front.run(["planted", "nothing"]) == 0


def test_an_error_cannot_write_to_the_terminal(capsys: pytest.CaptureFixture[str], planted: None) -> None:
    front.run(["planted", "escape"])
    assert capsys.readouterr().err == "error: data: \\x1b[31mred\\x07\n"


@pytest.mark.parametrize("folder", ["/dev/null/x", "/proc/nowhere"])
def test_a_log_that_cannot_be_written_is_no_second_error(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, planted: None
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", folder)
    assert front.run(["planted", "known"]) == 4
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_log_stays_small() -> None:
    for _ in range(3):
        keep_traceback(ConfigError("x" * 1_100_000), "config")
    assert sorted(p.name for p in log_path().parent.iterdir()) == ["errors.log", "errors.log.1"]


def test_every_error_class_has_a_documented_exit_code() -> None:
    def all_kinds(kind: type[UpsError]) -> list[type[UpsError]]:
        return [kind, *(inner for sub in kind.__subclasses__() for inner in all_kinds(sub))]

    page = (ROOT / "docs/exit-codes.md").read_text()
    for kind in all_kinds(UpsError):
        assert kind.exit_code in EXIT_CODES
    for code, meaning in EXIT_CODES.items():
        assert f"| {code} | {meaning} |" in page


def test_text_that_the_stream_cannot_show_is_escaped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with open(tmp_path / "err", "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        print_error(ConfigError("d\u00e9mo"))
    assert (tmp_path / "err").read_text() == "error: config: d\\xe9mo\n"


def test_a_table_is_aligned() -> None:
    assert table([("a", "bb", "c"), ("aaa", "b", "c")]) == "  a    bb  c\n  aaa  b   c"
    assert table([]) == ""


@pytest.mark.processes
@pytest.mark.parametrize("how", ["say(text)", "print(text)"])
def test_nobody_reading_is_quiet(how: str, tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(
        "from ups.cli.options import new_app\nfrom ups.cli.output import say\napp = new_app()\n\n"
        f"@app.command()\ndef talk() -> None:\n    text = 'hello'\n    {how}\n"
    )
    script = (
        "from ups.cli import main as front\n"
        "front.COMMANDS = (front.Command('talk', 'talk', '', front.PREPARE),)\nfront.main(['talk'])"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", script],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=30,
        # Buffered, as on any terminal: the unread text is still there when the interpreter leaves.
        env={**os.environ, "PYTHONUNBUFFERED": "", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.processes
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_named() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*UPS, "config", "schema"], stdout=full, stderr=subprocess.PIPE, timeout=30, text=True)
    assert done.returncode == 5
    assert done.stderr == (
        "error: environment: cannot write the output: No space left on device -> is the disk full?\n"
    )


@pytest.mark.processes
def test_works_without_any_standard_stream() -> None:
    done = subprocess.run(["/bin/sh", "-c", '"$@" <&- >&- 2>&-', "sh", *UPS, "--help"], timeout=30)
    assert done.returncode == 0


def on_a_terminal(**environment: str) -> str:
    master, slave = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "TERM")} | {"TERM": "xterm"} | environment
    child = subprocess.Popen([*UPS, "--version", "--verbose"], stdout=slave, stderr=slave, stdin=slave, env=env)
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 65536):
            shown += part
    except OSError:  # Linux says EIO when the last writer has gone
        pass
    os.close(master)
    assert child.wait(30) == 0
    return shown.decode()


@pytest.mark.processes
def test_color_only_on_a_terminal_and_without_no_color() -> None:
    assert "\x1b[1m" in on_a_terminal()
    assert "\x1b" not in on_a_terminal(NO_COLOR="1")
    piped = subprocess.run([*UPS, "--version", "--verbose"], capture_output=True, timeout=30)
    assert b"\x1b" not in piped.stdout
