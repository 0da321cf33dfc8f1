"""The worker processes of one rank: start, ask, receive in order, notice death and standstill, end in bounded time.

Why not torch's DataLoader: its workers share one result queue, so one that is killed or stopped while it holds the
lock of that queue blocks the others and the wrong one is blamed; a tensor is fetched from its worker by a second
connection that blocks forever if the worker is stopped just then; the death of a worker is raised from a signal
handler, that is anywhere in the rank, a collective included; and each worker imports torch. Here each worker has a
socket of its own, they take turns, and a worker's end is the end of its stream.

Runs in the rank; the other end is `ups.data.worker`. Batches of tensors are made by `ups.data.loader`.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ups.data.rank_source import MAX_MESSAGE, REQUEST, ArrayBatch, BatchReply, ErrorReply, RankSource, stack_file
from ups.errors import DataError, MachineError, WorkerError, error_of_cause
from ups.record.causes import CRASH_SIGNALS, signal_name
from ups.record.failure import Frame, location_of_dump, set_origin
from ups.record.processes import ONE_THREAD, module_command, read_process

# Requests on the way to one worker: more might fill the socket of a stopped worker, and asking would block the rank.
MAX_ASKED = 128
_START_SECONDS = 60.0
_STOPPED_SECONDS = 10.0
_CLOSE_SECONDS = 1.0
_KILL_SECONDS = 5.0
_SLICE_SECONDS = 0.5


@dataclass
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    connection: socket.socket
    asked: deque[int] = field(default_factory=deque)  # batch numbers without a reply
    ready: deque[ArrayBatch | ErrorReply] = field(default_factory=deque)
    num_stale: int = 0  # the first so many replies to come are to requests that were canceled
    started: bool = False
    ended: bool = False

    @property
    def name(self) -> str:
        return f"loader worker {self.number} (pid {self.process.pid})"


class WorkerPool:
    """Worker processes that read batches of one `RankSource`, delivered in the order in which they were asked for."""

    def __init__(self, source: RankSource, *, num_workers: int, rank: int, timeout_seconds: float) -> None:
        self._source = source
        self._rank = rank
        self._timeout = timeout_seconds
        self._order: deque[_Worker] = deque()
        self._turn = 0
        payload = pickle.dumps(source, protocol=pickle.HIGHEST_PROTOCOL)
        self._workers: list[_Worker] = []
        self._poll = select.poll()  # unlike select it knows descriptors above 1023
        self._by_file: dict[int, _Worker] = {}
        try:
            for number in range(num_workers):
                worker = _start(number, rank, payload)
                self._workers.append(worker)
                self._by_file[worker.connection.fileno()] = worker
                self._poll.register(worker.connection, select.POLLIN)
        except OSError as error:
            num_started = len(self._workers)
            self.close()
            raise MachineError(
                f"only {num_started} of {num_workers} loader workers could be started: {error.strerror or error}",
                hint="use fewer data.loader.workers, or raise the limits on processes and open files (ulimit -u, -n)",
            ) from error
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers, by number."""
        return tuple(worker.process.pid for worker in self._workers)

    @property
    def num_asked(self) -> int:
        """Batches that were asked for and not delivered yet."""
        return len(self._order)

    def ask(self, number: int) -> None:
        """Queue a batch at the worker whose turn it is."""
        worker = self._workers[self._turn % len(self._workers)]
        self._turn += 1
        worker.asked.append(number)
        self._order.append(worker)
        # A dead worker cannot be written to; what it sent before it died may still be waiting to be received.
        with suppress(BrokenPipeError, ConnectionResetError):
            worker.connection.send(REQUEST.pack(number))

    def cancel(self) -> None:
        """Forget everything that was asked for; replies that are still to come are dropped."""
        self._order.clear()
        for worker in self._workers:
            worker.ready.clear()
            worker.num_stale = len(worker.asked)

    def receive(self) -> ArrayBatch:
        """The next batch in order. Raises DataError for an unreadable batch, a dead or a stuck worker."""
        worker = self._order[0]
        self._wait(worker)
        self._order.popleft()
        reply = worker.ready.popleft()
        if isinstance(reply, ArrayBatch):
            return reply
        error = error_of_cause(reply.cause, reply.message, reply.hint)
        error.add_note(f"in {worker.name}:\n{reply.traceback}")
        set_origin(error, reply.at)
        raise error

    def _wait(self, worker: _Worker) -> None:
        """Until a reply of `worker` is there. Raises DataError if it is dead or stuck."""
        start = time.monotonic()
        # Before its first reply a worker imports its readers, which takes long on a cold network file system.
        patience = self._timeout if worker.started else self._timeout + _START_SECONDS
        stopped_since, next_look = None, start + min(_SLICE_SECONDS, self._timeout)
        while True:
            self._take_in(0.0 if worker.ready else max(0.0, next_look - time.monotonic()))
            if worker.ready:
                return
            if worker.ended:
                raise self._dead(worker)
            now = time.monotonic()
            if now < next_look:
                continue
            next_look = now + min(_SLICE_SECONDS, self._timeout)
            process = read_process(worker.process.pid)
            is_stopped = process is not None and process.state in ("T", "t")
            stopped_since = (stopped_since or now) if is_stopped else None
            enough = now - start >= patience
            if stopped_since is not None and (enough or now - stopped_since >= min(_STOPPED_SECONDS, self._timeout)):
                raise self._stuck(worker, now - start, "it is stopped (SIGSTOP or a debugger)")
            if enough:
                raise self._stuck(worker, now - start, "data.loader.timeout_seconds has passed")

    def _take_in(self, seconds: float) -> None:
        """Receive what any worker has sent, waiting at most so long for the first.

        From all of them, not only from the one whose turn it is: the kernel limits the descriptors that a user has
        on the way, and the others' must not crowd out the one that is waited for.
        """
        for file, _ in self._poll.poll(int(1000 * seconds) + (seconds > 0)):
            worker = self._by_file[file]
            try:
                message, files, _, _ = socket.recv_fds(worker.connection, MAX_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
            except ConnectionResetError:
                message, files = b"", []
            if not message:
                worker.ended = True
                self._poll.unregister(file)
                continue
            try:
                self._sort_in(worker, pickle.loads(message), files)  # noqa: S301 - from our own child, private socket
            finally:
                for received in files:
                    os.close(received)

    def _sort_in(self, worker: _Worker, reply: BatchReply | ErrorReply, files: list[int]) -> None:
        expected = worker.asked.popleft()
        worker.started = True
        if worker.num_stale:
            worker.num_stale -= 1
        elif isinstance(reply, ErrorReply):
            worker.ready.append(reply)
        elif reply.number == expected and files:
            worker.ready.append(_map(reply, files[0]))
        else:
            raise DataError(f"{worker.name} sent batch {reply.number} without data, or in place of batch {expected}")

    def _reading(self, worker: _Worker) -> str:
        return self._source.describe(worker.asked[0]) if worker.asked else "nothing"

    def _stuck(self, worker: _Worker, seconds: float, why: str) -> DataError:
        stacks = stack_file(self._rank, worker.number)
        if stacks is not None:
            with suppress(ProcessLookupError):
                os.kill(worker.process.pid, signal.SIGUSR1)
            time.sleep(0.2)  # for the stack to be written before the worker is killed by whoever handles this error
        error = DataError(
            f"{worker.name} has delivered nothing for {seconds:.1f} s while reading {self._reading(worker)}: {why}",
            hint=(f"its stack is in {stacks}; " if stacks else "")
            + "check that the storage answers; raise data.loader.timeout_seconds if it is only slow",
        )
        set_origin(error, _frame_of(stacks))
        return error

    def _dead(self, worker: _Worker) -> WorkerError:
        try:
            code = worker.process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return WorkerError(f"{worker.name} closed its connection while reading {self._reading(worker)}")
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
        hints = {
            -signal.SIGKILL: "the machine may be out of memory: use fewer data.loader.workers or a smaller prefetch",
            -signal.SIGBUS: "a file was cut while it was mapped, or memory ran out: try `ups data validate`",
            -signal.SIGSEGV: "a file may have crashed its library: check it with `ups data validate`",
        }
        stacks = stack_file(self._rank, worker.number)
        # A kill from outside leaves no stack; what the file then has is older.
        frame = _frame_of(stacks) if code < 0 and signal_name(-code) in CRASH_SIGNALS else None
        hint = hints.get(code, "its own output is in the log of this rank")
        error = WorkerError(
            f"{worker.name} {how}{f' at {frame.short()}' if frame else ''} while reading {self._reading(worker)}",
            hint=hint + (f"; its stack is in {stacks}" if frame else ""),
        )
        set_origin(error, frame)
        return error

    def close(self) -> None:
        """End all workers within seconds: they leave when their socket closes, and are killed if they do not."""
        for worker in self._workers:
            worker.connection.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for worker in self._workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.kill()  # reaches a stopped process too
        deadline = time.monotonic() + _KILL_SECONDS
        for worker in self._workers:
            # One in an uninterruptible read of a lost network disk cannot be waited for; it dies when the read ends.
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        self._workers.clear()
        self._order.clear()
        self._by_file.clear()


def _start(number: int, rank: int, payload: bytes) -> _Worker:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    source_file = -1
    # The death signal is tied to the thread that starts the process, so it is only asked for from the main thread,
    # which lives as long as the rank; without it the worker notices the closed socket at its next request.
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
    path = os.pathsep.join(p for p in sys.path if p)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        source_file = os.memfd_create("ups-source", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(source_file), "wb") as file:
            file.write(payload)
        os.lseek(source_file, 0, os.SEEK_SET)
        arguments = [theirs.fileno(), source_file, parent, rank, number]
        process = subprocess.Popen(
            module_command("ups.data.worker", *map(str, arguments)),
            stdin=subprocess.DEVNULL,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
            pass_fds=(theirs.fileno(), source_file),
        )
    except BaseException:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if source_file >= 0:
            os.close(source_file)
        theirs.close()
    return _Worker(number, process, ours)


def _map(reply: BatchReply, file: int) -> ArrayBatch:
    """The arrays of a batch as writable views of its memory file, which lives as long as they do."""
    # Python's own mmap would keep a descriptor open for each live batch; limits of 1024 are common.
    memory = torch.from_file(f"/proc/self/fd/{file}", shared=True, size=reply.num_bytes, dtype=torch.uint8).numpy()
    arrays: dict[str, npt.NDArray[Any]] = {
        location.name: np.ndarray(location.shape, location.dtype, memory, location.offset)
        for location in reply.locations
    }
    return ArrayBatch(reply.task, reply.step, arrays)


def _frame_of(stacks: Path | None) -> Frame | None:
    """Where a worker was by the last stack in its file, if there is one."""
    if stacks is None:
        return None
    with suppress(OSError):
        return location_of_dump(stacks.read_text(errors="replace"))
    return None
