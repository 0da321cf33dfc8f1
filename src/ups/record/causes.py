"""The stable names of causes: what `ups why` prints, what scripts match on, what docs/failures.md explains.

A cause is a name, with one detail in parentheses where there is one: `exception(FileNotFoundError)`, `signal(SIGSEGV)`.
Here they are made from exceptions and exit codes, and put in order; who saw what is for `ups.supervise` and the doctor.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from typing import Protocol, TypeVar

from ups.errors import UpsError, WorkerError

# name -> meaning; docs/failures.md has a section for each, and a test holds the two together.
CAUSES: dict[str, str] = {
    "exception": "the rank's code raised an exception that nothing caught",
    "out_of_memory": "the device or the host had no memory left",
    "signal": "the process crashed: a fault in native code",
    "killed": "something outside the run ended the process with a signal",
    "early_exit": "the process left with exit code 0 before its last step",
    "exit": "the process left with an exit code of its own, without an exception",
    "stopped": "the process, or a loader worker of it, was halted by a signal and never continued",
    "stalled": "the rank stood still for far longer than this phase has ever taken",
    "deadline": "a phase took longer than the time declared for it",
    "collective_mismatch": "the rank issued another collective than its peers, or skipped one",
    "worker_killed": "a loader worker of the rank was killed, crashed or left",
    "connection_lost": "ranks lost each other, and none of them recorded a reason",
    "host_lost": "a host of the run, or its supervisor, is gone, out of reach or stands still",
    "head_lost": "a host lost the supervisor of host 0, which leads the run; it ended its ranks and left",
    "launcher_failed": "a rank could not be started, or the wrapper process between it and the supervisor failed",
    "unproven": "all ranks left with exit code 0, but the success could not be proven",
    "supervisor_died": "the supervisor itself was killed; all ranks went with it",
    "supervisor_error": "the supervisor itself met an error; it ended all ranks before it left",
    "config": "the recipe or an override is wrong",
    "plugin": "a part that the recipe names cannot be imported, or breaks the contract of its kind",
    "recipe_changed": "the recipe in the run directory is not the one that the run was started with",
    "data": "a file, store or batch is not what it claims to be",
    "data_changed": "the data is not the data that the run was started with",
    "statistics_changed": "the normalization statistics of the run are not those that it was started with",
    "fetch_content": "a server sends something else than the file that was asked for",
    "fetch_changed": "the file on a server changes while it is fetched",
    "fetch_refused": "the server refused the file: it does not exist or needs authorization",
    "fetch_unavailable": "a server cannot be reached, stalls, or cuts the connection again and again",
    "store_unavailable": "an object store that data is read from cannot be reached, or does not answer",
    "store_refused": "an object store does not give data: it is not there, or not for these credentials",
    "disk_full": "there is no space left where the run is written",
    "run_held": "another `ups train` works on this run, or a lock of it is held; nothing was started",
    "instance_left": "a rented machine may still be there: its destruction was not confirmed",
    "environment": "the machine lacks something: a limit, a library, a device, space on a disk",
    "missing_extra": "an optional dependency is not installed",
    "tracker": "a tracker could not be reached, or refused what it was sent",
    "bucket": "a bucket of an object store could not be reached, or refused what was asked of it",
    "distributed": "the process group or the agreement between ranks went wrong",
    "training": "training cannot go on: divergence or too many skipped steps",
    "checkpoint": "a checkpoint cannot be written, found, verified or loaded",
    "foreign_checkpoint": "a checkpoint is whole, but belongs to another run or another step",
    "integrity": "bytes on disk are not the bytes that were committed",
    "run_directory_lost": "the directory of the run was removed, moved or replaced while the run went on",
    "gate": "a score or a check did not reach the bar of the recipe",
    "bundle": "a bundle cannot be read",
    "limit": "a request is larger than the server allows",
    "busy": "the server has no room for a request now",
    "server": "a server of simulators cannot be reached, or does not do what it should",
    "job_lost": "a job is gone together with its server",
    "error": "an error of ups without a more precise name",
}

CRASH_SIGNALS = frozenset({"SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP"})

# Symptoms of a peer that is gone. Bound to gloo, NCCL and the store, so that a reset connection of a user's data
# source is not taken for one.
_PEER_GONE = re.compile(
    r"gloo.{0,200}?(Connection (closed|reset) by peer|Broken pipe|Read error|Write error|Socket closed)"
    r"|Timed out waiting \d+ms for (recv|send) operation"
    r"|Application timeout caused pair closure"
    r"|ncclRemoteError|ncclSystemError|remote process exited|NCCL communicator was aborted"
    r"|Watchdog caught collective operation timeout"
    r"|failed to recv, got 0 bytes|The client socket has (timed out|failed)|wait timeout after \d+ms"
    r"|Connection was likely closed|Rank \d+ (successfully|failed to) (reach|pass)",
    re.DOTALL,
)
_PEER_GONE_TYPES = frozenset({"DistNetworkError", "DistStoreError"})
_MISMATCH = re.compile(
    r"Detected mismatch between collectives|op\.preamble\.length|op\.nbytes|Mismatch between collective|"
    r"gloo::EnforceNotMet|appears not to match sizes of the same param|"
    r"DDP expects same model across all ranks"
)
_NO_MEMORY = re.compile(
    r"out of memory|DefaultCPUAllocator: (can't|not enough)|Cannot allocate memory|not enough memory", re.IGNORECASE
)
_WORKER_DEAD = re.compile(r"was killed by (SIG\w+)")


def cause_of_error(error: BaseException) -> str:
    """The cause name of an exception."""
    text = str(error)
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, SystemExit):
        return cause_of_exit(exit_code_of(error))
    if isinstance(error, WorkerError):
        ended = _WORKER_DEAD.search(text)
        return f"{error.cause}({ended[1]})" if ended else error.cause
    if isinstance(error, UpsError):
        return error.cause
    if (
        isinstance(error, MemoryError)
        or "OutOfMemoryError" in names
        or (names & {"RuntimeError"} and _NO_MEMORY.search(text))
    ):
        return "out_of_memory"
    if "RuntimeError" in names and _MISMATCH.search(text):
        return "collective_mismatch"
    return f"exception({type(error).__name__})"


def is_cascade(error: BaseException) -> bool:
    """Whether an exception only says that another rank is gone: a consequence, never the first cause."""
    chain: BaseException | None = error
    while chain is not None:
        names = {kind.__name__ for kind in type(chain).__mro__}
        if names & _PEER_GONE_TYPES or (names & {"RuntimeError", "OSError"} and is_cascade_text(str(chain))):
            return True
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    return False


def is_cascade_text(text: str) -> bool:
    """Whether a message of a rank only says that another rank is gone."""
    return bool(_PEER_GONE.search(text))


def is_mismatch_text(text: str) -> bool:
    """Whether a message says that ranks issued different collectives; gloo prints it and aborts."""
    return bool(_MISMATCH.search(text))


def cause_of_exit(code: int) -> str:
    """The cause name of an exit code as `subprocess` gives it (negative: ended by that signal)."""
    if code == 0:
        return "early_exit(0)"
    if code > 0:
        return f"exit({code})"
    name = signal_name(-code)
    return f"signal({name})" if name in CRASH_SIGNALS else f"killed({name})"


def exit_code_of(error: SystemExit) -> int:
    """The exit code that a SystemExit leads to."""
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def signal_name(number: int) -> str:
    """SIGSEGV for 11; a number without a name stays a number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIG{number}"


def base_name(cause: str) -> str:
    """The name without its detail: `exception` of `exception(KeyError)`."""
    return cause.partition("(")[0]


class Event(Protocol):
    """Something that went wrong on a rank. cascade: it only says that another rank is gone."""

    @property
    def time_ns(self) -> int: ...
    @property
    def cascade(self) -> bool: ...


_Event = TypeVar("_Event", bound=Event)


def causes_first(events: Iterable[_Event]) -> list[_Event]:
    """Causes before consequences, then by time: a rank that lost a peer is a consequence whatever its time."""
    return sorted(events, key=lambda event: (event.cascade, event.time_ns))
