"""Where in a person's code, or in ours, something went wrong: the innermost frame that somebody here can change.

Frames of the standard library and of installed packages are skipped if there is another one: "torch/nn/modules/
module.py:1751" shows nobody what to fix. Reads live tracebacks and the text that faulthandler and workers leave behind.
"""

from __future__ import annotations

import itertools
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ups.errors import UpsError

_BACKGROUND = "ups/training/background.py"
PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARIES = tuple({str(Path(p).resolve()) for key in ("stdlib", "platstdlib") if (p := sysconfig.get_path(key))})
_ORIGIN = "ups_origin"
_INSTALLED = ("/site-packages/", "/dist-packages/")
_FRAME_TEXT = re.compile(r'^\s*File "(?P<path>[^"]+)", line (?P<line>\d+)(?:,)? in (?P<function>.+?)\s*$', re.MULTILINE)
_CURRENT_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack."""

    path: str
    line: int
    function: str

    @property
    def ours(self) -> bool:
        """Whether somebody who reads the message can change this line: the person's code or this package."""
        if self.path.startswith("<"):
            return False
        path = str(Path(self.path).resolve())
        if path.startswith(f"{PACKAGE}/"):
            return True
        return not any(mark in path for mark in _INSTALLED) and not path.startswith(tuple(f"{p}/" for p in _LIBRARIES))

    def short(self) -> str:
        """path:line, relative to this package or to the working directory where it lies inside."""
        path = Path(self.path)
        for base in (PACKAGE, Path.cwd()):
            if path.is_relative_to(base):
                path = path.relative_to(base)
                break
        return f"{path}:{self.line}".replace(" ", "_")


def frames_of_traceback(trace: TracebackType | None) -> list[Frame]:
    """Frames of a traceback, outermost first."""
    frames = []
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append(Frame(code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return frames


def frames_of_text(text: str) -> list[Frame]:
    """Frames in the order in which a printed traceback or a faulthandler dump has them."""
    return [Frame(m["path"], int(m["line"]), m["function"]) for m in _FRAME_TEXT.finditer(text)]


def innermost(frames: Iterable[Frame]) -> Frame | None:
    """The innermost frame that somebody can change, else the innermost one; `frames` outermost first."""
    known = list(frames)
    own = [frame for frame in known if frame.ours]
    return own[-1] if own else known[-1] if known else None


def location_of_error(error: BaseException) -> Frame | None:
    """Where an exception was raised; for one that crossed from a loader worker, where the worker raised it.

    An error that ups raised `from` another one is reported at the place of that other one, if somebody can change it:
    what wraps a reader's mistake is not the mistake.
    """
    origin = getattr(error, _ORIGIN, None)
    if isinstance(origin, Frame):
        return origin
    if isinstance(error, UpsError) and error.__cause__ is not None:
        frame = location_of_error(error.__cause__)
        if frame is not None and frame.ours:
            return frame
    text = str(error)
    if "Original Traceback" in text:
        # torch prints the worker's traceback, outermost frame first, inside the message.
        frame = innermost(frames_of_text(text[text.index("Original Traceback") :]))
        if frame is not None:
            return frame
    return innermost(frames_of_traceback(error.__traceback__))


def set_origin(error: BaseException, frame: Frame | None) -> None:
    """Say where an error that reports another process was really raised; `location_of_error` then names that."""
    if frame is not None:
        setattr(error, _ORIGIN, frame)


def location_of_dump(text: str) -> Frame | None:
    """Where the crashed or stalled thread was, from the last faulthandler dump in `text`."""
    return innermost(reversed(frames_of_dump(text)))


def frames_of_dump(text: str) -> list[Frame]:
    """Frames of the thread that matters in the last faulthandler dump in `text`, innermost first.

    faulthandler prints the innermost frame first and marks the thread that got the signal as "Current thread"; the
    main thread comes last where it is not the current one. Where that thread only waits for the background thread of
    the saves, the background thread is the one that matters.
    """
    blocks = list(_blocks(text))
    if not blocks:
        return []
    marked = [number for number, (title, _) in enumerate(blocks) if title.startswith("Current")]
    chosen = marked[-1] if marked else len(blocks) - 1
    frames = frames_of_text(blocks[chosen][1])
    if any(frame.path.endswith(_BACKGROUND) for frame in frames):
        of_this_dump = blocks[marked[-2] + 1 if len(marked) > 1 else 0 : chosen]
        for others in (frames_of_text(body) for _, body in of_this_dump):
            if any(frame.path.endswith(_BACKGROUND) for frame in others):
                return others
    return frames


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    starts = [match.start() for match in _CURRENT_THREAD.finditer(text)]
    for start, end in itertools.pairwise([*starts, len(text)]):
        title, _, body = text[start:end].partition("\n")
        # What follows a blank line (list of extension modules) is not part of the stack.
        yield title, body.split("\n\n")[0]
