"""What a command prints and how an error looks: text or JSON on standard output, one line per error on standard error.

What is printed may come from an untrusted file: control characters are escaped here, for every command, so that no
name, unit or message can write to the terminal. Only `styled` makes escape sequences.

Color only on a terminal and only without NO_COLOR. Tracebacks of known errors go to a log, never to the person; a log
that cannot be written is never a second error.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from ups.errors import MachineError, UpsError
from ups.record.log import short_line
from ups.record.run_dir import home_directory
from ups.record.text import printable
from ups.run.progress_line import table as table

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_MAX_LOG_BYTES = 1_000_000
# Stands for ESC until a line is written. Not known to anybody who writes files: text cannot pretend to be a style.
_STYLE = f"\x1b{secrets.token_hex(8)}"


def color(stream: TextIO | None) -> bool:
    """Whether to color what goes to `stream` (https://no-color.org: any non-empty NO_COLOR turns it off)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return stream is not None and stream.isatty()


def styled(text: str, *styles: str, stream: TextIO | None = None) -> str:
    """`text` with terminal styles (`bold`, `dim`, `red`, `green`, `yellow`, `cyan`) where the stream shows them."""
    if not styles or not color(stream or sys.stdout):
        return text
    return f"{_STYLE}[{';'.join(_CODES[style] for style in styles)}m{text}{_STYLE}[0m"


def shown(text: str) -> str:
    """`text` as it may be sent to a terminal: styles as escape sequences, other control characters as text."""
    return "\x1b".join(printable(part, keep="\n\t") for part in text.split(_STYLE))


def say(text: str = "") -> None:
    """Print a line to a terminal or a pipe; characters that the stream cannot show are escaped."""
    _write(sys.stdout, text + "\n")


def note(text: str) -> None:
    """Print a line that is not a result (progress, advice) to standard error."""
    _write(sys.stderr, text + "\n")


def note_message(record: logging.LogRecord) -> None:
    """Print a message of `logging.getLogger("ups...")` to standard error, in yellow where that is shown."""
    note(styled(short_line(record), "yellow", stream=sys.stderr))


def report(data: Mapping[str, Any] | Sequence[Any]) -> None:
    """Print a result as JSON, for `--json`."""
    # JSON leaves DEL as it is.
    say(json.dumps(data, indent=2, ensure_ascii=True, default=str).replace("\x7f", "\\u007f"))


def print_error(error: UpsError, *, as_json: bool = False) -> None:
    """The error as one line on standard error (one more for each further mistake), with `--json` also as an object."""
    head = styled("error:", "bold", "red", stream=sys.stderr)
    others: tuple[str, ...] = getattr(error, "others", ())
    for line in (error.one_line(), *others):
        # A name in an untrusted file must not write to the terminal.
        note(f"{head} {printable(line)}")
    if as_json:
        details = {"cause": error.cause, "exit_code": error.exit_code, "message": error.message}
        details["hint"] = error.command_hint
        report({"error": {**details, "others": list(others)}})


def log_path() -> Path | None:
    """The file that keeps tracebacks: ups/errors.log in the XDG state directory; None without a home directory."""
    base, home = os.environ.get("XDG_STATE_HOME", ""), home_directory()
    root = Path(base) if os.path.isabs(base) else home and home / ".local/state"
    return root / "ups/errors.log" if root else None


def keep_traceback(error: BaseException, command: str) -> Path | None:
    """Append the traceback to the log; None if that was not possible. The file is private and bounded in size."""
    path = log_path()
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > _MAX_LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        text = f"=== {stamp} pid {os.getpid()} ups {command}\n{''.join(traceback.format_exception(error))}\n"
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, text.encode("utf-8", "backslashreplace"))
        finally:
            os.close(handle)
    except (OSError, RuntimeError):
        return None
    return path


def open_closed_streams() -> None:
    """Give every standard stream that the shell closed (`2>&-`) the null device, before anything else is opened.

    Otherwise the next file of the run would get the free number, and whatever a library prints would be written into
    it; and to Python a closed stream is None, which has no `write`.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            descriptor = os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def silence(*streams: TextIO | None) -> None:
    """Send what is still buffered to nowhere, so that the interpreter's last flush does not fail a second time."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in streams:
            if stream is not None:
                os.dup2(null, stream.fileno())
        os.close(null)
    except (OSError, ValueError):
        return


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:  # the shell closed it (>&-)
        return
    text = shown(text)
    encoding = stream.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        silence(stream)
        raise MachineError(f"cannot write the output: {error.strerror}", hint="is the disk full?") from None
