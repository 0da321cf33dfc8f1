"""The connection between the supervisors of two hosts: who may speak on it, and what a frame is.

Both sides prove with a challenge that they know the secret of the run; it never goes over the wire. After that each
frame carries its number and a code that only the two can make, so that nothing can be put in, left out or repeated.
Frames are lines of JSON of bounded length. Nothing is encrypted: what supervisors tell each other is in the run
directory as well.

The secret is a file in the run directory that only its owner can read, made by the head for each start, or the
variable UPS_LINK_SECRET on every host where the run directory is not private enough.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any

from ups.errors import MachineError
from ups.record.files import machine_errors, parse_object
from ups.record.run_dir import RunDir

SECRET_VARIABLE = "UPS_LINK_SECRET"  # noqa: S105 - the name of a variable
PROTOCOL = "ups-link-1"
HANDSHAKE_SECONDS = 5.0
_HANDSHAKE_BYTES = 2048
_FRAME_BYTES = 256 * 1024
_MIN_SECRET = 16


class LinkClosed(Exception):
    """The other side is gone, or said something that it must not."""


def make_secret(run_dir: Path) -> bytes:
    """The secret of this start of the run; for the head, which holds the run."""
    secret = _secret_variable()
    if secret is not None:
        return secret
    path = RunDir(run_dir).link_secret
    text = secrets.token_hex(32)
    with machine_errors(f"cannot write {path}"):
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
    return text.encode()


def read_secret(run_dir: Path) -> bytes | None:
    """The secret as another host sees it; None before the head wrote one. Raises MachineError if others can read it."""
    secret = _secret_variable()
    if secret is not None:
        return secret
    path = RunDir(run_dir).link_secret
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid != os.geteuid():
            raise MachineError(
                f"{path} is not a file that you alone can read",
                hint=f"remove it and start host 0 again, or set {SECRET_VARIABLE} on every host",
            )
        text = file.read(1024).strip()
    return text if len(text) >= _MIN_SECRET else None


def remove_secret(run_dir: Path) -> None:
    """After the verdict it is not needed any more."""
    with contextlib.suppress(OSError):
        RunDir(run_dir).link_secret.unlink()


def _secret_variable() -> bytes | None:
    text = os.environ.get(SECRET_VARIABLE, "")
    if not text:
        return None
    if len(text) < _MIN_SECRET:
        raise MachineError(
            f"{SECRET_VARIABLE} has {len(text)} characters, and less than {_MIN_SECRET} can be guessed",
            hint="make one with: openssl rand -hex 32",
        )
    return os.fsencode(text)


class Session:
    """One connection. After the handshake `send` and `receive` exchange objects; both may be used by other threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""
        self._keys = (b"", b"")  # of what is sent, of what is received
        self._numbers = [0, 0]
        self._sending = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def accept(self, secret: bytes) -> dict[str, Any]:
        """The head's side of the handshake; returns what the other says about itself. Raises LinkClosed."""
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        challenge = secrets.token_hex(32)
        self._write({"protocol": PROTOCOL, "challenge": challenge})
        answer = self._read(deadline)
        other, who = answer.get("challenge"), answer.get("who")
        if not isinstance(other, str) or not 32 <= len(other) <= 128 or not isinstance(who, dict):
            raise LinkClosed("it does not speak the protocol of a supervisor")
        about = json.dumps(who, sort_keys=True)
        if not _equal(answer.get("proof"), _code(secret, "follower", challenge, other, about)):
            raise LinkClosed("it does not know the secret of the run")
        self._write({"proof": _code(secret, "head", challenge, other, about)})
        self._make_keys(secret, challenge, other, ("head", "follower"))
        return who

    def introduce(self, secret: bytes, who: dict[str, Any]) -> None:
        """The follower's side of the handshake. Raises LinkClosed."""
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        first = self._read(deadline)
        challenge, own = first.get("challenge"), secrets.token_hex(32)
        if first.get("protocol") != PROTOCOL or not isinstance(challenge, str):
            raise LinkClosed(f"what listens there is no supervisor with protocol {PROTOCOL}")
        about = json.dumps(who, sort_keys=True)
        proof = _code(secret, "follower", challenge, own, about)
        self._write({"challenge": own, "who": who, "proof": proof})
        if not _equal(self._read(deadline).get("proof"), _code(secret, "head", challenge, own, about)):
            raise LinkClosed("what listens there does not know the secret of the run")
        self._make_keys(secret, challenge, own, ("follower", "head"))

    def send(self, message: dict[str, Any]) -> None:
        """Send one frame. Raises LinkClosed."""
        body = json.dumps(message, separators=(",", ":"))
        with self._sending:
            line = f"{_code(self._keys[0], str(self._numbers[0]), body)} {body}\n".encode()
            if len(line) > _FRAME_BYTES:
                raise LinkClosed(f"a frame of {len(line)} bytes is more than the other side reads")
            self._numbers[0] += 1
            try:
                self._socket.sendall(line)
            except OSError as error:
                raise LinkClosed(str(error)) from error

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The next frame, None if there is none within that time. Raises LinkClosed."""
        line = self._line(time.monotonic() + seconds, _FRAME_BYTES)
        if line is None:
            return None
        code, _, body = line.partition(b" ")
        text = body.decode(errors="replace")
        if not _equal(code.decode(errors="replace"), _code(self._keys[1], str(self._numbers[1]), text)):
            raise LinkClosed("a frame was not sent by the other supervisor")
        self._numbers[1] += 1
        return _object(text)

    def close(self) -> None:
        """Let go of the connection; who waits in `receive` is woken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _make_keys(self, secret: bytes, challenge: str, other: str, names: tuple[str, str]) -> None:
        own, its = (_code(secret, "frames", name, challenge, other).encode() for name in names)
        self._keys = (own, its)

    def _write(self, message: dict[str, Any]) -> None:
        try:
            self._socket.settimeout(HANDSHAKE_SECONDS)
            self._socket.sendall((json.dumps(message) + "\n").encode())
        except OSError as error:
            raise LinkClosed(str(error)) from error

    def _read(self, deadline: float) -> dict[str, Any]:
        line = self._line(deadline, _HANDSHAKE_BYTES)
        if line is None:
            raise LinkClosed(f"it said nothing for {HANDSHAKE_SECONDS:.0f} s")
        return _object(line.decode(errors="replace"))

    def _line(self, deadline: float, limit: int) -> bytes | None:
        while b"\n" not in self._buffer:
            if len(self._buffer) > limit:
                raise LinkClosed(f"a frame is longer than {limit} bytes")
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            try:
                self._socket.settimeout(left)
                content = self._socket.recv(65536)
            except TimeoutError:
                return None
            except OSError as error:
                raise LinkClosed(str(error)) from error
            if not content:
                raise LinkClosed("the other side has closed the connection")
            self._buffer += content
        line, _, self._buffer = self._buffer.partition(b"\n")
        if len(line) > limit:
            raise LinkClosed(f"a frame is longer than {limit} bytes")
        return line


def _code(key: bytes, *parts: str) -> str:
    # Lengths keep the parts apart: ("ab", "c") and ("a", "bc") are two things.
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return hmac.new(key, _bytes(text), "sha256").hexdigest()


def _equal(value: object, expected: str) -> bool:
    return isinstance(value, str) and hmac.compare_digest(_bytes(value), expected.encode())


def _bytes(text: str) -> bytes:
    """Of any text that JSON can hold: half of a surrogate pair as well, which is in no encoding."""
    return text.encode(errors="surrogatepass")


def _object(text: str) -> dict[str, Any]:
    try:
        return parse_object(text)
    except ValueError as error:
        raise LinkClosed(f"a frame cannot be used: {error}") from error
