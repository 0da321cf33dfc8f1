"""A worker process: receives batch numbers, reads them, sends the arrays back. Started by `ups.data.worker_pool`.

    python -m ups.data.worker SOCKET_FD SOURCE_FD PARENT_PID RANK WORKER

The arrays of a batch are written into an anonymous memory file (memfd), whose descriptor travels with the reply over
the socket. The kernel then owns the reply: nothing more is needed from this process, so one that is stopped or dead
after sending cannot block the rank. Unlike /dev/shm such a file has no size limit of its own, and no name that could
be left behind.

Never imports torch, never touches a device. Ignores SIGTERM and SIGINT, which a job manager sends to a whole process
group: the rank saves first and then closes its workers. Dies with its parent.
"""

from __future__ import annotations

import errno
import faulthandler
import logging
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ups.data.rank_source import REQUEST, ArrayBatch, ArrayLocation, BatchReply, ErrorReply, RankSource, fault_file
from ups.data.read_ahead import ReadAhead
from ups.errors import DataError, UpsError
from ups.record.failure import Recorder, install_in_worker, location_of_error
from ups.record.log import show_log, write_to_stderr
from ups.record.processes import bound_to

_ALIGNMENT = 64
_MAX_TEXT = 8_000


def serve(connection: socket.socket, source: RankSource | ErrorReply, recorder: Recorder | None = None) -> None:
    """Answers requests until the other end closes; `recorder` keeps the first error with this process's memory."""
    ahead = None if isinstance(source, ErrorReply) else ReadAhead.of(source)
    waiting: deque[int] = deque()
    with suppress(BrokenPipeError, ConnectionResetError):
        while waiting or (request := connection.recv(REQUEST.size)):
            if not waiting:
                waiting.extend(REQUEST.unpack(request))
            if ahead is not None:
                waiting.extend(_asked_already(connection))
                ahead.want(waiting)
            number = waiting.popleft()
            if isinstance(source, ErrorReply):
                connection.send(pickle.dumps(source))
            else:
                _answer(connection, source.read if ahead is None else ahead.read, number, recorder)


def _asked_already(connection: socket.socket) -> list[int]:
    """Requests that have come and need not be waited for."""
    numbers: list[int] = []
    with suppress(BlockingIOError):
        while request := connection.recv(REQUEST.size, socket.MSG_DONTWAIT):
            numbers.extend(REQUEST.unpack(request))
    return numbers


def _answer(
    connection: socket.socket, read: Callable[[int], ArrayBatch], number: int, recorder: Recorder | None
) -> None:
    try:
        _send_batch(connection, number, read(number))
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:  # noqa: BLE001 - every failure belongs to the rank that asked
        if recorder is not None:
            recorder.record(error)
        connection.send(pickle.dumps(_error_reply(number, error)))


def _send_batch(connection: socket.socket, number: int, batch: ArrayBatch) -> None:
    locations: list[ArrayLocation] = []
    end = 0
    for name, array in batch.arrays.items():
        locations.append(ArrayLocation(name, array.dtype.str, array.shape, end))
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    file = os.memfd_create("ups-batch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, end)
        for location, array in zip(locations, batch.arrays.values(), strict=True):
            _write(file, array, location.offset)
        reply = BatchReply(number, batch.task, batch.step, end, tuple(locations))
        _send(connection, pickle.dumps(reply), file)
    finally:
        os.close(file)


def _send(connection: socket.socket, message: bytes, file: int) -> None:
    while True:
        try:
            socket.send_fds(connection, [message], [file])
        except OSError as error:
            # The kernel limits the descriptors of a user that are on the way (the limit on open files). They go
            # down when a rank receives; until then this one waits, and the rank's deadline watches.
            if error.errno != errno.ETOOMANYREFS:
                raise
            time.sleep(0.01)
        else:
            return


def _write(file: int, array: Any, offset: int) -> None:
    if array.nbytes == 0:
        return
    # Written, not mapped: the kernel fills fresh pages without a page fault for each in this process.
    rest = memoryview(array if array.flags.c_contiguous else array.copy()).cast("B")
    while rest:
        written = os.pwrite(file, rest, offset)
        rest, offset = rest[written:], offset + written


def _error_reply(number: int, error: BaseException) -> ErrorReply:
    expected = isinstance(error, UpsError)
    message = error.message if isinstance(error, UpsError) else f"{type(error).__name__}: {error}"
    hint = error.hint if isinstance(error, UpsError) else ""
    text = "".join(traceback.format_exception(error))
    at = location_of_error(error)
    cause = error.cause if isinstance(error, UpsError) else DataError.cause
    return ErrorReply(number, message[:_MAX_TEXT], hint[:_MAX_TEXT], text[-_MAX_TEXT:], expected, at, cause)


def _load(source_file: int) -> RankSource | ErrorReply:
    try:
        with os.fdopen(source_file, "rb") as file:
            source: RankSource = pickle.load(file)  # noqa: S301 - written by our own parent into a file without a name
            return source
    except Exception as error:  # noqa: BLE001 - reported to the rank with its first request
        return _error_reply(-1, error)


def main(arguments: list[str]) -> None:
    """Entry of the process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # The parent blocked both while it started this process, so that neither could take effect before they were ignored.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
    connection_file, source_file, parent, rank, worker = map(int, arguments)
    if parent:
        bound_to(parent)()
    show_log(write_to_stderr, logging.INFO)
    recorder = install_in_worker(worker)
    fault = fault_file(rank, worker)
    if fault is not None:
        stacks = fault.open("a", encoding="utf-8")
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)
    with socket.socket(fileno=connection_file) as connection:
        serve(connection, _load(source_file), recorder)


if __name__ == "__main__":
    main(sys.argv[1:])
