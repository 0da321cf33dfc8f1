"""Why a rank died, written down by the rank itself before anything else happens; and where in the code it was.

`install_from_environment` comes first in a rank, before torch is imported. From then on an exception that nothing
catches becomes a failure record, a crash in native code leaves its Python stack, and SIGUSR1 prints the stacks of all
threads, each into the rank's own files:

    failures/attempt_0/rank_00003.json          the failure record (exceptions)
    failures/attempt_0/rank_00003.crash.txt     faulthandler: SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL
    failures/attempt_0/rank_00003.stacks.txt    answers to SIGUSR1
    failures/attempt_0/rank_00003.exit.json     exit code and time of death (written by `rank_wrapper`)
    failures/attempt_0/rank_00003.worker_00.*   the same of a loader worker: .json, and .crash.txt for both dumps

A location is the innermost frame that the reader can change. Frames of the standard library and of installed packages
are skipped if there is another one: "torch/nn/modules/module.py:1751" explains nothing. Locations are read from
live tracebacks and from the text that faulthandler and workers leave behind. Names of causes are in `causes.py`; the
first cause among the ranks is found by `ups.supervise`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ups.errors import UpsError
from ups.record import causes
from ups.record.blackbox import BlackBox, Phase, ring_path
from ups.record.files import read_object, write_file_atomically
from ups.record.processes import status_fields
from ups.record.run_dir import RunDir

_BACKGROUND = "ups/training/checkpoint.py"
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
        """Whether the reader of the message can change this line: user code or this package."""
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
    """The innermost frame that the reader can change, else the innermost one; `frames` outermost first."""
    known = list(frames)
    own = [frame for frame in known if frame.ours]
    return own[-1] if own else known[-1] if known else None


def location_of_error(error: BaseException) -> Frame | None:
    """Where an exception was raised.

    An error that ups raised `from` another one is reported at the location of that one, if the reader can change it:
    what wraps a reader's mistake is not the mistake.
    """
    origin = getattr(error, _ORIGIN, None)
    if isinstance(origin, Frame):
        return origin
    if isinstance(error, UpsError) and error.__cause__ is not None:
        frame = location_of_error(error.__cause__)
        if frame is not None and frame.ours:
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


FORMAT_VERSION = 1
_MAX_TEXT = 20_000
_RESERVED_DESCRIPTORS = 4
_STEM_VARIABLE = "UPS_FAILURE_STEM"


class Recorder:
    """The failure recorder of this process; made by `install`."""

    def __init__(self, stem: Path, rank: int, world_size: int, attempt: int) -> None:
        self.stem = stem
        self.rank = rank
        self.world_size = world_size
        self.attempt = attempt
        self.box: BlackBox | None = None
        self._lock = threading.Lock()
        self._written = False
        self._files: list[IO[str]] = []
        self._reserve: list[int] = []

    def record(self, error: BaseException, trace: TracebackType | None = None, *, fatal: bool = True) -> None:
        """Write the failure record of `error`; the first fatal one stays, later ones are its consequences.

        Never raises: what happens here must not hide what happened there.
        """
        suffix = ".json" if fatal else ".thread.json"
        with self._lock:
            if fatal and self._written:
                return
            self._written = self._written or fatal
            self._free_descriptors()
            try:
                document = self._describe(error, trace, fatal)
                content = (json.dumps(document, indent=1) + "\n").encode()
                self._write(suffix, content)
            except Exception as problem:  # noqa: BLE001 - see above
                with contextlib.suppress(Exception):
                    sys.stderr.write(f"ups: cannot write the failure record: {problem!r}\n")

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Record what leaves the block, before any `finally` around it closes a connection and misleads the peers."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.record(error)
            raise

    def _write(self, suffix: str, content: bytes) -> None:
        """Next to the black box first: there the supervisor sees it at once, and a full disk does not matter."""
        path = self.stem.with_name(self.stem.name + suffix)
        shared = os.environ.get("UPS_BLACKBOX_DIR")
        if shared:
            with contextlib.suppress(OSError, UpsError):
                write_file_atomically(Path(shared) / path.name, content)
        if path.parents[2].is_dir():  # a run directory that was moved away is not made again for this
            path.parent.mkdir(parents=True, exist_ok=True)
        write_file_atomically(path, content)

    def _free_descriptors(self) -> None:
        """Free a file handle to write: "too many open files" is a reason to die, too, and must be recorded."""
        while self._reserve:
            os.close(self._reserve.pop())

    def _describe(self, error: BaseException, trace: TracebackType | None, fatal: bool) -> dict[str, Any]:
        frame = location_of_error(error if trace is None else error.with_traceback(trace))
        document: dict[str, Any] = {
            "format": FORMAT_VERSION,
            "rank": self.rank,
            "world": self.world_size,
            "host": os.uname().nodename,
            "attempt": self.attempt,
            "pid": os.getpid(),
            "time_monotonic_ns": time.monotonic_ns(),
            "time_wall": time.time(),
            "fatal": fatal,
            "cascade": causes.is_cascade(error),
            "cause": causes.cause_of_error(error),
            "exception": type(error).__name__,
            "message": str(error)[:_MAX_TEXT],
            "hint": error.hint if isinstance(error, UpsError) else "",
            "exit_code": error.exit_code if isinstance(error, UpsError) else 1,
            "at": frame.short() if frame else "-",
            "frame": asdict(frame) if frame else None,
            "traceback": "".join(traceback.format_exception(error))[-_MAX_TEXT:],
            "threads": _stacks_of_threads(),
            "memory": memory_of_process(),
        }
        last = None if self.box is None else self.box.last
        document["phase"] = Phase.INIT.label if last is None else last.phase.label
        return document | {key: getattr(last, key, 0) for key in ("step", "stage", "batch", "collective")}

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            self.record(error, trace)
        sys.__excepthook__(kind, error, trace)

    def _thread_hook(self, args: threading.ExceptHookArgs) -> None:
        # A thread's exception does not end the process; it is kept because it often explains what ends it later.
        if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
            self.record(args.exc_value, args.exc_traceback, fatal=False)
        threading.__excepthook__(args)

    def open_dumps(self, *, one_file: bool = False) -> None:
        """Point faulthandler at this process's own files."""
        self.stem.parent.mkdir(parents=True, exist_ok=True)
        crash = self.stem.with_name(self.stem.name + ".crash.txt").open("a")
        stacks = crash if one_file else self.stem.with_name(self.stem.name + ".stacks.txt").open("a")
        self._files = [crash, stacks]  # faulthandler keeps only the descriptors
        with contextlib.suppress(OSError):
            self._reserve = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(_RESERVED_DESCRIPTORS)]
        faulthandler.enable(file=crash, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True, chain=False)


def _launched_as() -> tuple[int, int, int]:
    """Rank, number of ranks and attempt, read without torch and unchecked: the runtime checks them later."""
    rank, world_size, attempt = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "UPS_ATTEMPT"))
    return int(rank or 0), int(world_size or 1), int(attempt or 0)


def install_from_environment(run_dir: Path) -> Recorder:
    """Open black box and failure recorder of this rank from the variables that the launcher set.

    To be called before torch is imported: it must work when importing torch is what crashes. Without UPS_BLACKBOX_DIR
    (no supervisor) the ring lies in the run directory.
    """
    rank, world_size, attempt = _launched_as()
    recorder = Recorder(RunDir(run_dir.resolve()).failure_stem(attempt, rank), rank, world_size, attempt)
    os.environ[_STEM_VARIABLE] = str(recorder.stem)
    recorder.open_dumps()
    sys.excepthook, threading.excepthook = recorder._hook, recorder._thread_hook
    directory = Path(os.environ.get("UPS_BLACKBOX_DIR") or RunDir(run_dir).blackbox)
    recorder.box = BlackBox.create(ring_path(directory, rank), rank=rank, world_size=world_size, attempt=attempt)
    return recorder


def worker_stem(number: int) -> Path | None:
    """The common beginning of the failure files of a loader worker of this rank; None outside a recorded rank."""
    stem = os.environ.get(_STEM_VARIABLE)
    return Path(f"{stem}.worker_{number:02d}") if stem else None


def install_in_worker(number: int) -> Recorder | None:
    """Make a loader worker record its own failure next to its rank; does nothing outside a recorded rank.

    One file takes both crashes and answers to SIGUSR1: there may be many workers, and almost none ever writes.
    """
    stem = worker_stem(number)
    if stem is None:
        return None
    recorder = Recorder(stem, *_launched_as())
    recorder.open_dumps(one_file=True)
    sys.excepthook = recorder._hook
    return recorder


def read_failure(stem: Path, shared: Path | None = None) -> dict[str, Any] | None:
    """The failure record of a rank, None if there is none or it cannot be read; `shared` is looked at first."""
    name = stem.name + ".json"
    for directory in (shared, stem.parent):
        if directory is None:
            continue
        document = read_object(directory / name)
        if document is not None and document.get("format") == FORMAT_VERSION:
            return document
    return None


def memory_of_process(pid: int | str = "self") -> dict[str, int]:
    """Memory of a process in bytes: resident, its peak, and the limit and use of accelerators if torch is loaded."""
    names = {"VmRSS": "resident", "VmHWM": "peak", "VmSize": "virtual", "RssShmem": "shared"}
    fields = status_fields(pid)
    memory = {name: int(fields[key].split()[0]) * 1024 for key, name in names.items() if key in fields}
    torch = sys.modules.get("torch")
    if pid == "self" and torch is not None:
        with contextlib.suppress(Exception):
            if torch.cuda.is_initialized():
                memory["device_allocated"] = int(torch.cuda.memory_allocated())
                memory["device_reserved"] = int(torch.cuda.memory_reserved())
    return memory


def _stacks_of_threads() -> list[dict[str, str]]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        {"name": names.get(ident, str(ident)), "stack": "".join(traceback.format_stack(frame))[-_MAX_TEXT:]}
        for ident, frame in list(sys._current_frames().items())[:32]
    ]
