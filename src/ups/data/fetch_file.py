"""One file fetched: continued where it was left, checked, and only then given its name.

The bytes go to a partial file, with a note beside it that says of which version of the file they are and how many of
them are on the disk for sure. A part is continued only if the server still has that version. At the end the file must
have the published MD5, or where none is published the size that the server says; and its own header must agree.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ups.data.fetch_catalog import RemoteFile
from ups.data.fetch_request import Answer, BeginAgainError, TryAgainError, request, shown
from ups.data.hdf5_header import HEADER_BYTES, check_header, check_size
from ups.errors import DiskFullError, FetchChangedError, FetchContentError, FetchUnavailableError, MachineError
from ups.record.files import load_object, machine_error, write_file_atomically
from ups.record.text import size_text

# Failures in a row without any progress before a file is given up, and how long to wait between two.
ATTEMPTS = 6
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0
# How often something else than the file may come, and how often the server's file may change, before it is given up.
WRONG_ANSWERS, CHANGES = 2, 4
SYNC_BYTES, SYNC_SECONDS = 64 << 20, 2.0
# A connection that is slower than this for so long is cut, and the file asked for again.
SLOWEST_BYTES_PER_SECOND, SLOW_SECONDS = 1024, 60.0
PROGRESS_BYTES = 1 << 16
# Left free on the disk beyond what the files need. It is looked at after each so many bytes, also where a size was told
# that fits: the server may send more, and others write to the disk too.
SPARE_BYTES, SPACE_BYTES = 64 << 20, 1 << 20
_NOTE_BYTES = 1 << 16

Progress = Callable[[int], None]


@dataclass
class _Note:
    """What is known about the bytes of a partial file: the version they are of, its size, how many are safe."""

    url: str
    validator: str = ""
    total: int | None = None
    synced: int = 0


class Fetch:
    """The fetching of one file. progress: told how many bytes are there, also if that is less than before."""

    def __init__(
        self, file: RemoteFile, target: Path, partial: Path, progress: Progress, stop: threading.Event
    ) -> None:
        self.file, self.target, self.partial = file, target, partial
        self._note_path = partial.with_name(partial.name + ".json")
        self._progress, self._stop = progress, stop
        self._note = self._read_note()

    def run(self) -> str:
        """Fetch the file and give it its name; its MD5. Raises an error that says why it cannot be had."""
        failures = changes = wrong = 0
        while True:
            before = self._note.synced
            try:
                self._receive()
                return self._finish()
            except TryAgainError as error:
                failures = 1 if self._note.synced > before + PROGRESS_BYTES else failures + 1
                if failures >= ATTEMPTS:
                    raise FetchUnavailableError(
                        f"{shown(self.file.url)} cannot be fetched after {failures} attempts: {error}",
                        hint="run the command again later: it continues where it stopped",
                    ) from error
                self._wait(max(error.wait_seconds, FIRST_WAIT_SECONDS * 2 ** (failures - 1)))
            except FetchContentError:
                wrong += 1
                if wrong >= WRONG_ANSWERS:
                    raise  # once may be a server in trouble, or a file of two versions; twice it is the server's answer
                self._wait(FIRST_WAIT_SECONDS)
            except BeginAgainError as error:
                changes += 1
                self._discard()
                if changes >= CHANGES:
                    raise FetchChangedError(
                        f"{shown(self.file.url)} cannot be fetched in one piece: {error}, {changes} times",
                        hint="the file is being replaced, or the server is broken: try later, or another --mirror",
                    ) from error

    def _receive(self) -> None:
        """Get what is missing. Returns when the server has said everything it has to say."""
        note = self._note
        if note.total is not None and note.synced == note.total:
            return
        start = note.synced if note.validator or self.file.md5 else 0
        with request(self.file.url, start, note.validator, stop=self._stop) as answer:
            if start and answer.start == 0:
                self._discard()  # no ranges there, or it changed: this answer is the whole file
            elif start and note.total is not None and answer.total is not None and answer.total != note.total:
                raise BeginAgainError("the file on the server has another size now")
            if not answer.start:
                self._note = _Note(self.file.url, answer.validator, answer.total)
            if answer.total is None and not self.file.md5:
                raise FetchContentError(f"{shown(self.file.url)}: the server does not say how long the file is")
            self._copy(answer)

    def _copy(self, answer: Answer) -> None:
        note = self._note
        with self._opened() as file:
            file.truncate(answer.start)
            file.seek(answer.start)
            position, header = answer.start, b""
            window, window_bytes = time.monotonic(), 0
            synced_at, unlooked = window, SPACE_BYTES
            try:
                while data := answer.read():
                    if self._stop.is_set():
                        raise KeyboardInterrupt
                    if position < HEADER_BYTES and answer.start == 0:
                        header = (header + data)[:HEADER_BYTES]
                        check_header(header, shown(self.file.url))
                    if note.total is not None:
                        data = data[: note.total - position]  # more than it said: the rest is not part of the file
                    unlooked += len(data)
                    if unlooked >= SPACE_BYTES:
                        self._check_space(file)
                        unlooked = 0
                    self._write(file, data)
                    position += len(data)
                    window_bytes += len(data)
                    self._progress(position)
                    now = time.monotonic()
                    if position - note.synced >= SYNC_BYTES or now - synced_at >= SYNC_SECONDS:
                        self._sync(file, position)
                        synced_at = now
                    if now - window >= SLOW_SECONDS:
                        if window_bytes < SLOWEST_BYTES_PER_SECOND * SLOW_SECONDS:
                            raise TryAgainError(f"only {window_bytes} bytes came in {SLOW_SECONDS:.0f} s")
                        window, window_bytes = now, 0
            finally:
                self._sync(file, position)
        if note.total is None:
            self._note.total = position  # with a hash to hold it against
        elif position < note.total:
            raise TryAgainError(f"the connection ended after {position} of {note.total} bytes")

    def _opened(self) -> IO[bytes]:
        """The partial file for writing, and nothing else that has its name: a link would lead to somebody's file."""
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(self.partial, flags, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise machine_error(f"cannot write to {self.partial}", error) from error
        else:
            # Not buffered: bytes that did not fit the disk would be tried again on closing.
            file = os.fdopen(descriptor, "r+b", buffering=0) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
            if file is not None:
                return file
            os.close(descriptor)
        raise MachineError(f"{self.partial} is a link or no regular file, and is not written to", hint="remove it")

    def _check_space(self, file: IO[bytes]) -> None:
        disk = os.fstatvfs(file.fileno())
        if disk.f_bavail * disk.f_frsize < SPARE_BYTES + SPACE_BYTES:
            raise DiskFullError(
                f"the disk is full but for {size_text(SPARE_BYTES)}, and {shown(self.file.url)} has not come whole",
                hint=f"free some space and run the command again; what came is in {self.partial}",
            )

    def _write(self, file: IO[bytes], data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            raise machine_error(f"cannot write to {self.partial}", error) from error

    def _sync(self, file: IO[bytes], position: int) -> None:
        """Note that the bytes up to here are on the disk, so that a power cut cannot leave a hole in the file."""
        try:
            os.fdatasync(file.fileno())
        except OSError as error:
            raise machine_error(f"cannot write to {self.partial}", error) from error
        self._note.synced = position
        note = {"url": self._note.url, "validator": self._note.validator, "total": self._note.total, "synced": position}
        write_file_atomically(self._note_path, json.dumps(note).encode())

    def _finish(self) -> str:
        """Check the whole file and rename it."""
        digest = hashlib.md5(usedforsecurity=False)  # the hash that is published
        with self.partial.open("rb") as file:
            while data := file.read(1 << 22):
                if self._stop.is_set():
                    raise KeyboardInterrupt
                digest.update(data)
        problem = check_size(self.partial)
        if self.file.md5 and digest.hexdigest() != self.file.md5:
            problem = f"its MD5 is {digest.hexdigest()} instead of {self.file.md5}"
        if problem:
            self._discard()
            raise FetchContentError(
                f"{shown(self.file.url)} is not the published file: {problem}",
                hint="the server has another file, or cuts it: try another --mirror",
            )
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.partial.replace(self.target)
        except OSError as error:
            raise machine_error(f"cannot write to {self.target}", error) from error
        with contextlib.suppress(OSError):
            self._note_path.unlink()
        return digest.hexdigest()

    def _discard(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.partial.unlink()
        self._note = _Note(self.file.url)
        self._progress(0)

    def _read_note(self) -> _Note:
        """What an earlier attempt left; nothing if its note does not fit its bytes."""
        fresh = _Note(self.file.url)
        try:
            data = load_object(self._note_path, _NOTE_BYTES)
            note = _Note(str(data["url"]), str(data["validator"]), data["total"], int(data["synced"]))
            status = self.partial.lstat()
            size = status.st_size if stat.S_ISREG(status.st_mode) else -1
        except (OSError, ValueError, KeyError, TypeError):
            return fresh
        whole = note.total is None or (type(note.total) is int and 0 <= note.synced <= note.total)
        return note if note.url == self.file.url and whole and 0 <= note.synced <= size else fresh

    def _wait(self, seconds: float) -> None:
        if self._stop.wait(min(seconds, LONGEST_WAIT_SECONDS)):
            raise KeyboardInterrupt
