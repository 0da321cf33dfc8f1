"""One exception tree for the whole package (standard library only).

Every error carries a stable cause name (what `ups why` and scripts match on), an exit code and a hint (what to do
next). The command line prints `message` and `hint` as one readable line; the traceback goes to the log. An exception
that is not a `UpsError` is a bug in ups or in the person's code, and keeps its traceback.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

# Cause -> exit code, of every class of errors.
_EXIT_CODES: dict[str, int] = {}


class UpsError(Exception):
    """Base of every error that ups raises on purpose.

    Built from a single message, so that it survives pickling and the re-raise that crosses a process boundary.
    """

    cause: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str = "", command_hint: str = "") -> None:
        """command_hint: the hint in the words of the command line, where a program in Python needs others."""
        super().__init__(message)
        self.message = message
        self.hint = hint or self.default_hint
        self.command_hint = command_hint or self.hint

    def __init_subclass__(cls, *, cause: str = "", exit_code: int = 0, default_hint: str = "") -> None:
        """What a class does not name is that of its base."""
        cls.cause = cause or cls.cause
        cls.exit_code = exit_code or cls.exit_code
        cls.default_hint = default_hint or cls.default_hint
        _EXIT_CODES.setdefault(cls.cause, cls.exit_code)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint, self.command_hint))

    def one_line(self) -> str:
        """The whole error as one line of a command: cause, what happened and where, what to do next."""
        text = f"{self.cause}: {self.message}" + (f" -> {self.command_hint}" if self.command_hint else "")
        return " ".join(text.split())


def _rebuild(kind: type[UpsError], message: str, hint: str, command_hint: str) -> UpsError:
    return kind(message, hint=hint, command_hint=command_hint)


class ConfigError(UpsError, cause="config", exit_code=3):
    """A recipe or an option is wrong. Nothing was started."""


class RecipeChangedError(ConfigError, cause="recipe_changed"):
    """The recipe that a run directory holds is not the one that the run was started with."""


class PluginError(ConfigError, cause="plugin"):
    """A part that a recipe names cannot be used: its package cannot be imported, or breaks the contract of its kind."""


class DataError(UpsError, cause="data", exit_code=4):
    """A file, store or batch is not what it claims to be."""


class FetchContentError(DataError, cause="fetch_content"):
    """A server sends something else than the file that was asked for."""


class FetchChangedError(DataError, cause="fetch_changed"):
    """The file on a server changes while it is fetched."""


class DataChangedError(DataError, cause="data_changed"):
    """The data of a run is not the data that it was started with."""


class StatisticsChangedError(DataError, cause="statistics_changed"):
    """The normalization statistics of a run are not those that it was started with."""


class WorkerError(DataError, cause="worker_killed", exit_code=6):
    """A process that reads for a rank was killed, crashed or left; the data may be well."""


class MachineError(UpsError, cause="environment", exit_code=5):
    """The machine lacks something: a limit, a library, a device, space on a disk."""


class DiskFullError(MachineError, cause="disk_full"):
    """There is no space left where the run is written."""


class FetchRefusedError(MachineError, cause="fetch_refused"):
    """The server refused the file: it does not exist or needs authorization."""


class FetchUnavailableError(MachineError, cause="fetch_unavailable"):
    """A server cannot be reached, stalls, or cuts the connection again and again."""


class StoreRefusedError(MachineError, cause="store_refused"):
    """An object store does not give data: it is not there, or not for these credentials."""


class StoreUnavailableError(MachineError, cause="store_unavailable"):
    """An object store that data is read from cannot be reached, or does not answer."""


class MissingExtraError(MachineError, cause="missing_extra"):
    """A feature needs an optional dependency that is not installed."""

    @classmethod
    def of(cls, extra: str, package: str, feature: str) -> MissingExtraError:
        return cls(
            f"{feature} needs the package '{package}', which is not installed",
            hint=f"in the checkout: pip install '.[{extra}]'",
        )


class TrackerError(MachineError, cause="tracker"):
    """A tracker of a run cannot be reached, or refuses what it is sent. The run itself is not touched by that."""


class BucketError(
    MachineError,
    cause="bucket",
    default_hint="check the network, the address and the credentials (docs/mirror.md)",
):
    """A bucket of an object store cannot be reached, or refuses what is asked of it."""


class RunHeldError(UpsError, cause="run_held", exit_code=11):
    """Another process is at work on the run: it is not touched."""


class InstanceLeftError(UpsError, cause="instance_left", exit_code=12):
    """A rented machine may still be there, and cost money: its destruction was not confirmed."""


class DistributedError(UpsError, cause="distributed", exit_code=6):
    """The process group, a collective or the agreement between ranks went wrong."""


class HostLostError(DistributedError, cause="host_lost"):
    """A host of the run is not there, or stays away."""

    def __init__(self, message: str, host: str = "", *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        if host:
            self.cause = f"{type(self).cause}({host})"  # type: ignore[misc]


class HeadLostError(DistributedError, cause="head_lost"):
    """The supervisor of host 0 is gone or out of reach, for a supervisor that follows it."""


class TrainingError(UpsError, cause="training", exit_code=6):
    """Training cannot go on: divergence, too many skipped steps, a broken contract between ranks."""


class OutOfMemoryError(UpsError, cause="out_of_memory", exit_code=7):
    """The device or the host ran out of memory."""


class CheckpointError(UpsError, cause="checkpoint", exit_code=8):
    """A checkpoint cannot be written, found, verified or loaded."""


class ForeignCheckpointError(CheckpointError, cause="foreign_checkpoint"):
    """A checkpoint is whole, but it is not one of this run, or not of the step that its name says."""


class IntegrityError(UpsError, cause="integrity", exit_code=8):
    """Bytes on disk are not the bytes that were committed."""


class RunDirectoryLostError(UpsError, cause="run_directory_lost", exit_code=8):
    """The directory of a run was removed, moved or replaced while the run went on."""


class GateError(UpsError, cause="gate", exit_code=9):
    """A score or a check did not reach the bar that the recipe sets."""


class BundleError(UpsError, cause="bundle", exit_code=10):
    """A bundle cannot be read, or an input does not fit the simulator in it."""


class LimitError(BundleError, cause="limit"):
    """A request to a server is larger than the server allows. status: of HTTP."""

    status = 413


class BusyError(LimitError, cause="busy"):
    """A server has no room for a request now, or a client as many under way as it may have (429): try again later."""

    status = 503


class ServerError(MachineError, cause="server"):
    """A server of simulators cannot be reached, or does not do what it should."""


class JobLostError(ServerError, cause="job_lost"):
    """A job is gone together with its server. partial: the frames that were received, as an xarray.Dataset, or None."""

    partial: object = None


@contextlib.contextmanager
def errors_as(kind: type[UpsError], what: str, *caught: type[Exception], hint: str = "") -> Iterator[None]:
    """In this block an exception of these types becomes a `kind` with these words, followed by its own."""
    try:
        yield
    except caught as error:
        raise kind(f"{what}: {error}", hint=hint) from error


def error_of_cause(cause: str, message: str, hint: str = "") -> UpsError:
    """An error that another process met, from the name of its cause; DataError where that has no class of its own."""
    known = {kind.cause: kind for kind in (StoreUnavailableError, StoreRefusedError, DataChangedError, DiskFullError)}
    return known.get(cause, DataError)(message, hint=hint)


def exit_code_of_cause(cause: str) -> int:
    """The exit code of a run that ended with this cause; 6 (run failed) where no error class has its name."""
    return _EXIT_CODES.get(cause.partition("(")[0], 6)


def exit_code_of_signal(number: int) -> int:
    """The exit code of a process that leaves because of a signal, as shells count."""
    return 128 + int(number)


# What the commands return; `ups --help` and docs/exit-codes.md show this table.
EXIT_CODES: dict[int, str] = {
    0: "done, and proven where there is something to prove",
    1: "unexpected error: a bug in ups or in your own code (the traceback is kept)",
    2: "wrong use of a command: unknown option or missing argument",
    3: "config: the recipe or an override is wrong; nothing was started",
    4: "data: a file or store is not what it claims to be",
    5: "environment: the machine lacks a library, a device, a limit, space or a server that answers",
    6: "run failed: training or distributed error; `ups why RUN` gives the first cause",
    7: "out of memory",
    8: "checkpoint or integrity: bytes on disk are missing or wrong",
    9: "gate: a score or check is below the bar of the recipe",
    10: "bundle: a bundle or an input to a simulator does not fit",
    11: "run held: another process is at work on this run; nothing was touched",
    12: "instance left: a rented machine may still be there and cost money; the message names it",
    130: "interrupted from the keyboard",
    141: "the reader of the output is gone (closed pipe)",
    143: "asked to leave (SIGTERM): saved and stopped",
}
