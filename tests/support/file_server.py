"""A real HTTP server of one file on loopback that misbehaves on demand: cuts, stalls, lies, swaps the file.

`faults` says what the next answers do, one word each; when it is empty the server behaves. Words: `cut` (ends in the
middle), `stall` (says nothing more), `longer` (promises more than it has), `shorter` (promises less), `no_length`,
`no_range` (sends everything), `wrong_part`, `503`, `404`, `page` (HTML with status 200), `page_as_data`, `packed`,
`swap` (the other file from now on), `swap_unsaid` (the same, but it answers as if the file had not changed),
`redirect_away`.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PAGE = b"<html><body><h1>503 Service Unavailable</h1></body></html>"


@dataclass
class FileServer:
    """content: what is served; other: what it is swapped for. requests: the range that each request asked for. sent:
    bytes of all answers."""

    content: bytes
    other: bytes = b""
    faults: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    bytes_per_second: float = 0.0
    etags: bool = True
    url: str = ""
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def serve(content: bytes, **options: Any) -> Iterator[FileServer]:
    """A server on a free port, until the end of the block."""
    state = FileServer(content, **options)

    class Handler(_Handler):
        server_state = state

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    server_state: FileServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        state = self.server_state
        asked = self.headers.get("Range", "")
        with state.lock:
            state.requests.append(asked)
            # A question for the size is not what a fault is for.
            fault = "" if asked == "bytes=0-0" or not state.faults else state.faults.pop(0)
            before = _etag(state.content)
            if fault.startswith("swap"):
                state.content, state.other = state.other, state.content
            content = state.content
        self.close_connection = True
        if self._refused(fault):
            return
        start, stop, status = 0, len(content), 200
        matches = self.headers.get("If-Range") in (None, _etag(content)) or fault == "swap_unsaid"
        if asked and matches and fault != "no_range":
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, status = int(first), 206
            stop = min(int(last) + 1, len(content)) if last else len(content)
            if start >= len(content):
                self._plain(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
        if fault == "wrong_part":
            start, status = start + 7, 206
        body = content[start:stop]
        if fault == "page_as_data":
            body = PAGE
        promised = {"longer": len(body) + 5000, "shorter": len(body) // 2}.get(fault, len(body))
        headers = {} if fault == "no_length" else {"Content-Length": str(promised)}
        if state.etags:
            headers["ETag"] = before if fault == "swap_unsaid" else _etag(content)
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        if fault == "packed":
            headers["Content-Encoding"] = "gzip"
        self._send(status, headers, body[:promised], fault)

    def _refused(self, fault: str) -> bool:
        if fault in ("503", "404"):
            self._plain(int(fault), PAGE, {"Content-Type": "text/html"})
        elif fault == "page":
            self._plain(200, PAGE, {"Content-Type": "text/html; charset=utf-8"})
        elif fault == "redirect_away":
            self._plain(302, b"", {"Location": "file:///etc/passwd"})
        else:
            return False
        return True

    def _plain(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self._send(status, {**headers, "Content-Length": str(len(body))}, body, "")

    def _send(self, status: int, headers: dict[str, str], body: bytes, fault: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/x-hdf5", "Connection": "close", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if fault in ("cut", "stall"):
            body = body[: len(body) // 2]
        rate = self.server_state.bytes_per_second
        step = max(1, int(rate / 50)) if rate else len(body)
        try:
            for position in range(0, len(body), max(1, step)):
                self.wfile.write(body[position : position + step])
                self.server_state.sent += step
                if rate:
                    time.sleep(0.02)
            self.wfile.flush()
            if fault == "stall":
                time.sleep(5)
        except OSError:
            pass  # the other side was killed


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
