"""One file downloaded over HTTP: resumed where it was left, checked, and only then given its name (standard library).

The bytes go to a partial file. A note beside it says of which version of the file they are, and how many of them are
on the disk for sure; a part is resumed only if the server still has that version. At the end the file must have the
published MD5, or else the size that the server says; and its HDF5 header must agree.

A server may cut the connection, say nothing, ignore the range, send an error page with status 200, or another file
than before: everything that is not the wanted bytes is an exception of `request`. A socket's time-out starts over with
each byte, so a server that sends one now and then would hold a reader forever: here a deadline covers all reads.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import http.client
import io
import json
import os
import re
import socket
import stat
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ups.errors import (
    DiskFullError,
    FetchChangedError,
    FetchContentError,
    FetchRefusedError,
    FetchUnavailableError,
    MachineError,
)
from ups.record.files import load_object, machine_error, machine_errors, write_file_atomically
from ups.record.text import printable, size_text

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


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """path: where it goes, below the directory of its data set. mirrored: where a mirror has it. md5: '' if unknown."""

    path: str
    url: str
    mirrored: str
    md5: str = ""


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
            position = answer.start
            window, window_bytes = time.monotonic(), 0
            synced_at, unlooked = window, SPACE_BYTES
            try:
                while data := answer.read():
                    if self._stop.is_set():
                        raise KeyboardInterrupt
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
        """The partial file for writing, and nothing else that has its name: a link would lead to a foreign file."""
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
        with machine_errors(f"cannot write to {self.partial}"):
            while rest:
                rest = rest[file.write(rest) :]

    def _sync(self, file: IO[bytes], position: int) -> None:
        """Note that the bytes up to here are on the disk, so that a power cut cannot leave a hole in the file."""
        with machine_errors(f"cannot write to {self.partial}"):
            os.fdatasync(file.fileno())
        self._note.synced = position
        note = {"url": self._note.url, "validator": self._note.validator, "total": self._note.total, "synced": position}
        write_file_atomically(self._note_path, json.dumps(note).encode())

    def _finish(self) -> str:
        """Check the whole file and rename it."""
        md5 = md5_of(self.partial, self._stop)
        problem = check_size(self.partial)
        if self.file.md5 and md5 != self.file.md5:
            problem = f"its MD5 is {md5} instead of {self.file.md5}"
        if problem:
            self._discard()
            raise FetchContentError(
                f"{shown(self.file.url)} is not the published file: {problem}",
                hint="the server has another file, or cuts it: try another --mirror",
            )
        with machine_errors(f"cannot write to {self.target}"):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.partial.replace(self.target)
        with contextlib.suppress(OSError):
            self._note_path.unlink()
        return md5

    def _discard(self) -> None:
        self.partial.unlink(missing_ok=True)
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


def md5_of(path: Path, stop: threading.Event) -> str:
    """MD5 of a file, which is the hash that is published. Raises KeyboardInterrupt on a stop request."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while data := file.read(1 << 22):
            if stop.is_set():
                raise KeyboardInterrupt
            digest.update(data)
    return digest.hexdigest()


# For a connection, for a whole header, and for the next bytes of a file with all that HTTP may put before them.
STALL_SECONDS = 30.0
READ_BYTES = 1 << 20
_AGENT = "universal-simulator"
_PASSING = {408, 425, 429, 500, 502, 503, 504}


class TryAgainError(Exception):
    """The request failed in a way that may pass. wait_seconds: how long the server asks to wait, 0 if it does not."""

    def __init__(self, message: str, wait_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds


class BeginAgainError(Exception):
    """The part that is there cannot be continued: the server has another file now, or not that part."""


@dataclass(frozen=True, slots=True)
class Answer:
    """start: position of the first byte. total: size of the whole file, None if not said. validator: what tells this
    version of the file from another ('' if the server does not say)."""

    start: int
    total: int | None
    validator: str
    body: IO[bytes]
    watch: StallWatch

    def read(self) -> bytes:
        """The next bytes; b'' at the end. Raises TryAgainError if the connection is cut or stalls, KeyboardInterrupt
        on a stop request."""
        self.watch.renew()
        try:
            return self.body.read1(READ_BYTES)  # type: ignore[attr-defined,no-any-return]
        except TimeoutError as error:
            raise TryAgainError(f"no byte came for {STALL_SECONDS:.0f} s") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise TryAgainError(f"the connection was cut ({type(error).__name__})") from error


@contextlib.contextmanager
def request(
    url: str,
    start: int = 0,
    validator: str = "",
    end: int | None = None,
    *,
    stop: threading.Event | None = None,
) -> Iterator[Answer]:
    """Ask for the bytes from `start` on (before `end`). validator: of the version whose beginning is there.

    stop: ends the request with KeyboardInterrupt when it is set. Raises TryAgainError, BeginAgainError,
    FetchRefusedError or FetchContentError.
    """
    headers = {"Accept-Encoding": "identity", "User-Agent": _AGENT}
    if start or end is not None:
        headers["Range"] = f"bytes={start}-" + ("" if end is None else str(end - 1))
    if start and validator:
        headers["If-Range"] = validator
    asked = urllib.request.Request(url, headers=headers)  # noqa: S310 - the scheme is checked by the opener
    watch = StallWatch(STALL_SECONDS, stop)
    try:
        opener = urllib.request.build_opener(_Redirects, *_handlers(watch))
        response = opener.open(asked, timeout=STALL_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()  # not `with`: the page of a redirect is closed already
        raise _refusal(error, url, start) from error
    except TimeoutError as error:
        raise TryAgainError(f"no whole answer in {STALL_SECONDS:.0f} s") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or type(error).__name__
        raise TryAgainError(f"no connection ({str(reason)[:100]})") from error
    except ValueError as error:  # of urllib, the codec of host names, or the socket: all mean the address
        raise FetchRefusedError(
            f"{shown(url)} leads to an address that cannot be used ({printable(str(error)[:100])})",
            hint="the file may have moved: try --mirror with another place that has it",
        ) from error
    with response:
        yield _understood(response, url, start, validator, watch)


def shown(url: str) -> str:
    """An address without what may be a secret in it, or what a terminal would obey."""
    parts = urllib.parse.urlsplit(url)
    return printable(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")


def _understood(response: Any, url: str, start: int, validator: str, watch: StallWatch) -> Answer:
    headers = response.headers
    kind = headers.get_content_type()
    if kind in ("text/html", "application/xhtml+xml") or headers.get("Content-Encoding", "identity") != "identity":
        raise FetchContentError(
            f"{shown(url)} answers with a page or packed bytes ({kind}) instead of the file",
            hint="look at that address in a browser: the file may have moved, or need a login",
        )
    version = _validator(headers)
    length = headers.get("Content-Length", "")
    size = int(length) if re.fullmatch(r"\d{1,15}", length) else None
    if response.status == 206:
        part = re.fullmatch(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15}|\*)", headers.get("Content-Range", "").strip())
        if part is None or int(part.group(1)) != start:
            raise BeginAgainError("the server sent another part than was asked for")
        if start and validator and version and version != validator:
            raise BeginAgainError("the file on the server changed")
        total = None if part.group(3) == "*" else int(part.group(3))
        return Answer(start, total, version, response, watch)
    if response.status != 200:
        raise TryAgainError(f"the server answers with status {response.status}")
    return Answer(0, size, version, response, watch)  # the whole file: no ranges there, or it changed


def _validator(headers: Any) -> str:
    """A strong ETag, else the time of the last change: what `If-Range` takes."""
    etag = headers.get("ETag", "").strip()
    if etag and not etag.startswith("W/"):
        return str(etag)[:500]
    return str(headers.get("Last-Modified", "").strip())[:100]


def _refusal(error: urllib.error.HTTPError, url: str, start: int) -> Exception:
    if error.code == 416 and start:
        return BeginAgainError("the server does not have that part of the file")
    if error.code in _PASSING:
        wait = error.headers.get("Retry-After", "") if error.headers else ""
        seconds = float(wait) if re.fullmatch(r"[0-9]{1,9}", wait) else 0.0  # it may be a date, or anything
        return TryAgainError(f"the server answers with status {error.code}", seconds)
    redirected = 300 <= error.code < 400
    return FetchRefusedError(
        f"{shown(url)} is refused by the server with status {error.code}"
        + (": redirects lead in a circle, or nowhere" if redirected else ""),
        hint="the file may have moved: try --mirror with another place that has it",
    )


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to HTTP addresses, and none from a secure one to one that is not."""

    max_redirections = 5

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        before, after = urllib.parse.urlsplit(req.full_url).scheme, urllib.parse.urlsplit(newurl).scheme
        if after not in ("http", "https") or (before == "https" and after != "https"):
            raise FetchRefusedError(f"{shown(req.full_url)} leads to an address that is not secure: {shown(newurl)}")
        if "@" in urllib.parse.urlsplit(newurl).netloc:  # urllib would ask the resolver for it, password and all
            raise FetchRefusedError(f"{shown(req.full_url)} leads to an address with a user in it: {shown(newurl)}")
        fp.close()  # urllib would read the page of the redirect into memory, however long it is
        return super().redirect_request(req, fp, code, msg, headers, newurl)


# How long a stop request may go unnoticed.
POLL_SECONDS = 0.2


class StallWatch:
    """When reads end. stop: set by whoever wants them to end at once, which they do with KeyboardInterrupt."""

    def __init__(self, seconds: float, stop: threading.Event | None = None) -> None:
        self._seconds, self._stop = seconds, stop
        self._deadline = 0.0
        self.renew()

    def renew(self) -> None:
        """Let what is read next have the whole time."""
        self._deadline = time.monotonic() + self._seconds

    def check(self) -> None:
        """Raises KeyboardInterrupt if a stop is asked for, and TimeoutError after the deadline."""
        if self._stop is not None and self._stop.is_set():
            raise KeyboardInterrupt
        if time.monotonic() >= self._deadline:
            raise TimeoutError("the deadline has passed")


def _handlers(watch: StallWatch) -> Iterator[urllib.request.BaseHandler]:
    """For an opener of urllib whose answers are read under a watch; each answer's header has the whole time anew."""
    http_, https = urllib.request.HTTPHandler(), urllib.request.HTTPSHandler()
    for handler, name, kind in (
        (http_, "http_open", http.client.HTTPConnection),
        (https, "https_open", http.client.HTTPSConnection),
    ):
        setattr(handler, name, functools.partial(handler.do_open, _connecting(kind, watch)))
        yield handler


def _connecting(kind: type[http.client.HTTPConnection], watch: StallWatch) -> Callable[..., http.client.HTTPConnection]:
    def connect(host: str, **options: Any) -> http.client.HTTPConnection:
        connection = kind(host, **options)
        connection.response_class = functools.partial(_Response, watch=watch)  # type: ignore[assignment]
        return connection

    return connect


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, watch: StallWatch, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        watch.renew()
        self.fp = io.BufferedReader(_Reads(sock, self.fp.detach(), watch))


class _Reads(io.RawIOBase):
    """The bytes of a socket. owner: what keeps the socket open, and closes it."""

    def __init__(self, sock: socket.socket, owner: io.RawIOBase, watch: StallWatch) -> None:
        self._socket, self._owner, self._watch = sock, owner, watch

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._socket.settimeout(POLL_SECONDS)
        while True:
            self._watch.check()
            try:
                return self._socket.recv_into(buffer)
            except TimeoutError:
                continue

    def close(self) -> None:
        if not self.closed:
            self._owner.close()
        super().close()


MAGIC = b"\x89HDF\r\n\x1a\n"
HEADER_BYTES = 64


def check_size(path: Path) -> str:
    """What is wrong with the length of an HDF5 file, by its own header; '' if nothing is."""
    with path.open("rb") as file:
        data = file.read(HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        return "it is no HDF5 file"
    version = data[8]
    # Where the address of the end stands: after those of the base and of the free space (0, 1) or extension (2, 3).
    offset = {0: 40, 1: 44, 2: 28, 3: 28}.get(version)
    offsets = data[13] if version < 2 else data[9]
    if offset is None or offsets != 8:
        return ""  # not a header that is read here; whoever opens the file judges
    end = int.from_bytes(data[offset : offset + 8], "little")
    return f"it says that it has {end} bytes, and {size} came" if end > size else ""
