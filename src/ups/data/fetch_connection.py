"""HTTP connections whose reads have an end: at a deadline, or when a person asks to stop (standard library).

A time-out of a socket begins anew with each byte, so a server that sends one now and then, or a header, a trailer or a
line of a chunk without an end, would hold a reader forever. Here a deadline holds for as many reads as it takes.
"""

from __future__ import annotations

import functools
import http.client
import io
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

# How long a stop request may go unnoticed.
POLL_SECONDS = 0.2


class Watch:
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


def handlers(watch: Watch) -> list[urllib.request.BaseHandler]:
    """For an opener of urllib whose answers are read under a watch; each answer's header has the whole time anew."""
    return [_Http(watch), _Https(watch)]


class _Http(urllib.request.HTTPHandler):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_connecting(http.client.HTTPConnection, self._watch), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_connecting(http.client.HTTPSConnection, self._watch), req)


def _connecting(kind: type[http.client.HTTPConnection], watch: Watch) -> Callable[..., http.client.HTTPConnection]:
    def connect(host: str, **options: Any) -> http.client.HTTPConnection:
        connection = kind(host, **options)
        connection.response_class = functools.partial(_Response, watch=watch)  # type: ignore[assignment]
        return connection

    return connect


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, watch: Watch, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        watch.renew()
        self.fp = io.BufferedReader(_Reads(sock, self.fp.detach(), watch))


class _Reads(io.RawIOBase):
    """The bytes of a socket. owner: what keeps the socket open, and closes it."""

    def __init__(self, sock: socket.socket, owner: io.RawIOBase, watch: Watch) -> None:
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
