"""Where messages of `logging.getLogger("ups...")` go. The one place that configures logging.

A message is a diagnosis (a save that failed, a checkpoint that is passed over), never a result. In a process of ours it
is shown: the command line writes `warning: ...` to standard error, a rank or a probe writes to its own log, with time
and logger. A library shows nothing: `import ups` leaves a NullHandler, and the program that imports it configures
logging as it likes. A progress line shows messages above itself while it is there.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

from ups.record.text import printable

Write = Callable[[logging.LogRecord], None]


class _Shown(logging.Handler):
    """Hands each message to the writer that was set last."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.writers: list[Write] = []

    def emit(self, record: logging.LogRecord) -> None:
        # Who cannot be told is not told: a closed terminal or a full disk must not stop what is being reported.
        with contextlib.suppress(Exception):
            self.writers[-1](record)


_SHOWN = _Shown()


def show_log(write: Write, level: int = logging.WARNING) -> None:
    """From now on hand messages of this level and above to `write`. For the entry of a process."""
    logger = logging.getLogger("ups")
    _SHOWN.setLevel(level)
    _SHOWN.writers[:] = [write]
    logger.addHandler(_SHOWN)
    if not logger.isEnabledFor(level):
        logger.setLevel(level)


@contextlib.contextmanager
def log_shown_by(write: Write) -> Iterator[None]:
    """Hand messages to `write` inside the block, in place of the writer outside it.

    Not if the program that imports ups has configured logging: then it shows them already.
    """
    logger = logging.getLogger("ups")
    if not _SHOWN.writers and _is_configured(logger):
        yield
        return
    _SHOWN.writers.append(write)
    logger.addHandler(_SHOWN)  # again is no harm
    try:
        yield
    finally:
        _SHOWN.writers.remove(write)
        if not _SHOWN.writers:
            logger.removeHandler(_SHOWN)


def _is_configured(logger: logging.Logger) -> bool:
    handlers = [*logger.handlers, *logging.getLogger().handlers]
    return any(not isinstance(handler, logging.NullHandler) for handler in handlers)


def short_line(record: logging.LogRecord) -> str:
    """A message as text: 'warning: ...'."""
    return f"{record.levelname.lower()}: {printable(record.getMessage())}"


def write_to_stderr(record: logging.LogRecord) -> None:
    """A message for the log of a rank, with time and logger; errors with their traceback."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
    text = f"{stamp} {record.name} {short_line(record)}"
    if record.exc_info:
        text += "\n" + logging.Formatter().formatException(record.exc_info)
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
