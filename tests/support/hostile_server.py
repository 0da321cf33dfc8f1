"""A server that says to each request whatever a test wants, and some ways to say it without an end."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

HEADER = b"\x89HDF\r\n\x1a\n" + bytes([0] * 5 + [8] + [0] * 26) + (100_000).to_bytes(8, "little") + bytes(16)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n" + HEADER + b"\r\n"
Talk = Callable[[socket.socket], None]


@contextlib.contextmanager
def serving(talk: Talk) -> Iterator[str]:
    """A server that says to each request whatever `talk` sends; its address."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=20)

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(20)
            heard = b""
            while b"\r\n\r\n" not in heard:
                heard += connection.recv(65536)
            talk(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=listener.accept()[:1], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def saying(text: bytes) -> Talk:
    return lambda connection: connection.sendall(text)


def endless(head: bytes, piece: bytes, gap_seconds: float = 0.05) -> Talk:
    def talk(connection: socket.socket) -> None:
        connection.sendall(head)
        until = time.monotonic() + 60
        while time.monotonic() < until:
            connection.sendall(piece)
            time.sleep(gap_seconds)

    return talk


SLOW = {
    "header": (b"HTTP/1.1 200 OK\r\nX: ", b"a"),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "trailer": (CHUNKED + b"0\r\n", b"a: b\r\n"),
    "chunk_extension": (CHUNKED + b"5;", b"a"),
}
